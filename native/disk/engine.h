// The disk engine: a pair of lanes (reads, writes) for every device that files are opened on.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "disk/lane.h"

namespace unbounded::disk {

struct EngineOptions {
  unsigned num_threads;  // the most a lane
  std::uint64_t block_bytes;
  int niceness = 0;  // of the threads: above 0 they give way to the program's own
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options);

  // Null if the engine or a file is already closed. Grains of checksums divide the block size.
  std::shared_ptr<Transfer> submit(Operation operation, std::vector<Run> runs);
  // Carries out what was submitted and ends the threads; a second call does nothing.
  void close();

 private:
  struct Device {
    std::shared_ptr<Meter> meter = std::make_shared<Meter>(0);
    std::shared_ptr<Lane> lanes[2];
  };

  void launch(dev_t device, Operation operation, std::list<Block>& blocks);
  // Null once closed. Whoever holds the lane keeps it alive through a close().
  std::shared_ptr<Lane> lane(dev_t device, Operation operation);

  const EngineOptions options_;
  std::mutex mutex_;
  std::map<dev_t, Device> devices_;
  bool closed_ = false;
};

}  // namespace unbounded::disk
