#include "kernels/pool.h"

#include <cfenv>

namespace unbounded {
namespace {

// A job of fewer chunks is done before other threads are awake, and the caller would wait for one that has begun late.
constexpr int64_t FEW_CHUNKS = 8;

// Rounding and denormals follow IEEE while working, whatever the calling thread has set.
class FloatMode {
 public:
  FloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatMode() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
};

}  // namespace

Pool::Pool(int num_threads) : num_threads_(num_threads) {
  try {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { serve(); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  posted_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void Pool::work(Job& job) {
  FloatMode mode;
  for (int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.num_chunks;) job.chunk(job.context, i);
}

void Pool::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    posted_.wait(lock, [&] { return stopping_ || job_; });
    if (stopping_) return;
    Job& job = *job_;
    ++joined_;
    lock.unlock();
    work(job);
    lock.lock();
    if (job_ == &job) job_ = nullptr;  // no chunk is left, so nobody else needs to join
    if (--joined_ == 0) left_.notify_one();
  }
}

void Pool::run(int64_t num_chunks, Chunk chunk, void* context) {
  Job job{chunk, context, num_chunks};
  if (num_chunks < FEW_CHUNKS || num_threads_ == 1) return work(job);
  std::lock_guard turn(turn_);
  {
    std::lock_guard lock(mutex_);
    job_ = &job;
  }
  posted_.notify_all();
  work(job);
  std::unique_lock lock(mutex_);
  job_ = nullptr;
  left_.wait(lock, [&] { return joined_ == 0; });
}

}  // namespace unbounded
