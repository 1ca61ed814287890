#include "checksum/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace unbounded::disk {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Table make_byte_tables() {
  Table table{};
  for (std::uint32_t n = 0; n < 256; ++n) {
    std::uint32_t crc = n;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ kPolynomial : crc >> 1;
    table[0][n] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t n = 0; n < 256; ++n) table[k][n] = (table[k - 1][n] >> 8) ^ table[0][table[k - 1][n] & 0xff];
  return table;
}

constexpr Table kTables = make_byte_tables();

// Product of two polynomials modulo the CRC's, in reflected order (bit 31 is x^0).
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = std::uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^(8 * length): what appending `length` zero bytes multiplies a checksum by.
constexpr std::uint32_t shift_by_bytes(std::uint64_t length) {
  std::uint32_t result = std::uint32_t{1} << 31;
  std::uint32_t power = std::uint32_t{1} << 23;  // x^8
  for (; length != 0; length >>= 1) {
    if ((length & 1) != 0) result = multiply(power, result);
    power = multiply(power, power);
  }
  return result;
}

[[maybe_unused]] std::uint64_t load64(const unsigned char* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

#if defined(__x86_64__)
#define UNBOUNDED_CRC_TARGET __attribute__((target("sse4.2")))
UNBOUNDED_CRC_TARGET inline std::uint64_t step64(std::uint64_t crc, std::uint64_t word) { return _mm_crc32_u64(crc, word); }
UNBOUNDED_CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, unsigned char byte) { return _mm_crc32_u8(crc, byte); }
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
constexpr const char* kInstruction = "sse4.2";
#elif defined(__aarch64__)
#define UNBOUNDED_CRC_TARGET __attribute__((target("+crc")))
UNBOUNDED_CRC_TARGET inline std::uint64_t step64(std::uint64_t crc, std::uint64_t word) {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
UNBOUNDED_CRC_TARGET inline std::uint32_t step8(std::uint32_t crc, unsigned char byte) { return __crc32cb(crc, byte); }
bool has_instruction() { return (getauxval(AT_HWCAP) & (1 << 7)) != 0; }  // HWCAP_CRC32
constexpr const char* kInstruction = "armv8-crc";
#endif

#if defined(UNBOUNDED_CRC_TARGET)
// The instruction has a latency of three cycles and a throughput of one: three streams keep it busy. Their
// checksums are joined by multiplying with x^(8 * lane), a table look-up a byte. From memory long lanes are faster
// (18 GB/s with 64 KiB, 12 with 4 KiB), for the hardware fetches ahead within a page only and every lane is asked
// for some lines early.
constexpr std::size_t kLongLane = 64 * 1024, kMiddleLane = 16 * 1024, kShortLane = 4096;
constexpr std::size_t kPageLane = 1344;  // three and a line are a page of 4096 bytes
constexpr std::size_t kLineBytes = 64, kAheadBytes = 2048;

using ShiftTable = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr ShiftTable make_shift_table(std::uint64_t length) {
  ShiftTable table{};
  std::uint32_t shift = shift_by_bytes(length);
  for (std::size_t byte = 0; byte < 4; ++byte)
    for (std::uint32_t n = 0; n < 256; ++n) table[byte][n] = multiply(shift, n << (8 * byte));
  return table;
}

template <std::size_t kLane>
constexpr ShiftTable kShiftLane = make_shift_table(kLane);

template <std::size_t kLane>
std::uint64_t shift_lane(std::uint64_t crc) {
  const ShiftTable& table = kShiftLane<kLane>;
  return table[0][crc & 0xff] ^ table[1][(crc >> 8) & 0xff] ^ table[2][(crc >> 16) & 0xff] ^ table[3][crc >> 24];
}

struct Rest {
  const unsigned char* data;
  std::size_t length;
};

// Takes as many triples of lanes as there are.
template <std::size_t kLane>
UNBOUNDED_CRC_TARGET std::uint32_t take_lanes(std::uint32_t seed, Rest& rest) {
  std::uint64_t first = seed;  // 64 bits wide as the instruction's result is: cutting it costs another instruction
  for (; rest.length >= 3 * kLane; rest.length -= 3 * kLane, rest.data += 3 * kLane) {
    const unsigned char* data = rest.data;
    std::uint64_t second = 0, third = 0;
    for (std::size_t line = 0; line < kLane; line += kLineBytes) {
      // A prefetch past the end of the memory does nothing.
      for (std::size_t lane = 0; lane < 3; ++lane) __builtin_prefetch(data + lane * kLane + line + kAheadBytes);
      for (std::size_t at = line; at < line + kLineBytes; at += 8) {
        first = step64(first, load64(data + at));
        second = step64(second, load64(data + kLane + at));
        third = step64(third, load64(data + 2 * kLane + at));
      }
    }
    first = shift_lane<kLane>(shift_lane<kLane>(first) ^ second) ^ third;
  }
  return static_cast<std::uint32_t>(first);
}

UNBOUNDED_CRC_TARGET std::uint32_t crc32c_instruction(const unsigned char* data, std::size_t length, std::uint32_t seed) {
  Rest rest{data, length};
  std::uint32_t crc = take_lanes<kLongLane>(~seed, rest);
  crc = take_lanes<kMiddleLane>(crc, rest);
  crc = take_lanes<kShortLane>(crc, rest);
  crc = take_lanes<kPageLane>(crc, rest);
  for (; rest.length >= 8; rest.length -= 8, rest.data += 8) crc = static_cast<std::uint32_t>(step64(crc, load64(rest.data)));
  for (; rest.length > 0; --rest.length) crc = step8(crc, *rest.data++);
  return ~crc;
}
#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t length, std::uint32_t seed) {
  auto bytes = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~seed;
  for (; length >= 8; length -= 8, bytes += 8) {
    crc ^= bytes[0] | std::uint32_t{bytes[1]} << 8 | std::uint32_t{bytes[2]} << 16 | std::uint32_t{bytes[3]} << 24;
    crc = kTables[7][crc & 0xff] ^ kTables[6][(crc >> 8) & 0xff] ^ kTables[5][(crc >> 16) & 0xff] ^
          kTables[4][crc >> 24] ^ kTables[3][bytes[4]] ^ kTables[2][bytes[5]] ^ kTables[1][bytes[6]] ^
          kTables[0][bytes[7]];
  }
  for (; length > 0; --length) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes++) & 0xff];
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t seed) {
#if defined(UNBOUNDED_CRC_TARGET)
  static const bool instruction = has_instruction();
  if (instruction) return crc32c_instruction(static_cast<const unsigned char*>(data), length, seed);
#endif
  return crc32c_portable(data, length, seed);
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_length) {
  return multiply(shift_by_bytes(second_length), first) ^ second;
}

const char* crc32c_kernel() {
#if defined(UNBOUNDED_CRC_TARGET)
  if (has_instruction()) return kInstruction;
#endif
  return "tables";
}

}  // namespace unbounded::disk
