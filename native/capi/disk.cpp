// The C ABI of the disk engine: pointers and sizes in, handles out. No exception leaves a function.
#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "checksum/crc32c.h"
#include "disk/engine.h"

#define UNBOUNDED_API extern "C" __attribute__((visibility("default")))

namespace disk = unbounded::disk;
using EngineHandle = disk::Engine;
using FileHandle = std::shared_ptr<disk::File>;
using TransferHandle = std::shared_ptr<disk::Transfer>;

UNBOUNDED_API void* unbounded_disk_engine_open(unsigned num_threads, std::uint64_t block_bytes, int niceness) {
  return new (std::nothrow) EngineHandle(disk::EngineOptions{num_threads, block_bytes, niceness});
}

// Carries out what was submitted, then ends the threads; the handle stays valid until released.
UNBOUNDED_API void unbounded_disk_engine_close(void* engine) { static_cast<EngineHandle*>(engine)->close(); }
UNBOUNDED_API void unbounded_disk_engine_release(void* engine) { delete static_cast<EngineHandle*>(engine); }

// Reserves blocks for [0, length) and makes the file that long. 0 or errno.
UNBOUNDED_API int unbounded_disk_allocate(int fd, std::uint64_t length) {
  for (;;) {
    if (::fallocate(fd, 0, 0, static_cast<off_t>(length)) == 0) return 0;
    if (errno != EINTR) return errno;
  }
}

UNBOUNDED_API void* unbounded_disk_file_open(int fd, int direct_fd, int temporary) {
  try {
    return new FileHandle(std::make_shared<disk::File>(fd, direct_fd, temporary != 0));
  } catch (...) {
    return nullptr;
  }
}

UNBOUNDED_API int unbounded_disk_file_direct(void* file) { return (*static_cast<FileHandle*>(file))->direct() ? 1 : 0; }
UNBOUNDED_API int unbounded_disk_file_sync(void* file) { return (*static_cast<FileHandle*>(file))->sync(); }
UNBOUNDED_API void unbounded_disk_file_close(void* file) { (*static_cast<FileHandle*>(file))->close(); }
UNBOUNDED_API void unbounded_disk_file_release(void* file) { delete static_cast<FileHandle*>(file); }

// `grain`: bytes per slot of `sums`, dividing the engine's block size.
// 0 with *started set, EBADF if a file is closed, ENOMEM or EAGAIN if memory or threads are short. Whoever owns `started`
// owns the transfer, also if an exception (of a signal) is raised as this returns.
UNBOUNDED_API int unbounded_disk_submit(void* engine, int operation, std::uint64_t count, void* const* files,
                                        const std::uint64_t* offsets, void* const* data, const std::uint64_t* lengths,
                                        std::uint32_t* const* sums, std::uint64_t grain, int padded, void** started) {
  try {
    auto handle = std::make_unique<TransferHandle>();  // first: nobody could wait for a transfer without one
    std::vector<disk::Run> runs(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      runs[i] = {*static_cast<FileHandle*>(files[i]), offsets[i], static_cast<char*>(data[i]), lengths[i],
                 sums == nullptr ? nullptr : sums[i], padded != 0, grain};
    }
    *handle = static_cast<EngineHandle*>(engine)->submit(static_cast<disk::Operation>(operation), std::move(runs));
    if (*handle == nullptr) return EBADF;
    *started = handle.release();
    return 0;
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  } catch (...) {
    return EAGAIN;
  }
}

// 1 when done, 0 when the time is over; a negative time waits for as long as it takes.
UNBOUNDED_API int unbounded_disk_wait(void* transfer, std::int64_t timeout_ns) {
  disk::Transfer& target = **static_cast<TransferHandle*>(transfer);
  if (timeout_ns < 0) {
    target.wait();
    return 1;
  }
  return target.wait_for(std::chrono::nanoseconds(timeout_ns)) ? 1 : 0;
}

UNBOUNDED_API int unbounded_disk_done(void* transfer) { return (*static_cast<TransferHandle*>(transfer))->done() ? 1 : 0; }

// The result of a finished transfer: 0, an errno, or a negative code; where says {run, offset, length}.
UNBOUNDED_API int unbounded_disk_result(void* transfer, std::uint64_t* where) {
  disk::Failure failure = (*static_cast<TransferHandle*>(transfer))->failure();
  where[0] = failure.run;
  where[1] = failure.offset;
  where[2] = failure.length;
  return failure.code;
}

UNBOUNDED_API void unbounded_disk_span(void* transfer, std::int64_t* span_ns) {
  span_ns[0] = (*static_cast<TransferHandle*>(transfer))->started_ns();
  span_ns[1] = (*static_cast<TransferHandle*>(transfer))->finished_ns();
}

// Waits first: the memory under a transfer must outlive it.
UNBOUNDED_API void unbounded_disk_release(void* transfer) {
  auto handle = static_cast<TransferHandle*>(transfer);
  (*handle)->wait();
  delete handle;
}

UNBOUNDED_API std::uint32_t unbounded_crc32c(const void* data, std::uint64_t length, std::uint32_t seed) {
  return disk::crc32c(data, length, seed);
}
UNBOUNDED_API std::uint32_t unbounded_crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t length) {
  return disk::crc32c_combine(first, second, length);
}
UNBOUNDED_API const char* unbounded_crc32c_kernel() { return disk::crc32c_kernel(); }
