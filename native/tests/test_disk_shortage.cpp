// What the system refuses in the middle of a transfer: O_DIRECT, memory at every allocation of a submission, a call that a
// signal interrupts. Calls of the system are replaced here; the C ABI is included, because it allocates as well.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

#include "capi/disk.cpp"
#include "disk_check.h"

namespace {

constexpr std::uint64_t kBlockBytes = 64 << 10, kNumBlocks = 4, kFileBytes = kNumBlocks * kBlockBytes;

thread_local int allocations_left = -1;  // of this thread, until one fails; negative: any number
std::atomic<int> direct_calls_to_refuse{0};
std::atomic<bool> reads_are_held{false};
std::atomic<int> num_reads{0};
std::atomic<int> syncs_to_interrupt{0};

void* allocate(std::size_t bytes) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  void* memory = std::malloc(bytes);
  CHECK(memory != nullptr);
  return memory;
}

ssize_t carry_out(long number, int fd, const iovec* parts, int num_parts, off_t offset) {
  if (direct_calls_to_refuse > 0 && (::fcntl(fd, F_GETFL) & O_DIRECT) != 0) {
    --direct_calls_to_refuse;
    while (direct_calls_to_refuse > 0) std::this_thread::yield();  // all of them have begun before one is refused
    errno = EINVAL;
    return -1;
  }
  return ::syscall(number, fd, parts, num_parts, offset, 0L);
}

}  // namespace

// Not inline: the compiler would warn of memory of `new` that is given to `free`.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return allocate(bytes); }
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" ssize_t pwritev(int fd, const iovec* parts, int num_parts, off_t offset) {
  return carry_out(SYS_pwritev, fd, parts, num_parts, offset);
}

extern "C" ssize_t preadv(int fd, const iovec* parts, int num_parts, off_t offset) {
  ++num_reads;
  while (reads_are_held) std::this_thread::yield();
  return carry_out(SYS_preadv, fd, parts, num_parts, offset);
}

extern "C" int fsync(int fd) {
  if (syncs_to_interrupt == 0) return static_cast<int>(::syscall(SYS_fsync, fd));
  --syncs_to_interrupt;
  errno = EINTR;
  return -1;
}

namespace {

struct OpenFile {
  void* handle;
  ~OpenFile() { unbounded_disk_file_release(handle); }
};

OpenFile open_file(bool direct) {
  char name[] = "./disk-test-XXXXXX";
  int fd = ::mkstemp(name);
  CHECK(fd >= 0);
  int direct_fd = direct ? ::open(name, O_RDWR | O_DIRECT | O_CLOEXEC) : -1;
  ::unlink(name);
  CHECK(::ftruncate(fd, kFileBytes) == 0);
  return {unbounded_disk_file_open(fd, direct_fd, 0)};
}

struct Memory {
  explicit Memory(char value) : data(static_cast<char*>(std::aligned_alloc(disk::kAlignment, kFileBytes))) {
    for (std::uint64_t at = 0; at < kFileBytes; ++at) data[at] = static_cast<char>(value + static_cast<char>(at / 1000));
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data;
};

int submit(void* engine, disk::Operation operation, void* file, char* data, std::uint64_t length, void** transfer) {
  const std::uint64_t offset = 0;
  void* const memory = data;
  return unbounded_disk_submit(engine, static_cast<int>(operation), 1, &file, &offset, &memory, &length, nullptr,
                               disk::kAlignment, 0, transfer);
}

int finish(void* transfer) {
  std::uint64_t where[3];
  unbounded_disk_wait(transfer, -1);
  int code = unbounded_disk_result(transfer, where);
  unbounded_disk_release(transfer);
  return code;
}

int move(void* engine, disk::Operation operation, void* file, char* data, std::uint64_t length) {
  void* transfer = nullptr;
  CHECK(submit(engine, operation, file, data, length, &transfer) == 0);
  return finish(transfer);
}

// The block that is refused second finds that its file has already given up O_DIRECT.
void blocks_that_are_refused_together_all_go_through_the_page_cache() {
  OpenFile file = open_file(true);
  if (!unbounded_disk_file_direct(file.handle)) return;  // not on this filesystem
  void* engine = unbounded_disk_engine_open(2, kBlockBytes, 0);
  Memory source(1), target(2);
  direct_calls_to_refuse = 2;
  CHECK(move(engine, disk::Operation::write, file.handle, source.data, kFileBytes) == 0);
  CHECK(!unbounded_disk_file_direct(file.handle));
  CHECK(move(engine, disk::Operation::read, file.handle, target.data, kFileBytes) == 0);
  CHECK(std::equal(source.data, source.data + kFileBytes, target.data));
  unbounded_disk_engine_release(engine);
}

// The given allocation of a submission fails. Returns whether there was one.
bool a_submission_that_runs_out_of_memory_leaves_nothing_in_flight(int which, bool has_thread) {
  OpenFile file = open_file(false);
  void* engine = unbounded_disk_engine_open(4, kBlockBytes, 0);
  Memory memory(3);
  if (has_thread) CHECK(move(engine, disk::Operation::read, file.handle, memory.data, kBlockBytes) == 0);
  num_reads = 0;
  reads_are_held = true;
  void* transfer = nullptr;
  allocations_left = which;
  int error = submit(engine, disk::Operation::read, file.handle, memory.data, kFileBytes, &transfer);
  bool ran_out = allocations_left < 0;
  allocations_left = -1;
  reads_are_held = false;
  CHECK(ran_out || error == 0);
  CHECK((error == 0) == (transfer != nullptr));
  if (transfer != nullptr) {
    int code = finish(transfer);
    CHECK(code == 0 || (code == EAGAIN && !has_thread));
  } else {
    CHECK(error == ENOMEM);
  }
  unbounded_disk_file_close(file.handle);  // waits for whatever is in flight
  CHECK(transfer != nullptr || num_reads == 0);
  unbounded_disk_engine_release(engine);
  return ran_out;
}

void an_interrupted_sync_goes_on() {
  OpenFile file = open_file(false);
  syncs_to_interrupt = 3;
  CHECK(unbounded_disk_file_sync(file.handle) == 0 && syncs_to_interrupt == 0);
}

}  // namespace

int main() {
  ::alarm(120);  // what waits for ever
  blocks_that_are_refused_together_all_go_through_the_page_cache();
  for (bool has_thread : {false, true})
    for (int which = 0; a_submission_that_runs_out_of_memory_leaves_nothing_in_flight(which, has_thread);) ++which;
  an_interrupted_sync_goes_on();
  return 0;
}
