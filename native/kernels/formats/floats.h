// Number formats of the buffers, and the scalar conversions between them.
//
// Everything that the SIMD translation units include lives in an unnamed namespace: each unit is compiled with
// its own instruction set, and a function shared by name could be linked from the wrong one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unbounded {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

inline constexpr size_t BLOCK = 128;  // elements that share one scale in the compact format

namespace {

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float widen(float x) { return x; }
inline float widen(Bf16 x) { return float_of(uint32_t(x.bits) << 16); }
inline float widen(Fp16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits & 0x7c00, mantissa = x.bits & 0x3ff;
  if (exponent == 0x7c00) return float_of(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0));
  if (exponent == 0) return float_of(sign | bits_of(float(mantissa) * 0x1p-24f));
  return float_of(sign | (((x.bits & 0x7fffu) << 13) + 0x38000000));
}

// Rounded to nearest, ties to even; a NaN stays a (quiet) NaN.
inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, Bf16& out) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000)
    out.bits = uint16_t(bits >> 16 | 0x40);
  else
    out.bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float x, Fp16& out) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000, magnitude = bits_of(x) & 0x7fffffff;
  if (magnitude > 0x7f800000)
    out.bits = uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  else if (magnitude >= 0x477ff000)  // 65520 and above round to infinity
    out.bits = uint16_t(sign | 0x7c00);
  else if (magnitude < 0x38800000)  // below 2^-14: the addition leaves the multiple of 2^-24 in the low bits
    out.bits = uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000));
  else
    out.bits = uint16_t(sign | (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13);
}

}  // namespace
}  // namespace unbounded
