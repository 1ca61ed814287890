// The disk engine: a pair of lanes (reads, writes) for every device that files are opened on.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "disk/lane.h"

namespace unbounded::disk {

struct EngineOptions {
  unsigned num_threads;  // the most threads a lane
  unsigned queue_depth;  // the most blocks in flight an io_uring lane
  std::uint64_t block_bytes;
  int niceness = 0;  // of the threads: above 0 they give way to the program's own
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options);

  // Null where the engine or a file is closed already. Grains of checksums divide the block size.
  // A lane whose io_uring the kernel refuses runs on threads.
  std::shared_ptr<Transfer> submit(Operation operation, std::vector<Run> runs);
  // The width that a file's lane has settled on; 0 where it has not been used.
  unsigned width(const File& file, Operation operation);
  // Carries out what was submitted and ends the threads; a second call does nothing.
  void close();

 private:
  using Key = std::pair<dev_t, int>;
  struct Device {
    std::shared_ptr<Meter> meter = std::make_shared<Meter>(0);
    std::shared_ptr<Lane> lanes[2];
  };

  static Key key_of(const File& file);
  void launch(const Key& key, Operation operation, std::vector<Block>& blocks);
  // Null once closed. Whoever holds the lane keeps it alive through a close().
  std::shared_ptr<Lane> lane(const Key& key, Operation operation);
  std::shared_ptr<Lane> make_lane(Operation operation, Backend backend, const std::shared_ptr<Meter>& meter) const;

  const EngineOptions options_;
  std::mutex mutex_;
  std::map<Key, Device> devices_;
  bool closed_ = false;
};

}  // namespace unbounded::disk
