#include "disk/ring.h"

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace unbounded::disk {

namespace {

// The same numbers on every architecture; old C libraries lack the names.
constexpr long kSetup = 425, kEnter = 426;

void* map(int fd, std::size_t bytes, off_t offset) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
  return address == MAP_FAILED ? nullptr : address;
}

template <typename T>
T* at(void* base, unsigned offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

Ring::~Ring() { unmap(); }

void Ring::unmap() {
  if (entries_ != nullptr) ::munmap(entries_, entries_bytes_);
  if (completion_ring_ != nullptr && completion_ring_ != ring_) ::munmap(completion_ring_, completion_ring_bytes_);
  if (ring_ != nullptr) ::munmap(ring_, ring_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

int Ring::open(unsigned num_entries) {
  io_uring_params params{};
  fd_ = static_cast<int>(::syscall(kSetup, num_entries, &params));
  if (fd_ < 0) return errno;
  ring_bytes_ = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  completion_ring_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  bool one_mapping = (params.features & IORING_FEAT_SINGLE_MMAP) != 0;
  if (one_mapping) ring_bytes_ = completion_ring_bytes_ = std::max(ring_bytes_, completion_ring_bytes_);
  ring_ = map(fd_, ring_bytes_, IORING_OFF_SQ_RING);
  completion_ring_ = one_mapping ? ring_ : map(fd_, completion_ring_bytes_, IORING_OFF_CQ_RING);
  entries_ = static_cast<io_uring_sqe*>(map(fd_, entries_bytes_, IORING_OFF_SQES));
  if (ring_ == nullptr || completion_ring_ == nullptr || entries_ == nullptr) return ENOMEM;
  head_ = at<unsigned>(ring_, params.sq_off.head);
  tail_ = at<unsigned>(ring_, params.sq_off.tail);
  mask_ = *at<unsigned>(ring_, params.sq_off.ring_mask);
  indices_ = at<unsigned>(ring_, params.sq_off.array);
  completion_head_ = at<unsigned>(completion_ring_, params.cq_off.head);
  completion_tail_ = at<unsigned>(completion_ring_, params.cq_off.tail);
  completion_mask_ = *at<unsigned>(completion_ring_, params.cq_off.ring_mask);
  completions_ = at<io_uring_cqe>(completion_ring_, params.cq_off.cqes);
  return 0;
}

io_uring_sqe* Ring::push(std::uint64_t tag) {
  unsigned tail = *tail_, index = tail & mask_;
  io_uring_sqe* entry = &entries_[index];
  std::memset(entry, 0, sizeof *entry);
  entry->user_data = tag;
  indices_[index] = index;
  __atomic_store_n(tail_, tail + 1, __ATOMIC_RELEASE);
  ++num_pushed_;
  return entry;
}

void Ring::push_read(int fd, const iovec* vector, std::uint64_t offset, std::uint64_t tag) {
  io_uring_sqe* entry = push(tag);
  entry->opcode = IORING_OP_READV;
  entry->fd = fd;
  entry->addr = reinterpret_cast<std::uint64_t>(vector);
  entry->len = 1;
  entry->off = offset;
}

void Ring::push_write(int fd, const iovec* vector, std::uint64_t offset, std::uint64_t tag) {
  push_read(fd, vector, offset, tag);
  entries_[(*tail_ - 1) & mask_].opcode = IORING_OP_WRITEV;
}

void Ring::push_poll(int fd, std::uint64_t tag) {
  io_uring_sqe* entry = push(tag);
  entry->opcode = IORING_OP_POLL_ADD;
  entry->fd = fd;
  entry->poll_events = POLLIN;
}

void Ring::push_nop(std::uint64_t tag) { push(tag)->opcode = IORING_OP_NOP; }

int Ring::enter(bool wait) {
  for (;;) {
    unsigned flags = wait ? IORING_ENTER_GETEVENTS : 0;
    long taken = ::syscall(kEnter, fd_, num_pushed_, wait ? 1u : 0u, flags, nullptr, 0);
    if (taken < 0 && errno == EINTR) continue;
    if (taken < 0) return errno;
    num_pushed_ -= static_cast<unsigned>(taken);
    return 0;
  }
}

bool Ring::pop(Completion* completion) {
  unsigned head = *completion_head_;
  if (head == __atomic_load_n(completion_tail_, __ATOMIC_ACQUIRE)) return false;
  const io_uring_cqe& entry = completions_[head & completion_mask_];
  *completion = {entry.user_data, entry.res};
  __atomic_store_n(completion_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

int probe_ring() {
  Ring ring;
  if (int code = ring.open(2); code != 0) return code;
  ring.push_nop(1);
  if (int code = ring.enter(true); code != 0) return code;
  Completion completion{};
  return ring.pop(&completion) && completion.tag == 1 ? 0 : EIO;
}

}  // namespace unbounded::disk
