// The disk engine on a real file: many transfers at once, errors, closing in the middle.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "checksum/crc32c.h"
#include "disk/engine.h"
#include "disk_check.h"

using namespace unbounded::disk;

namespace {

constexpr std::uint64_t kFileBytes = 8 << 20;
constexpr std::uint64_t kBlockBytes = 256 << 10;

struct Memory {
  explicit Memory(std::size_t bytes, unsigned seed = 1) : bytes(bytes) {
    data = static_cast<char*>(std::aligned_alloc(kAlignment, (bytes + 2 * kAlignment) / kAlignment * kAlignment));
    for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>((seed = seed * 1664525 + 1013904223) >> 24);
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data;
  std::size_t bytes;
};

std::shared_ptr<File> open_file() {
  char name[] = "./disk-test-XXXXXX";
  int fd = ::mkstemp(name);
  CHECK(fd >= 0);
  int direct_fd = ::open(name, O_RDWR | O_DIRECT | O_CLOEXEC);
  ::unlink(name);
  CHECK(::ftruncate(fd, kFileBytes) == 0);
  return std::make_shared<File>(fd, direct_fd, false);
}

Failure wait(const std::shared_ptr<Transfer>& transfer) {
  CHECK(transfer != nullptr);
  transfer->wait();
  CHECK(transfer->done());
  return transfer->failure();
}

void round_trips(Engine& engine) {
  auto file = open_file();
  struct Case {
    std::uint64_t offset, length, shift;
  };
  for (Case c : {Case{0, 1, 0}, Case{0, kFileBytes, 0}, Case{1, 4095, 0}, Case{4096, 1000000, 0}, Case{4095, 8194, 1},
                 Case{12288, 3 * kBlockBytes, 64}, Case{77, 2 * kBlockBytes + 5, 77}}) {
    Memory source(c.length + c.shift, static_cast<unsigned>(c.offset + 1)), target(c.length + c.shift, 7);
    CHECK(wait(engine.submit(Operation::write, {{file, c.offset, source.data + c.shift, c.length}})).code == 0);
    CHECK(wait(engine.submit(Operation::read, {{file, c.offset, target.data + c.shift, c.length}})).code == 0);
    CHECK(std::memcmp(source.data + c.shift, target.data + c.shift, c.length) == 0);
  }
  CHECK(file->sync() == 0);
}

void many_in_flight(Engine& engine) {
  auto file = open_file();
  constexpr std::uint64_t kPart = 512 << 10;
  Memory source(kFileBytes), target(kFileBytes, 9);
  auto launch = [&](Operation operation, char* data) {
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (std::uint64_t at = 0; at < kFileBytes; at += kPart)
      transfers.push_back(engine.submit(operation, {{file, at, data + at, kPart}}));
    std::thread other([&] { for (auto& transfer : transfers) CHECK(wait(transfer).code == 0); });
    for (auto& transfer : transfers) CHECK(wait(transfer).code == 0);
    other.join();
  };
  launch(Operation::write, source.data);
  std::thread more([&] { round_trips(engine); });
  launch(Operation::read, target.data);
  more.join();
  CHECK(std::memcmp(source.data, target.data, kFileBytes) == 0);
}

void padded_tail_and_checksums(Engine& engine) {
  auto file = open_file();
  std::uint64_t length = kBlockBytes + 3 * kAlignment + 17;
  Memory source(length), target(length, 3);
  std::vector<std::uint32_t> sums((length + kAlignment - 1) / kAlignment, 0);
  Run read{file, 4096, target.data, length, sums.data(), true};
  CHECK(wait(engine.submit(Operation::read, {read})).code == 0);  // a file of zeros, and slots of zeros
  CHECK(wait(engine.submit(Operation::write, {{file, 4096, source.data, length, sums.data(), true}})).code == 0);
  std::vector<char> zeros(kAlignment);
  CHECK(sums[0] == (crc32c(source.data, kAlignment, 0) ^ crc32c(zeros.data(), kAlignment, 0)));
  CHECK(wait(engine.submit(Operation::read, {read})).code == 0);
  CHECK(std::memcmp(source.data, target.data, length) == 0);
  for (std::size_t page : {std::size_t{1}, sums.size() - 1}) {
    sums[page] ^= 1;
    Failure failure = wait(engine.submit(Operation::read, {read}));
    CHECK(failure.code == kChecksumMismatch && failure.offset == 4096 + page * kAlignment);
    sums[page] ^= 1;
  }
}

// A block of 4 MiB has four slices of checksums, which several threads take in any order.
void the_first_damage_in_a_block_is_reported() {
  Engine engine({4, 4 << 20});
  auto file = open_file();
  Memory source(kFileBytes), target(kFileBytes, 3);
  std::vector<std::uint32_t> sums(kFileBytes / kAlignment, 1);
  CHECK(wait(engine.submit(Operation::write, {{file, 0, source.data, kFileBytes, sums.data(), true}})).code == 0);
  Run read{file, 0, target.data, kFileBytes, sums.data(), true};
  CHECK(wait(engine.submit(Operation::read, {read})).code == 0);
  CHECK(std::memcmp(source.data, target.data, kFileBytes) == 0);
  for (std::size_t page = sums.size(); page > 0; page -= 256) {  // from the last slice to the first
    sums[page - 1] ^= 1;
    Failure failure = wait(engine.submit(Operation::read, {read}));
    CHECK(failure.code == kChecksumMismatch && failure.offset == (page - 1) * kAlignment && failure.length == kAlignment);
  }
}

void failures(Engine& engine) {
  auto file = open_file();
  Memory memory(kFileBytes);
  Failure failure = wait(engine.submit(Operation::read, {{file, kFileBytes - 4096, memory.data, 8192}}));
  CHECK(failure.code == kShortRead && failure.offset == kFileBytes && failure.length == 4096);
  auto read_only = std::make_shared<File>(::open("/dev/null", O_RDONLY | O_CLOEXEC), -1, false);
  CHECK(wait(engine.submit(Operation::write, {{read_only, 0, memory.data, 512}})).code == EBADF);
  CHECK(wait(engine.submit(Operation::read, {{file, 0, memory.data, 0}})).code == 0);  // nothing to do
  file->close();
  file->close();
  CHECK(engine.submit(Operation::read, {{file, 0, memory.data, 512}}) == nullptr);
}

void closing_finishes_what_is_in_flight() {
  auto file = open_file();
  Memory source(kFileBytes);
  std::vector<std::shared_ptr<Transfer>> transfers;
  Engine engine({4, kBlockBytes});
  for (int i = 0; i < 8; ++i) transfers.push_back(engine.submit(Operation::write, {{file, 0, source.data, kFileBytes}}));
  std::thread closing([&] { file->close(); });
  engine.close();
  closing.join();
  for (auto& transfer : transfers) CHECK(transfer == nullptr || (transfer->done() && transfer->failure().code == 0));
  auto late = open_file();
  CHECK(wait(engine.submit(Operation::read, {{late, 0, source.data, 4096}})).code == EBADF);
}

}  // namespace

int main() {
  Engine engine({4, kBlockBytes});
  round_trips(engine);
  many_in_flight(engine);
  padded_tail_and_checksums(engine);
  the_first_damage_in_a_block_is_reported();
  failures(engine);
  closing_finishes_what_is_in_flight();
  return 0;
}
