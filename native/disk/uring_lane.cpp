#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "disk/lane.h"
#include "disk/ring.h"

namespace unbounded::disk {

namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};

// A block in flight; the kernel reads `vector` until the completion, so a slot never moves.
struct Slot {
  std::optional<Block> block;
  iovec vector{};
  Bounce bounce;
};

class UringLane : public Lane {
 public:
  UringLane(const LaneOptions& options, std::shared_ptr<Meter> meter)
      : options_(options), meter_(std::move(meter)), width_(options.max_width, options.window_bytes), slots_(options.max_width) {}

  int start() {
    wake_fd_ = ::eventfd(0, EFD_CLOEXEC);
    if (wake_fd_ < 0) return errno;
    if (int code = ring_.open(options_.max_width + 1); code != 0) return code;
    for (std::size_t slot = 0; slot < slots_.size(); ++slot) free_slots_.push_back(slot);
    thread_ = std::thread([this] { work(); });
    return 0;
  }

  ~UringLane() override {
    if (thread_.joinable()) {
      {
        std::lock_guard lock(mutex_);
        stopping_ = true;
      }
      wake();
      thread_.join();
    }
    if (wake_fd_ >= 0) ::close(wake_fd_);
  }

  void submit(std::vector<Block>& blocks) override {
    {
      std::lock_guard lock(mutex_);
      for (Block& block : blocks) queue_.push_back(std::move(block));
    }
    wake();
  }

  unsigned width() const override {
    std::lock_guard lock(mutex_);
    return width_.settled();
  }

 private:
  void wake() {
    std::uint64_t one = 1;
    while (::write(wake_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void work() {
    enter_lane_thread(options_);
    ring_.push_poll(wake_fd_, kWakeTag);
    while (launch()) {
      // EAGAIN and EBUSY: the kernel is short of memory or completions wait to be taken; both pass.
      int code = ring_.enter(true);
      if (code != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      Completion completion{};
      while (ring_.pop(&completion)) take(completion);
    }
  }

  // Fills the free width from the queue. False: stopping, and nothing is left.
  bool launch() {
    for (;;) {
      std::unique_lock lock(mutex_);
      if (num_active() == 0 && queue_.empty() && stopping_) return false;
      if (queue_.empty() || num_active() >= width_.now()) return true;
      std::size_t index = free_slots_.back();
      free_slots_.pop_back();
      Slot& slot = slots_[index];
      slot.block.emplace(std::move(queue_.front()));
      queue_.pop_front();
      lock.unlock();
      if (slot.block->prepare(slot.bounce)) {
        push(index);
        ring_.enter(false);  // at once: preparing the next block may take a while
      } else {
        retire(index);
      }
    }
  }

  void push(std::size_t index) {
    Slot& slot = slots_[index];
    Request request = slot.block->request();
    slot.vector = {request.data, request.length};
    if (slot.block->operation() == Operation::read) {
      ring_.push_read(request.fd, &slot.vector, request.offset, index);
    } else {
      ring_.push_write(request.fd, &slot.vector, request.offset, index);
    }
  }

  void take(const Completion& completion) {
    if (completion.tag == kWakeTag) {
      std::uint64_t count = 0;
      while (::read(wake_fd_, &count, sizeof count) < 0 && errno == EINTR) {
      }
      ring_.push_poll(wake_fd_, kWakeTag);
      return;
    }
    auto index = static_cast<std::size_t>(completion.tag);
    if (slots_[index].block->advance(completion.result)) {
      push(index);
    } else {
      retire(index);
    }
  }

  void retire(std::size_t index) {
    Slot& slot = slots_[index];
    std::size_t length = slot.block->length();
    slot.block->finish();
    slot.block.reset();
    std::lock_guard lock(mutex_);
    free_slots_.push_back(index);
    lane_bytes_ += length;
    std::uint64_t device_bytes = meter_->fetch_add(length) + length;
    width_.completed(lane_bytes_, device_bytes, monotonic_ns(), queue_.size() + num_active());
  }

  std::size_t num_active() const { return slots_.size() - free_slots_.size(); }

  const LaneOptions options_;
  const std::shared_ptr<Meter> meter_;
  mutable std::mutex mutex_;
  std::deque<Block> queue_;
  Width width_;
  std::uint64_t lane_bytes_ = 0;
  bool stopping_ = false;
  std::vector<Slot> slots_;
  std::vector<std::size_t> free_slots_;
  Ring ring_;
  int wake_fd_ = -1;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Lane> make_uring_lane(const LaneOptions& options, std::shared_ptr<Meter> meter, int* error) {
  auto lane = std::make_unique<UringLane>(options, std::move(meter));
  *error = lane->start();
  if (*error != 0) return nullptr;
  return lane;
}

}  // namespace unbounded::disk
