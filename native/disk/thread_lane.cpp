#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

#include "disk/lane.h"

namespace unbounded::disk {

void enter_lane_thread(const LaneOptions& options) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), options.name);
  if (options.niceness <= 0) return;
  auto self = static_cast<id_t>(::gettid());  // on Linux a thread has a priority of its own; lowering it is never refused
  ::setpriority(PRIO_PROCESS, self, ::getpriority(PRIO_PROCESS, self) + options.niceness);
}

namespace {

std::int64_t carry_out(Operation operation, const Request& request) {
  iovec vector{request.data, request.length};
  auto offset = static_cast<off_t>(request.offset);
  ssize_t moved = operation == Operation::read ? ::preadv(request.fd, &vector, 1, offset)
                                               : ::pwritev(request.fd, &vector, 1, offset);
  return moved >= 0 ? moved : -errno;
}

class ThreadLane : public Lane {
 public:
  ThreadLane(const LaneOptions& options, std::shared_ptr<Meter> meter)
      : options_(options), meter_(std::move(meter)), width_(options.max_width, options.window_bytes) {}

  ~ThreadLane() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void submit(std::vector<Block>& blocks) override {
    std::lock_guard lock(mutex_);
    grow(blocks.size());
    for (Block& block : blocks) queue_.push_back(std::move(block));
    wake_.notify_all();
  }

  unsigned width() const override {
    std::lock_guard lock(mutex_);
    return width_.settled();
  }

 private:
  // Where the system gives no more threads, those there are do the work.
  void grow(std::size_t num_more) {
    if (stopping_) return;  // the destructor goes through threads_ without the mutex
    std::size_t wanted = std::min<std::size_t>(width_.now(), queue_.size() + num_active_ + num_more);
    try {
      while (threads_.size() < wanted) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;
    }
  }

  void work() {
    enter_lane_thread(options_);
    Bounce bounce;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || (!queue_.empty() && num_active_ < width_.now()); });
      if (queue_.empty()) return;
      Block block = std::move(queue_.front());
      queue_.pop_front();
      ++num_active_;
      lock.unlock();
      std::size_t length = block.length();
      run(block, bounce);
      lock.lock();
      --num_active_;
      account(length);
    }
  }

  static void run(Block& block, Bounce& bounce) {
    bool more = block.prepare(bounce);
    while (more) more = block.advance(carry_out(block.operation(), block.request()));
    block.finish();
  }

  void account(std::size_t length) {
    lane_bytes_ += length;
    std::uint64_t device_bytes = meter_->fetch_add(length) + length;
    unsigned before = width_.now();
    width_.completed(lane_bytes_, device_bytes, monotonic_ns(), queue_.size() + num_active_);
    if (width_.now() > before) {
      grow(0);
      wake_.notify_all();
    }
  }

  const LaneOptions options_;
  const std::shared_ptr<Meter> meter_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Block> queue_;
  std::vector<std::thread> threads_;
  Width width_;
  std::uint64_t lane_bytes_ = 0;
  unsigned num_active_ = 0;
  bool stopping_ = false;
};

}  // namespace

std::unique_ptr<Lane> make_thread_lane(const LaneOptions& options, std::shared_ptr<Meter> meter) {
  return std::make_unique<ThreadLane>(options, std::move(meter));
}

}  // namespace unbounded::disk
