#include "disk/lane.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

namespace unbounded::disk {

namespace {

// Names the calling thread, sets its priority and keeps signals for the program's own threads.
void enter_thread(const LaneOptions& options) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), options.name);
  if (options.niceness <= 0) return;
  auto self = static_cast<id_t>(::gettid());  // on Linux a thread has its own priority; lowering it is never refused
  ::setpriority(PRIO_PROCESS, self, ::getpriority(PRIO_PROCESS, self) + options.niceness);
}

std::int64_t carry_out(Operation operation, const Request& request) {
  auto offset = static_cast<off_t>(request.offset);
  ssize_t moved = operation == Operation::read ? ::preadv(request.fd, request.parts.data(), request.num_parts, offset)
                                               : ::pwritev(request.fd, request.parts.data(), request.num_parts, offset);
  return moved >= 0 ? moved : -errno;
}

// Two keep up with a disk of 15 GB/s. At the end of a transfer all threads share what is left.
constexpr unsigned kNumCheckers = 2;

void run(Block& block, Bounce& bounce) {
  bool more = block.prepare(bounce);
  while (more) more = block.advance(carry_out(block.operation(), block.request()));
  block.land();
}

}  // namespace

Lane::Lane(const LaneOptions& options, std::shared_ptr<Meter> meter)
    : options_(options), meter_(std::move(meter)), width_(options.max_width, options.window_bytes) {}

Lane::~Lane() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Lane::submit(std::list<Block>& blocks) {
  std::lock_guard lock(mutex_);
  if (std::any_of(blocks.begin(), blocks.end(), [](Block& block) { return !block.check().empty(); }))
    num_checkers_ = kNumCheckers;
  grow(blocks.size());
  queue_.splice(queue_.end(), blocks);
  wake_.notify_all();
}

// If the system gives no more threads or memory, the existing ones do the work.
void Lane::grow(std::size_t num_more) {
  if (stopping_) return;  // the destructor iterates over threads_ without the mutex
  std::size_t wanted = std::min<std::size_t>(width_.now(), queue_.size() + num_active_ + num_more) + num_checkers_;
  try {
    while (threads_.size() < wanted) threads_.emplace_back([this] { work(); });
  } catch (const std::exception&) {
    if (threads_.empty()) throw;
  }
}

bool Lane::may_move() const { return !queue_.empty() && (stopping_ || num_active_ < width_.now()); }

void Lane::work() {
  enter_thread(options_);
  Bounce bounce;
  Lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || may_move() || !checks_.empty(); });
    if (may_move()) {
      move(lock, bounce);
    } else if (!checks_.empty()) {
      check(lock);
    } else {
      return;
    }
  }
}

void Lane::move(Lock& lock, Bounce& bounce) {
  std::list<Block> taken;
  taken.splice(taken.begin(), queue_, queue_.begin());
  Block& block = taken.front();
  ++num_active_;
  if (block.operation() == Operation::write) offer(block.check());
  lock.unlock();
  run(block, bounce);
  lock.lock();
  --num_active_;
  account(block.length());
  if (block.is_moved()) offer(block.check());
  lock.unlock();
  block.finish();
  lock.lock();
}

// The calling thread may go on to move another block, so others are woken.
void Lane::offer(std::list<Check>& check) {
  if (check.empty()) return;
  checks_.splice(checks_.end(), check);
  wake_.notify_all();
}

void Lane::check(Lock& lock) {
  Slice slice = checks_.front().take();
  if (checks_.front().num_left() == 0) checks_.pop_front();
  lock.unlock();
  slice.carry_out();
  lock.lock();
}

void Lane::account(std::size_t length) {
  lane_bytes_ += length;
  std::uint64_t device_bytes = meter_->fetch_add(length) + length;
  unsigned before = width_.now();
  width_.completed(lane_bytes_, device_bytes, monotonic_ns(), queue_.size() + num_active_);
  if (width_.now() > before) {
    grow(0);
    wake_.notify_all();
  }
}

}  // namespace unbounded::disk
