// An open file: its descriptors (one with O_DIRECT if the filesystem allows it) and the transfers on it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace unbounded::disk {

// O_DIRECT wants memory, offset and length in multiples of the device's block; 4096 covers all in use.
inline constexpr std::size_t kAlignment = 4096;

class File {
 public:
  // Takes ownership of both descriptors. `direct_fd` is -1 if O_DIRECT is not to be used; it may equal
  // `fd`, and O_DIRECT is then removed from that descriptor if the filesystem refuses it later.
  // A `temporary` file is emptied when it is closed, since a forked child may have its descriptors for longer.
  File(int fd, int direct_fd, bool temporary);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  dev_t device() const { return device_; }
  bool direct() const { return direct_.load(std::memory_order_acquire); }
  int descriptor(bool direct) const { return direct ? direct_fd_ : fd_; }
  // Some filesystems accept O_DIRECT when opening and answer EINVAL to the transfer.
  void refuse_direct();

  // A transfer announces itself with begin(), which fails once the file is closing.
  bool begin();
  void end();
  int sync();
  // Waits for the transfers in flight, then closes; a second call does nothing.
  void close();

 private:
  const int fd_;
  const int direct_fd_;
  const bool temporary_;
  std::atomic<bool> direct_;
  dev_t device_ = 0;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::size_t in_flight_ = 0;
  bool closing_ = false;
  bool closed_ = false;
};

}  // namespace unbounded::disk
