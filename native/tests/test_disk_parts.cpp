// The pure parts of the disk engine: splitting a run, finding the width, checksums.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "disk/block.h"
#include "checksum/crc32c.h"
#include "disk/width.h"
#include "disk_check.h"

using namespace unbounded::disk;

namespace {

char* address(std::uintptr_t value) { return reinterpret_cast<char*>(value); }

void pieces_cover_a_run_once() {
  for (std::uint64_t offset : {0, 1, 4095, 4096, 70000})
    for (std::uint64_t length : {1, 511, 4096, 65536, 65537, 300000})
      for (std::uintptr_t shift : {0, 8})
        for (bool padded : {false, true}) {
          if (padded && offset % kAlignment != 0) continue;
          Run run{nullptr, offset, address(kAlignment * 10 + offset % kAlignment + shift), length, nullptr, padded};
          std::uint64_t at = 0;
          for (const Piece& piece : split(run, true, 65536)) {
            CHECK(piece.start == at && piece.length > 0 && piece.io_length >= piece.length);
            bool aligned = (offset + piece.start) % kAlignment == 0 && piece.io_length % kAlignment == 0;
            CHECK(piece.mode == Mode::buffered || aligned);
            CHECK(piece.mode != Mode::direct || shift == 0);
            CHECK(piece.io_length == piece.length || (padded && piece.io_length - piece.length < kAlignment));
            CHECK(!padded || piece.mode != Mode::buffered);
            CHECK(!padded || piece.start % 65536 == 0);
            at += piece.length;
          }
          CHECK(at == length);
        }
}

void aligned_runs_are_direct_in_whole_blocks() {
  Run run{nullptr, 8192, address(kAlignment), 3 * 65536, nullptr, false};
  auto pieces = split(run, true, 65536);
  CHECK(pieces.size() == 3);
  for (const Piece& piece : pieces) CHECK(piece.mode == Mode::direct && piece.length == 65536);
  for (const Piece& piece : split(run, false, 65536)) CHECK(piece.mode == Mode::buffered);
}

void a_padded_tail_leaves_the_rest_direct() {
  Run run{nullptr, 8192, address(kAlignment), 10000, nullptr, true};
  auto pieces = split(run, true, 65536);
  CHECK(pieces.size() == 1);
  CHECK(pieces[0].mode == Mode::direct && pieces[0].length == 10000 && pieces[0].io_length == 3 * kAlignment);
}

// A disk whose rate depends on the width alone, always with work waiting.
unsigned width_after(double (*rate)(unsigned), unsigned limit, int num_blocks) {
  constexpr std::uint64_t kBlock = 8 << 20;
  Width width(limit, 16 * kBlock);
  std::uint64_t bytes = 0;
  double now = 1;
  for (int i = 0; i < num_blocks; ++i) {
    bytes += kBlock;
    now += static_cast<double>(kBlock) / rate(width.now());
    width.completed(bytes, bytes, static_cast<std::int64_t>(now), 100);
  }
  return width.settled();
}

void width_finds_what_the_disk_likes() {
  CHECK(width_after([](unsigned w) { return w == 1 ? 3.9 : 3.0; }, 8, 2000) == 1);
  CHECK(width_after([](unsigned w) { return static_cast<double>(w); }, 8, 2000) == 8);
  CHECK(width_after([](unsigned w) { return w == 4 ? 3.0 : 2.0; }, 32, 4000) == 4);
  CHECK(width_after([](unsigned w) { return w == 1 ? 3.9 : 3.0; }, 6, 2000) == 1);  // no power of two
  CHECK(width_after([](unsigned) { return 3.0; }, 8, 2000) == 4);  // no difference: stays where it began
  CHECK(width_after([](unsigned w) { return static_cast<double>(w); }, 1, 500) == 1);
}

void width_learns_nothing_without_waiting_work() {
  Width width(8, 1 << 20);
  for (int i = 1; i < 1000; ++i) {
    width.completed(static_cast<std::uint64_t>(i) << 20, static_cast<std::uint64_t>(i) << 20, i * 1000, 0);
    CHECK(width.now() == 4);
  }
}

void width_learns_also_from_work_that_comes_in_bursts() {
  Width width(8, 8);
  double now = 1;
  for (std::uint64_t bytes = 1; bytes < 20000; ++bytes) {
    now += 1000.0 / width.now();
    std::size_t num_left = 39 - bytes % 40;  // a burst of 40 blocks, then a pause
    if (num_left == 0) now += 100000;
    width.completed(bytes, bytes, static_cast<std::int64_t>(now), num_left);
  }
  CHECK(width.settled() == 8);
}

void width_gives_up_what_the_caller_never_fills() {
  Width width(32, 8);
  double now = 1;
  auto run = [&](std::uint64_t from, std::uint64_t to, std::size_t in_flight) {
    for (std::uint64_t bytes = from; bytes < to; ++bytes) {
      now += 1000.0 / static_cast<double>(std::min<std::size_t>(width.now(), in_flight));
      width.completed(bytes, bytes, static_cast<std::int64_t>(now), in_flight - 1);
    }
  };
  run(1, 20000, 100);
  CHECK(width.settled() == 32);
  run(20000, 40000, 9);  // filling 8, so never more than that
  CHECK(width.settled() == 8 || width.settled() == 4);
}

void checksums_agree() {
  CHECK(crc32c("123456789", 9, 0) == 0xe3069283);
  CHECK(crc32c_portable("123456789", 9, 0) == 0xe3069283);
  CHECK(crc32c("", 0, 0) == 0);
  std::vector<unsigned char> data(300000);
  unsigned seed = 5;
  for (auto& byte : data) byte = static_cast<unsigned char>((seed = seed * 1664525 + 1013904223) >> 24);
  for (std::size_t length : {1u, 7u, 8u, 63u, 12287u, 12288u, 12289u, 49152u, 65536u, 99990u, 196608u, 299990u}) {
    for (std::size_t start : {0u, 1u, 5u}) {
      std::uint32_t whole = crc32c(&data[start], length, 0);
      CHECK(whole == crc32c_portable(&data[start], length, 0));
      std::size_t cut = length / 3;
      std::uint32_t first = crc32c(&data[start], cut, 0), second = crc32c(&data[start + cut], length - cut, 0);
      CHECK(crc32c(&data[start + cut], length - cut, first) == whole);
      CHECK(crc32c_combine(first, second, length - cut) == whole);
    }
  }
}

}  // namespace

int main() {
  pieces_cover_a_run_once();
  aligned_runs_are_direct_in_whole_blocks();
  a_padded_tail_leaves_the_rest_direct();
  width_finds_what_the_disk_likes();
  width_learns_nothing_without_waiting_work();
  width_learns_also_from_work_that_comes_in_bursts();
  width_gives_up_what_the_caller_never_fills();
  checksums_agree();
  return 0;
}
