// io_uring by its system calls alone: a ring owned by one thread.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

struct io_uring_sqe;
struct io_uring_cqe;

namespace unbounded::disk {

struct Completion {
  std::uint64_t tag;
  std::int32_t result;
};

class Ring {
 public:
  Ring() = default;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // 0 or the errno with which the kernel refuses.
  int open(unsigned num_entries);
  // The entry is read by the kernel at the next enter(); `vector` must live until its completion.
  void push_read(int fd, const iovec* vector, std::uint64_t offset, std::uint64_t tag);
  void push_write(int fd, const iovec* vector, std::uint64_t offset, std::uint64_t tag);
  void push_poll(int fd, std::uint64_t tag);
  void push_nop(std::uint64_t tag);
  // Submits what was pushed and waits for a completion. 0 or errno.
  int enter(bool wait);
  bool pop(Completion* completion);

 private:
  io_uring_sqe* push(std::uint64_t tag);
  void unmap();

  int fd_ = -1;
  void* ring_ = nullptr;
  void* completion_ring_ = nullptr;
  std::size_t ring_bytes_ = 0, completion_ring_bytes_ = 0, entries_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  io_uring_cqe* completions_ = nullptr;
  unsigned *head_ = nullptr, *tail_ = nullptr, *completion_head_ = nullptr, *completion_tail_ = nullptr;
  unsigned* indices_ = nullptr;
  unsigned mask_ = 0, completion_mask_ = 0, num_pushed_ = 0;
};

// Whether this process may use io_uring, by a submission that does nothing: 0 or the errno.
int probe_ring();

}  // namespace unbounded::disk
