// One asynchronous transfer: what was asked (runs), how far it is, and the first thing that went wrong.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "disk/file.h"

namespace unbounded::disk {

enum class Operation : int { read = 0, write = 1 };

// Results that are not an errno; shared with the Python side.
inline constexpr int kShortRead = -1;
inline constexpr int kChecksumMismatch = -2;

// Contiguous bytes of one file and of memory. `sums` is one slot for every `grain` bytes, or null: a write puts the
// CRC32C of each there, a read is checked against them.
// `padded`: the file's bytes from the end of the run up to the next kAlignment belong to the run as well. They count
// as zeros, and a slot holds the difference (exclusive or) to the checksum of kAlignment zeros: the slots of a file
// that reads as zeros are zeros.
struct Run {
  std::shared_ptr<File> file;
  std::uint64_t offset = 0;
  char* data = nullptr;
  std::uint64_t length = 0;
  std::uint32_t* sums = nullptr;
  bool padded = false;
  std::size_t grain = kAlignment;
};

struct Failure {
  int code = 0;  // 0: none; > 0: errno; < 0: one of the results above
  std::uint64_t run = 0;
  std::uint64_t offset = 0;  // in the file
  std::uint64_t length = 0;
};

class Transfer {
 public:
  Transfer(Operation operation, std::vector<Run> runs);

  Operation operation() const { return operation_; }
  const std::vector<Run>& runs() const { return runs_; }

  // It is done after so many parts: blocks moved, and slices of checksums.
  void expect(std::size_t num_parts);
  void start();
  // Called for every part, or for several at once; the failure nearest to the transfer's start is kept.
  void complete(const Failure& failure, std::size_t num_parts = 1);

  bool done() const { return done_.load(std::memory_order_acquire); }
  bool wait_for(std::chrono::nanoseconds timeout);
  void wait();
  Failure failure() const;
  std::int64_t started_ns() const { return started_ns_.load(std::memory_order_relaxed); }
  std::int64_t finished_ns() const { return finished_ns_.load(std::memory_order_relaxed); }

 private:
  const Operation operation_;
  const std::vector<Run> runs_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::size_t pending_ = 0;
  Failure failure_;
  std::atomic<bool> done_{false};
  std::atomic<std::int64_t> started_ns_{0};
  std::atomic<std::int64_t> finished_ns_{0};
};

std::int64_t monotonic_ns();

}  // namespace unbounded::disk
