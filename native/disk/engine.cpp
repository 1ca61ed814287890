#include "disk/engine.h"

#include <algorithm>
#include <cerrno>
#include <exception>

namespace unbounded::disk {

namespace {

// Enough blocks for a rate that means something: 64 MiB, 16 ms on a disk of 4 GB/s.
constexpr std::uint64_t kWindowBlocks = 8;

EngineOptions normalised(EngineOptions options) {
  std::uint64_t grains = (options.block_bytes + kChecksumGrain - 1) / kChecksumGrain;
  options.block_bytes = std::max<std::uint64_t>(1, grains) * kChecksumGrain;
  options.num_threads = std::clamp(options.num_threads, 1u, 256u);
  options.queue_depth = std::clamp(options.queue_depth, 1u, 1024u);
  return options;
}

bool begin_all(const std::vector<Run>& runs) {
  for (std::size_t index = 0; index < runs.size(); ++index) {
    if (runs[index].file->begin()) continue;
    for (std::size_t begun = 0; begun < index; ++begun) runs[begun].file->end();
    return false;
  }
  return true;
}

}  // namespace

Engine::Engine(const EngineOptions& options) : options_(normalised(options)) {}

std::shared_ptr<Transfer> Engine::submit(Operation operation, std::vector<Run> runs) {
  if (!begin_all(runs)) return nullptr;
  auto transfer = std::make_shared<Transfer>(operation, std::move(runs));
  std::map<Key, std::vector<Block>> blocks;
  std::size_t num_blocks = 0;
  for (std::size_t index = 0; index < transfer->runs().size(); ++index) {
    const Run& run = transfer->runs()[index];
    for (const Piece& piece : split(run, run.file->direct(), options_.block_bytes)) {
      blocks[key_of(*run.file)].emplace_back(transfer, index, piece);
      ++num_blocks;
    }
  }
  transfer->expect(num_blocks);
  for (auto& [key, list] : blocks) launch(key, operation, list);
  return transfer;
}

void Engine::launch(const Key& key, Operation operation, std::vector<Block>& blocks) {
  int code = EBADF;
  try {
    if (auto target = lane(key, operation)) {
      target->submit(blocks);
      return;
    }
  } catch (const std::exception&) {
    code = EAGAIN;
  }
  for (Block& block : blocks) block.abandon(code);
}

Engine::Key Engine::key_of(const File& file) { return {file.device(), static_cast<int>(file.backend())}; }

std::shared_ptr<Lane> Engine::lane(const Key& key, Operation operation) {
  std::lock_guard lock(mutex_);
  if (closed_) return nullptr;
  Device& entry = devices_[key];
  std::shared_ptr<Lane>& slot = entry.lanes[static_cast<int>(operation)];
  if (slot == nullptr) slot = make_lane(operation, static_cast<Backend>(key.second), entry.meter);
  return slot;
}

std::shared_ptr<Lane> Engine::make_lane(Operation operation, Backend backend, const std::shared_ptr<Meter>& meter) const {
  LaneOptions options{options_.queue_depth, kWindowBlocks * options_.block_bytes,
                      operation == Operation::read ? "disk-read" : "disk-write", options_.niceness};
  int error = 0;
  if (backend == Backend::uring) {
    if (auto lane = make_uring_lane(options, meter, &error)) return lane;
  }
  options.max_width = options_.num_threads;
  return make_thread_lane(options, meter);
}

unsigned Engine::width(const File& file, Operation operation) {
  std::lock_guard lock(mutex_);
  auto entry = devices_.find(key_of(file));
  if (entry == devices_.end()) return 0;
  const auto& lane = entry->second.lanes[static_cast<int>(operation)];
  return lane == nullptr ? 0 : lane->width();
}

void Engine::close() {
  std::map<Key, Device> devices;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    devices.swap(devices_);
  }
}

}  // namespace unbounded::disk
