// The pool: every chunk once, callers taking turns, many pools, and the caller's floating-point mode.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "kernel_check.h"
#include "kernels/pool.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace unbounded;

namespace {

void every_chunk_runs_once(Pool& pool, int64_t num_chunks) {
  std::vector<std::atomic<int>> counts(static_cast<size_t>(num_chunks));
  pool.run(num_chunks, [](void* context, int64_t i) { (*static_cast<decltype(counts)*>(context))[size_t(i)]++; }, &counts);
  for (auto& count : counts) CHECK(count == 1);
}

void callers_take_turns() {
  Pool pool(3);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int64_t n = 0; n < 200; ++n) every_chunk_runs_once(pool, n % 37);
    });
  for (auto& caller : callers) caller.join();
}

void pools_come_and_go() {
  for (int i = 0; i < 50; ++i) {
    Pool pool(1 + i % 5);
    every_chunk_runs_once(pool, i);
  }
}

// However long its chunks take: who would wait for a thread that has just woken up, waits longer than they take.
void few_chunks_wake_nobody() {
  Pool pool(4);
  const auto caller = std::this_thread::get_id();
  std::vector<std::thread::id> ran(7);
  for (int round = 0; round < 5; ++round) {
    pool.run(7, [](void* context, int64_t i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      (*static_cast<std::vector<std::thread::id>*>(context))[size_t(i)] = std::this_thread::get_id();
    }, &ran);
    for (auto id : ran) CHECK(id == caller);
  }
}

void denormals_are_kept() {
#if defined(__x86_64__)
  Pool pool(2);
  std::vector<float> products(64);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // flush results and inputs to zero, as torch.set_flush_denormal does
  const unsigned set = _mm_getcsr();
  pool.run(64, [](void* context, int64_t i) {
    volatile float small = 1e-30f;
    (*static_cast<std::vector<float>*>(context))[size_t(i)] = small * 1e-10f;
  }, &products);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK(after == set);
  for (float product : products) CHECK(product > 0);
#endif
}

}  // namespace

int main() {
  for (int threads : {1, 2, 4, 7}) {
    Pool pool(threads);
    for (int64_t n : {0, 1, 2, 3, 100, 1000}) every_chunk_runs_once(pool, n);
  }
  callers_take_turns();
  pools_come_and_go();
  few_chunks_wake_nobody();
  denormals_are_kept();
  std::printf("the pool holds\n");
}
