// One direction of one device: a queue of blocks, and a group of threads that carry them out with preadv and pwritev.
//
// A thread moves the next block before it does any checksums, and some more threads than blocks are in flight do those
// meanwhile. In blocks of megabytes a system call costs nothing next to the transfer: an io_uring, measured on the same
// disks, was never faster.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "disk/block.h"
#include "disk/width.h"

namespace unbounded::disk {

struct LaneOptions {
  unsigned max_width;
  std::uint64_t window_bytes;
  const char* name;  // of its threads; at most 15 characters
  int niceness = 0;
};

using Meter = std::atomic<std::uint64_t>;  // bytes moved on the device, both directions

class Lane {
 public:
  Lane(const LaneOptions& options, std::shared_ptr<Meter> meter);
  ~Lane();  // carries out what is queued, then ends its threads
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Takes all of `blocks`, or throws (no thread could be started) and takes none.
  void submit(std::list<Block>& blocks);

 private:
  using Lock = std::unique_lock<std::mutex>;

  void grow(std::size_t num_more);
  void work();
  bool may_move() const;
  void move(Lock& lock, Bounce& bounce);
  void offer(std::list<Check>& check);
  void check(Lock& lock);
  void account(std::size_t length);

  const LaneOptions options_;
  const std::shared_ptr<Meter> meter_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::list<Block> queue_;
  std::list<Check> checks_;  // of blocks that are moved, or on their way to the disk
  std::vector<std::thread> threads_;
  Width width_;
  std::uint64_t lane_bytes_ = 0;
  unsigned num_active_ = 0;     // blocks in flight
  unsigned num_checkers_ = 0;  // threads besides those that move blocks
  bool stopping_ = false;
};

}  // namespace unbounded::disk
