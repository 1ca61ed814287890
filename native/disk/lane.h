// One direction of one device: a queue of blocks and whatever carries them out. Two kinds: a group of
// threads that call preadv/pwritev, and one thread that owns an io_uring.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
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

class Lane {
 public:
  virtual ~Lane() = default;  // carries out what is queued, then ends its threads
  // Takes all of `blocks`, or throws (no thread could be started) and takes none.
  virtual void submit(std::vector<Block>& blocks) = 0;
  virtual unsigned width() const = 0;
};

using Meter = std::atomic<std::uint64_t>;  // bytes moved on the device, both directions

std::unique_ptr<Lane> make_thread_lane(const LaneOptions& options, std::shared_ptr<Meter> meter);
// Null, with `error` set to the errno, where io_uring is refused.
std::unique_ptr<Lane> make_uring_lane(const LaneOptions& options, std::shared_ptr<Meter> meter, int* error);

// Names the calling thread, sets its priority and keeps signals for the program's own threads.
void enter_lane_thread(const LaneOptions& options);

}  // namespace unbounded::disk
