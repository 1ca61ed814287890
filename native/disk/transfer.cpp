#include "disk/transfer.h"

#include <utility>

namespace unbounded::disk {

std::int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

namespace {

// Blocks end in any order; the failure that is reported is the first in the transfer, not in time.
bool comes_first(const Failure& failure, const Failure& known) {
  return known.code == 0 || std::pair(failure.run, failure.offset) < std::pair(known.run, known.offset);
}

}  // namespace

Transfer::Transfer(Operation operation, std::vector<Run> runs) : operation_(operation), runs_(std::move(runs)) {}

void Transfer::expect(std::size_t num_parts) {
  std::lock_guard lock(mutex_);
  pending_ = num_parts;
  if (num_parts > 0) return;
  done_.store(true, std::memory_order_release);
  for (const Run& run : runs_) run.file->end();
}

void Transfer::start() {
  std::int64_t unset = 0;
  started_ns_.compare_exchange_strong(unset, monotonic_ns(), std::memory_order_relaxed);
}

void Transfer::complete(const Failure& failure, std::size_t num_parts) {
  std::lock_guard lock(mutex_);
  if (failure.code != 0 && comes_first(failure, failure_)) failure_ = failure;
  pending_ -= num_parts;
  if (pending_ > 0) return;
  finished_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  done_.store(true, std::memory_order_release);
  finished_.notify_all();
  for (const Run& run : runs_) run.file->end();  // last: a file that has closed has only finished transfers
}

bool Transfer::wait_for(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, timeout, [this] { return done(); });
}

void Transfer::wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return done(); });
}

Failure Transfer::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace unbounded::disk
