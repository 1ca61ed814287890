// Threads that share the chunks of one job at a time, and sleep when there is none.
//
// The caller works too, so a pool of n threads starts n - 1. Callers on one pool take turns. A job never waits for a
// sleeping thread: a thread joins while chunks are left, and the caller waits only for those that joined.
//
// A pool belongs to the process that made it. A forked child has a copy without threads, which it must neither use nor
// destroy: destroying a condition variable waits for those who wait on it. The caller of the C ABI sees to that.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace unbounded {

class Pool {
 public:
  using Chunk = void (*)(void* context, int64_t chunk);

  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }
  void run(int64_t num_chunks, Chunk chunk, void* context);

 private:
  struct Job {
    Chunk chunk;
    void* context;
    int64_t num_chunks;
    std::atomic<int64_t> next{0};
  };

  void serve();
  static void work(Job& job);
  void stop();

  const int num_threads_;
  std::mutex turn_;                   // held by the caller whose job it is
  std::mutex mutex_;                  // guards what follows
  std::condition_variable posted_, left_;
  Job* job_ = nullptr;
  int joined_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace unbounded
