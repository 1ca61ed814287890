#include "disk/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace unbounded::disk {

File::File(int fd, int direct_fd, bool temporary)
    : fd_(fd), direct_fd_(direct_fd), temporary_(temporary), direct_(direct_fd >= 0) {
  struct stat status {};
  if (::fstat(fd, &status) == 0) device_ = status.st_dev;
}

File::~File() { close(); }

void File::refuse_direct() {
  std::lock_guard lock(mutex_);
  if (!direct_.load()) return;
  if (fd_ == direct_fd_) {
    int flags = ::fcntl(fd_, F_GETFL);
    if (flags >= 0) ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT);
  }
  direct_.store(false, std::memory_order_release);
}

bool File::begin() {
  std::lock_guard lock(mutex_);
  if (closing_) return false;
  ++in_flight_;
  return true;
}

void File::end() {
  std::lock_guard lock(mutex_);
  if (--in_flight_ == 0) idle_.notify_all();
}

int File::sync() {
  if (!begin()) return EBADF;
  int code = 0;
  do code = ::fsync(fd_) == 0 ? 0 : errno;
  while (code == EINTR);
  end();
  return code;
}

void File::close() {
  std::unique_lock lock(mutex_);
  closing_ = true;
  idle_.wait(lock, [this] { return in_flight_ == 0; });
  if (closed_) return;
  closed_ = true;
  if (temporary_ && ::ftruncate(fd_, 0) != 0) {
    // The space comes back with the last descriptor.
  }
  if (direct_fd_ >= 0 && direct_fd_ != fd_) ::close(direct_fd_);
  ::close(fd_);
}

}  // namespace unbounded::disk
