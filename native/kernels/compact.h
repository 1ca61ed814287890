// The compact format: 8 bits that complete a 16-bit weight, and 8-bit moments with one scale a block.
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
// Rounding is stochastic in training. A second moment moves by a thousandth a step, far less than the distance of
// two codes, and rounding to nearest would leave it where it is for ever; rounded up with the probability of its
// fraction it is right on average, and so are the first moment and the weight. The noise is the low bits of another
// value of the same element (for the moments the direction of the step, or the new weight; for the weight a moment),
// salted by the place in the block and by the step, so that it does not depend on threads or on how a buffer is cut.
// Conversions round to nearest.
#pragma once

#include "vector_scalar.h"

namespace unbounded {
namespace {

// Random bits below `mask`, from the bits of another value and the salt of the place and the step.
template <class W> inline typename W::I noise_of(typename W::F other, const int32_t* salt, int32_t mask) {
  return W::mix(W::bits(other), W::load_int(salt), W::all(mask));
}

// The code c stands for z with the bits (base + c) << 19; the low bits of `base` are 0. `headroom` makes the scale
// the next power of two when the largest value could round above the last code. Codes are left in the highest byte.
inline constexpr int32_t HALF_CODE = 1 << 18, CODE_NOISE = 0x7ffff;

struct First {
  using Code = int8_t;  // sign and magnitude
  static constexpr uint32_t headroom = 0xa0000, base = 0x780;
  static constexpr float offset = 0x1p-7f;
  template <class W>
  static typename W::I encode(typename W::F x, typename W::F magnitude, float inverse, typename W::I noise) {
    const auto z = W::bits(W::fma(magnitude, W::all(inverse), W::all(offset))) + noise;
    return W::pick(W::all(0x80000000u), W::bits(x), W::template left<5>(z));
  }
  template <class W> static typename W::F decode(typename W::I code, float scale) {
    const auto high = W::template left<19>(code);
    const auto z = W::floats(W::pick(W::all(0x83f80000u), high, W::all(base << 19)));
    const auto signed_offset = W::pick(W::all(0x80000000u), high, W::bits(W::all(offset * scale)));
    return W::fms(z, W::all(scale), W::floats(signed_offset));
  }
};

struct Second {
  using Code = uint8_t;
  static constexpr uint32_t headroom = 0x80200, base = 0x700;
  static constexpr float offset = 0x1p-15f;
  template <class W>
  static typename W::I encode(typename W::F, typename W::F magnitude, float inverse, typename W::I noise) {
    const auto z = W::bits(W::fma(magnitude, W::all(inverse), W::all(offset))) + noise;
    return W::template left<5>(W::max(z, W::all((base + 1) << 19)));
  }
  template <class W> static typename W::F decode(typename W::I code, float scale) {
    const auto z = W::floats(W::template left<19>(code) | W::all(base << 19));
    return W::fms(z, W::all(scale), W::all(offset * scale));
  }
};

// The bits of the scale of a block whose largest magnitude has these bits. A block of zeros has scale 0; one with an infinity, a
// NaN or more than 2^127 has a NaN and decodes to NaN throughout.
inline uint32_t block_scale(uint32_t highest, uint32_t headroom) {
  const uint32_t raised = highest + headroom;
  const uint32_t bits = raised < 1u << 23 ? 1u << 23 : raised & 0xff800000;
  return highest == 0 ? 0 : raised >= 254u << 23 ? 0x7fc00000 : bits;
}

// 0 where the scale is 0 or NaN.
inline float inverse_scale(uint32_t scale) {
  return float_of(scale - 1 < 0x7f800000 - 1 ? (254u << 23) - scale : 0);
}

template <class W> inline typename W::F decode_at(const Bf16* weight, const int8_t* low) {
  return W::floats(W::bits(W::load(weight)) + W::template left<8>(W::load_int(low)));
}

template <class W> inline void encode_at(typename W::F master, typename W::I noise, Bf16* weight, int8_t* low) {
  const auto kept = W::quiet(master) + noise;
  W::store_high(&weight->bits, kept + W::all(0x8000));
  W::template store_byte<1>(low, kept);
}

// The exponent field of an fp16 number's last place: below 2^-14 it is that of 2^-14.
template <class W> inline typename W::I fp16_exponent(typename W::F weight) {
  return W::max(W::bits(weight) & W::all(0x7f800000), W::all(113 << 23));
}

template <class W> inline typename W::F decode_at(const Fp16* weight, const int8_t* low) {
  const auto h = W::load(weight);
  const auto unit = W::floats(fp16_exponent<W>(h) - W::all(18 << 23));
  return h + W::from_int(W::load_int(low)) * unit;
}

template <class W> inline void encode_at(typename W::F master, typename W::I noise, Fp16* weight, int8_t* low) {
  W::store(weight, master);
  const auto h = W::load(weight);
  const auto exponent = fp16_exponent<W>(h);
  const auto per_unit = W::floats(W::all(277u << 23) - exponent);  // 32 / (last place / 256)
  const auto rest = W::bits((master - h) * per_unit);
  const auto finite = W::select(W::greater(W::all(0x7f800000), exponent), rest, W::all(0));
  const auto steps = W::to_int(W::floats(finite) + W::all(4096.0f));
  const auto kept = W::template right<5>(steps + noise);
  W::template store_byte<0>(low, W::max(W::min(kept, W::all(255)), W::all(1)) - W::all(128));
}

// What is cut off a master's bits: 8 of them for bf16, 5 for fp16.
template <class T> inline constexpr int32_t weight_noise = 0xff;
template <> inline constexpr int32_t weight_noise<Fp16> = 0x1f;

// Whole buffers, rounded to nearest.

template <class V, class T> inline void encode_weight(const float* master, T* weight, int8_t* low, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) {
    encode_at<W>(W::load(master + i), W::all((weight_noise<T> + 1) / 2), weight + i, low + i);
  });
}

template <class V, class T> inline void decode_weight(const T* weight, const int8_t* low, float* master, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) { W::store(master + i, decode_at<W>(weight + i, low + i)); });
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
  for (size_t begin = 0; begin < n; begin += BLOCK) {
    const size_t count = n - begin < BLOCK ? n - begin : BLOCK;
    const uint32_t scale = block_scale(highest_magnitude(x + begin, count), M::headroom);
    const float inverse = inverse_scale(scale);
    scales[begin / BLOCK] = float_of(scale);
    sweep<V>(count, [=]<class W>(size_t i) {
      const auto value = W::load(x + begin + i), magnitude = W::floats(W::bits(value) & W::all(0x7fffffff));
      const auto code = M::template encode<W>(value, magnitude, inverse, W::all(HALF_CODE));
      W::template store_byte<3>(codes + begin + i, code);
    });
  }
}

template <class V, class M>
inline void decode_moment(const typename M::Code* codes, const float* scales, float* x, size_t n) {
  for (size_t begin = 0; begin < n; begin += BLOCK) {
    const float scale = scales[begin / BLOCK];
    sweep<V>(n - begin < BLOCK ? n - begin : BLOCK, [=]<class W>(size_t i) {
      W::store(x + begin + i, M::template decode<W>(W::load_int(codes + begin + i), scale));
    });
  }
}

}  // namespace
}  // namespace unbounded
