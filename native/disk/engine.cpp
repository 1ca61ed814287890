#include "disk/engine.h"

#include <algorithm>
#include <cerrno>
#include <exception>

namespace unbounded::disk {

namespace {

// Enough blocks for a rate that means something: 64 MiB, 16 ms on a disk of 4 GB/s.
constexpr std::uint64_t kWindowBlocks = 8;
// Blocks are multiples of this, so that a grain of checksums up to this size lies in one block.
constexpr std::uint64_t kBlockGrain = 64 * 1024;

EngineOptions normalised(EngineOptions options) {
  std::uint64_t grains = (options.block_bytes + kBlockGrain - 1) / kBlockGrain;
  options.block_bytes = std::max<std::uint64_t>(1, grains) * kBlockGrain;
  options.num_threads = std::clamp(options.num_threads, 1u, 256u);
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

// What may throw comes first: a transfer that has begun ends its files only when all its blocks are over.
std::shared_ptr<Transfer> Engine::submit(Operation operation, std::vector<Run> runs) {
  auto transfer = std::make_shared<Transfer>(operation, std::move(runs));
  std::map<dev_t, std::list<Block>> blocks;
  std::size_t num_parts = 0;
  for (std::size_t index = 0; index < transfer->runs().size(); ++index) {
    const Run& run = transfer->runs()[index];
    for (const Piece& piece : split(run, run.file->direct(), options_.block_bytes)) {
      num_parts += blocks[run.file->device()].emplace_back(transfer, index, piece).num_parts();
    }
  }
  if (!begin_all(transfer->runs())) return nullptr;
  transfer->expect(num_parts);
  for (auto& [device, list] : blocks) launch(device, operation, list);
  return transfer;
}

void Engine::launch(dev_t device, Operation operation, std::list<Block>& blocks) {
  int code = EBADF;
  try {
    if (auto target = lane(device, operation)) {
      target->submit(blocks);
      return;
    }
  } catch (const std::exception&) {
    code = EAGAIN;
  }
  for (Block& block : blocks) block.abandon(code);
}

std::shared_ptr<Lane> Engine::lane(dev_t device, Operation operation) {
  std::lock_guard lock(mutex_);
  if (closed_) return nullptr;
  Device& entry = devices_[device];
  std::shared_ptr<Lane>& slot = entry.lanes[static_cast<int>(operation)];
  if (slot == nullptr) {
    LaneOptions options{options_.num_threads, kWindowBlocks * options_.block_bytes,
                        operation == Operation::read ? "disk-read" : "disk-write", options_.niceness};
    slot = std::make_shared<Lane>(options, entry.meter);
  }
  return slot;
}

void Engine::close() {
  std::map<dev_t, Device> devices;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    devices.swap(devices_);
  }
}

}  // namespace unbounded::disk
