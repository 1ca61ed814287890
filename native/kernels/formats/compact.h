// The compact format: 8 bits that complete a 16-bit weight, and 8-bit moments with one scale per block.
//
// Moments. A block's values are divided by a power of two that brings the largest just below 2. The magnitude y is
// then stored as the leading bits of the float z = y + offset, where the offset is the lowest power of two that the
// code reaches: 4 bits of mantissa in each of 8 binades (and a sign) for a first moment, of 16 binades for a second
// one. So a code is linear near zero and logarithmic above it, and costs shifts and additions only. A second moment
// is never stored as 0 unless its whole block is 0: below a first moment that is not 0 that would be a step without
// bound. The least it is stored as is 2^-19 of the scale.
//
// Weights. bf16: the master's bits rounded to 24, split as in the exact format. fp16: the distance of the master to
// the weight in units of the weight's last place / 256.
//
// Rounding is stochastic in training. A second moment moves by a thousandth per step, far less than the distance of
// two codes, and rounding to nearest would leave it where it is for ever; rounded up with the probability of its
// fraction it is right on average, and so are the first moment and the weight. The noise is the low bits of another
// value of the same element (for the moments the direction of the step, or the new weight; for the weight a moment),
// salted by the place in the block and by the step, so that it does not depend on threads or on how a buffer is cut.
// Conversions round to nearest.
#pragma once

#include "kernels/simd/vector_scalar.h"

namespace unbounded {
namespace {

// The code c stands for z with the bits base + (c << CODE_SHIFT); below CODE_SHIFT the bits of a base are 0. An offset
// is the float of its base. `headroom` makes the scale the next power of two when the largest value could round above
// the last code.
inline constexpr int CODE_SHIFT = 19;
inline constexpr int32_t HALF_CODE = 1 << 18, CODE_NOISE = 0x7ffff;
inline constexpr uint32_t FIRST_BASE = 0x3c000000, SECOND_BASE = 0x38000000;

// Constants of the formats, out of the compiler's sight: in memory they are operands like any other, while known ones
// would be built again, by several instructions, wherever registers are short.
struct Literals {
  uint32_t weight_noise, code_noise = CODE_NOISE, sign = 0x80000000, magnitude = 0x7fffffff;
  uint32_t first_code = 0x83f80000, first_base = FIRST_BASE, second_base = SECOND_BASE;
  float first_offset = __builtin_bit_cast(float, FIRST_BASE), second_offset = __builtin_bit_cast(float, SECOND_BASE);
  explicit Literals(uint32_t noise = 0) : weight_noise(noise) { asm("" : "+m"(*this)); }
};

// z of a magnitude, with the noise that rounds it: its code is bits CODE_SHIFT and on.
template <class W>
inline typename W::I rounded(typename W::F magnitude, typename W::F inverse, float offset, typename W::I noise) {
  return W::bits(W::fma(magnitude, inverse, W::all(offset))) + noise;
}

struct First {
  using Code = int8_t;  // sign and magnitude
  static constexpr uint32_t headroom = 0xa0000;
  static constexpr float offset = 0x1p-7f;
  template <class W>
  static typename W::I code(const Literals& l, typename W::I z, typename W::I x) {  // in the highest byte
    return W::pick(W::all(l.sign), x, W::template left<24 - CODE_SHIFT>(z));
  }
  template <class W>
  static typename W::F decode(const Literals& l, const int8_t* code, typename W::F scale, typename W::F offset) {
    const auto high = W::template left<CODE_SHIFT>(W::load_int(code));
    const auto z = W::floats(W::pick(W::all(l.first_code), high, W::all(l.first_base)));
    return W::fms(z, scale, W::floats(W::pick(W::all(l.sign), high, W::bits(offset))));
  }
};

struct Second {
  using Code = uint8_t;
  static constexpr uint32_t headroom = 0x80200;
  static constexpr float offset = 0x1p-15f;
  template <class W> static typename W::I code(const Literals&, typename W::I z, typename W::I) {
    return W::template left<24 - CODE_SHIFT>(W::max(z, W::all(SECOND_BASE + (1 << CODE_SHIFT))));
  }
  template <class W>
  static typename W::F decode(const Literals& l, const uint8_t* code, typename W::F scale, typename W::F offset) {
    return W::fms(W::floats(W::template left<CODE_SHIFT>(W::load_int(code)) | W::all(l.second_base)), scale, offset);
  }
};

// The bits of the scale of a block whose largest magnitude has these bits. A block of zeros has scale 0; one with an
// infinity, a NaN or more than 2^127 has a NaN and decodes to NaN throughout.
inline uint32_t block_scale(uint32_t highest, uint32_t headroom) {
  const uint32_t raised = (highest < 0x7f800000 ? highest : 0x7f800000) + headroom;  // a NaN may have any bits above
  const uint32_t bits = raised < 1u << 23 ? 1u << 23 : raised & 0xff800000;
  return highest == 0 ? 0 : raised >= 254u << 23 ? 0x7fc00000 : bits;
}

// 0 if the scale is 0 or NaN.
inline float inverse_scale(uint32_t scale) {
  return float_of(scale - 1 < 0x7f800000 - 1 ? (254u << 23) - scale : 0);
}

template <class W> inline typename W::F decode_at(const Bf16* weight, const int8_t* remainder) {
  return W::floats(W::bits(W::load(weight)) + W::template left<8>(W::load_int(remainder)));
}

// Stores the weight and returns what the remainder is made of: 128 + remainder, in the lowest byte after a shift of
// remainder_shift<T>.
template <class W> inline typename W::I encode_at(typename W::F master, typename W::I noise, Bf16* weight) {
  const auto kept = W::quiet(master) + noise;
  W::store_high(&weight->bits, kept);
  return kept;
}

// The exponent field of an fp16 number's last place: below 2^-14 it is that of 2^-14.
template <class W> inline typename W::I fp16_exponent(typename W::F weight) {
  return W::max(W::bits(weight) & W::all(0x7f800000), W::all(113 << 23));
}

template <class W> inline typename W::F decode_at(const Fp16* weight, const int8_t* remainder) {
  const auto h = W::load(weight);
  const auto unit = W::floats(fp16_exponent<W>(h) - W::all(18 << 23));
  return h + W::from_int(W::load_int(remainder)) * unit;
}

template <class W> inline typename W::I encode_at(typename W::F master, typename W::I noise, Fp16* weight) {
  W::store(weight, master);
  const auto h = W::load(weight);
  const auto exponent = fp16_exponent<W>(h);
  const auto per_unit = W::floats(W::all(277u << 23) - exponent);  // 32 / (last place / 256)
  const auto rest = W::bits((master - h) * per_unit);
  const auto finite = W::select(W::greater(W::all(0x7f800000), exponent), rest, W::all(0));
  const auto steps = W::to_int(W::floats(finite) + W::all(4096.0f));
  return W::max(W::min(steps + noise, W::all(255 << 5)), W::all(1 << 5));
}

// What is cut off a master's bits: 8 of them for bf16, 5 for fp16. Besides the noise, bf16 is raised by half a place.
template <class T> inline constexpr int remainder_shift = 8;
template <> inline constexpr int remainder_shift<Fp16> = 5;
template <class T> inline constexpr int32_t weight_raise = 0x8000;
template <> inline constexpr int32_t weight_raise<Fp16> = 0;
template <class T> inline constexpr int32_t weight_noise = (1 << remainder_shift<T>) - 1;

// Whole buffers, rounded to nearest.

template <class V, class T> inline void encode_weight(const float* master, T* weight, int8_t* remainder, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) {
    constexpr int32_t half = 1 << (remainder_shift<T> - 1);
    const auto kept = encode_at<W>(W::load(master + i), W::all(half + weight_raise<T>), weight + i);
    W::template store_byte<0>(remainder + i, W::template right<remainder_shift<T>>(kept) - W::all(128));
  });
}

