// The C ABI of host memory: anonymous mappings, aligned, with huge pages if the system allows them.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <thread>
#include <vector>

#define UNBOUNDED_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14
constexpr int kWipeOnFork = 18;     // MADV_WIPEONFORK, Linux 4.14

std::uintptr_t round_up(std::uintptr_t value, std::uintptr_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Adding zero atomically makes a page present without changing it, even while others write to it.
void touch_pages(char* data, std::uint64_t length, std::uint64_t page) {
  for (std::uint64_t at = 0; at < length; at += page) std::atomic_ref<char>(data[at]).fetch_add(0, std::memory_order_relaxed);
  if (length > 0) std::atomic_ref<char>(data[length - 1]).fetch_add(0, std::memory_order_relaxed);
}

void fault_in(char* data, std::uint64_t length, std::uint64_t page) {
  auto address = reinterpret_cast<std::uintptr_t>(data);
  std::uintptr_t begin = address / page * page, end = round_up(address + length, page);
  if (::madvise(reinterpret_cast<void*>(begin), end - begin, kPopulateWrite) == 0) return;
  touch_pages(data, length, page);
}

}  // namespace

// Null with *error set if there is no memory. The ends that alignment does not need are unmapped.
UNBOUNDED_API void* unbounded_memory_map(std::uint64_t length, std::uint64_t alignment, int huge, int* error) {
  std::uint64_t page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::uint64_t bytes = round_up(length, page);
  std::uint64_t slack = alignment > page ? alignment : 0;
  void* raw = ::mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    *error = errno;
    return nullptr;
  }
  auto base = reinterpret_cast<std::uintptr_t>(raw);
  std::uintptr_t start = slack > 0 ? round_up(base, alignment) : base;
  if (start > base) ::munmap(raw, start - base);
  std::uintptr_t end = base + bytes + slack;
  if (end > start + bytes) ::munmap(reinterpret_cast<void*>(start + bytes), end - start - bytes);
  if (huge != 0) ::madvise(reinterpret_cast<void*>(start), bytes, MADV_HUGEPAGE);
  // A forked child finds zeros. Shared with it, every page that the parent writes afterwards would be held twice, and
  // one that a disk or a GPU fills at that moment could end up with the child alone.
  ::madvise(reinterpret_cast<void*>(start), bytes, kWipeOnFork);
  *error = 0;
  return reinterpret_cast<void*>(start);
}

UNBOUNDED_API int unbounded_memory_unmap(void* data, std::uint64_t length) {
  std::uint64_t page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return ::munmap(data, round_up(length, page)) == 0 ? 0 : errno;
}

UNBOUNDED_API void unbounded_memory_touch(void* data, std::uint64_t length, unsigned num_threads) {
  auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  constexpr std::uint64_t kShare = std::uint64_t{64} << 20;
  std::atomic<std::uint64_t> next{0};
  auto work = [&] {
    for (std::uint64_t at = next.fetch_add(kShare); at < length; at = next.fetch_add(kShare))
      fault_in(static_cast<char*>(data) + at, std::min(kShare, length - at), page);
  };
  std::vector<std::thread> threads;
  std::uint64_t useful = std::min<std::uint64_t>(num_threads, (length + kShare - 1) / kShare);
  try {
    for (std::uint64_t i = 1; i < useful; ++i) threads.emplace_back(work);
  } catch (...) {  // fewer threads do it too
  }
  work();
  for (std::thread& thread : threads) thread.join();
}
