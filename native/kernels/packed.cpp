#include "kernels/packed.h"

#include <algorithm>
#include <cstring>

namespace unbounded {
namespace {

// A record begins with the exponent before the smallest of the 15, and how many weights are listed after four bytes:
// place and bits of each, 16 bits both, the lower byte first. Weight i has its four bits in byte i of HALF, the lower
// ones; weight HALF + i has the higher ones.
constexpr size_t HEADER = 128, LIST = 4, MOST_LISTED = 31, HALF = PACKED / 2;
constexpr uint8_t TOO_MANY = 255;
constexpr unsigned NUM_EXPONENTS = 15;

unsigned exponent_of(uint16_t bits) { return bits >> 7 & 0xff; }

void put16(uint8_t* to, size_t value) { to[0] = uint8_t(value), to[1] = uint8_t(value >> 8); }

size_t get16(const uint8_t* from) { return from[0] | size_t(from[1]) << 8; }

void unpack_whole(const uint8_t* record, uint16_t* weights) {
  const uint8_t *pairs = record + HEADER, *low = pairs + HALF;
  const uint16_t base = record[0];
  const auto join = [base](uint16_t code, uint16_t byte) {
    const uint16_t exponent = code ? uint16_t(code + base) : uint16_t(0);
    return uint16_t((byte & 0x80) << 8 | exponent << 7 | (byte & 0x7f));
  };
  for (size_t i = 0; i < HALF; ++i) weights[i] = join(pairs[i] & 15, low[i]);
  for (size_t i = 0; i < HALF; ++i) weights[HALF + i] = join(pairs[i] >> 4, low[HALF + i]);
  const size_t listed = record[1] == TOO_MANY ? 0 : record[1];
  for (size_t i = 0; i < listed; ++i) {
    const uint8_t* entry = record + LIST + 4 * i;
    weights[get16(entry) % PACKED] = uint16_t(get16(entry + 2));
  }
}

}  // namespace

void pack_record(const uint16_t* weights, size_t n, uint8_t* record) {
  uint16_t padded[PACKED];
  if (n < PACKED) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, weights, n * sizeof *weights);
    weights = padded;
  }
  uint16_t largest = 0;
  for (size_t i = 0; i < PACKED; ++i) largest = std::max(largest, uint16_t(weights[i] & 0x7fff));
  const uint16_t base = uint16_t(std::max(exponent_of(largest), NUM_EXPONENTS) - NUM_EXPONENTS);
  uint8_t codes[PACKED], *low = record + HEADER + HALF;
  uint16_t num_small = 0;
  for (size_t i = 0; i < PACKED; ++i) {
    const uint16_t bits = weights[i], exponent = bits >> 7 & 0xff;
    codes[i] = uint8_t(exponent > base ? exponent - base : 0);
    num_small = uint16_t(num_small + (exponent != 0 && exponent <= base));
    low[i] = uint8_t(bits >> 8 & 0x80 | (bits & 0x7f));
  }
  for (size_t i = 0; i < HALF; ++i) record[HEADER + i] = uint8_t(codes[i] | codes[HALF + i] << 4);
  std::memset(record, 0, HEADER);
  record[0] = uint8_t(base);
  if (num_small > MOST_LISTED) {
    record[1] = TOO_MANY;
    return;
  }
  for (size_t i = 0; num_small && i < PACKED; ++i) {
    const unsigned exponent = exponent_of(weights[i]);
    if (exponent == 0 || exponent > base) continue;
    uint8_t* entry = record + LIST + 4 * record[1]++;
    put16(entry, i), put16(entry + 2, weights[i]);
  }
}

void unpack_record(const uint8_t* record, uint16_t* weights, size_t skip, size_t n) {
  if (skip == 0 && n == PACKED) return unpack_whole(record, weights);
  uint16_t whole[PACKED];
  unpack_whole(record, whole);
  std::memcpy(weights, whole + skip, n * sizeof *weights);
}

}  // namespace unbounded