template <class V, class T>
inline void decode_weight(const T* weight, const int8_t* remainder, float* master, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) { W::store(master + i, decode_at<W>(weight + i, remainder + i)); });
}

inline uint32_t highest_magnitude(const float* x, size_t n) {
  uint32_t highest = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;
    highest = magnitude > highest ? magnitude : highest;
  }
  return highest;
}

template <class V, class M> inline void encode_moment(const float* x, typename M::Code* codes, float* scales, size_t n) {
  const Literals l;
  for (size_t begin = 0; begin < n; begin += BLOCK) {
    const size_t count = n - begin < BLOCK ? n - begin : BLOCK;
    const uint32_t scale = block_scale(highest_magnitude(x + begin, count), M::headroom);
    const float inverse = inverse_scale(scale);
    scales[begin / BLOCK] = float_of(scale);
    sweep<V>(count, [=, &l]<class W>(size_t i) {
      const auto value = W::load(x + begin + i), magnitude = W::floats(W::bits(value) & W::all(0x7fffffff));
      const auto z = rounded<W>(magnitude, W::all(inverse), M::offset, W::all(HALF_CODE));
      W::template store_byte<3>(codes + begin + i, M::template code<W>(l, z, W::bits(value)));
    });
  }
}

template <class V, class M>
inline void decode_moment(const typename M::Code* codes, const float* scales, float* x, size_t n) {
  const Literals l;
  for (size_t begin = 0; begin < n; begin += BLOCK) {
    const float scale = scales[begin / BLOCK], offset = M::offset * scale;
    sweep<V>(n - begin < BLOCK ? n - begin : BLOCK, [=, &l]<class W>(size_t i) {
      W::store(x + begin + i, M::template decode<W>(l, codes + begin + i, W::all(scale), W::all(offset)));
    });
  }
}

}  // namespace
}  // namespace unbounded
