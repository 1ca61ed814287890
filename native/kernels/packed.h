// Frozen bf16 weights in three quarters of their bytes, without losing a bit.
//
// The exponents of 4,096 neighbouring weights nearly all lie within 15 of the largest. So a weight is its sign and
// mantissa, a byte, and four bits that say which of those exponents it has, or that it has none (zeros and denormals).
// The few that are smaller are listed in full. If they are more than fit, the record says so (its second byte is 255) and
// stands for nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unbounded {

inline constexpr size_t PACKED = 4096;        // weights of a record
inline constexpr size_t RECORD_BYTES = 6272;  // 128 of header, PACKED / 2 of exponents, PACKED of signs and mantissas

// Packs the bits of n <= PACKED weights; the rest of the record are zeros.
void pack_record(const uint16_t* weights, size_t n, uint8_t* record);

// Writes n weights of a record, from the one at `skip`.
void unpack_record(const uint8_t* record, uint16_t* weights, size_t skip, size_t n);

}  // namespace unbounded
