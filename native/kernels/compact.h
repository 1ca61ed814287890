// The compact format: 8 bits that complete a 16-bit weight, and 8-bit moments with one scale a block.
//
// Moments. A block's values are divided by a power of two that brings the largest just below 2. The magnitude y is
// then stored as the leading bits of the float z = y + offset, where the offset is the lowest power of two that the
// code reaches: 4 bits of mantissa in each of 8 binades (and a sign) for a first moment, of 16 binades for a second
// one. So a code is linear near zero and logarithmic above it, and costs shifts and additions only. A second moment
// that is not 0 is never stored as 0: next to a first moment that is not 0 that would be a step without bound.
//
// Rounding is stochastic in training. A second moment moves by a thousandth a step, far less than the distance of
// two codes, and rounding to nearest would leave it where it is for ever; rounded up with the probability of its
// fraction it is right on average, and so are the first moment and the weight. The noise is a hash of the value, its
// place in the block and the step, so that results do not depend on threads or on how a buffer is cut.
//
// Weights. bf16: the master's bits rounded to 24, split as in the exact format. fp16: the distance of the master to
// the weight in units of the weight's last place / 256.
#pragma once

#include "exact.h"

namespace unbounded {
namespace {

struct Positions {
  int32_t salt[BLOCK];
  constexpr Positions() : salt{} {
    for (uint32_t i = 0; i < BLOCK; ++i) {
      uint32_t h = (i + 1) * 0x9e3779b9u;
      h = (h ^ h >> 15) * 0x85ebca6bu;
      salt[i] = int32_t(h ^ h >> 13);
    }
  }
};
constexpr Positions positions;

struct Nearest {
  template <class W, int bits> typename W::I noise(typename W::I, size_t) const { return W::all(1 << (bits - 1)); }
};

struct Stochastic {
  int32_t seed;
  template <class W, int bits> typename W::I noise(typename W::I value, size_t i) const {
    const auto mixed = value ^ W::load_int(positions.salt + i % BLOCK) ^ W::all(seed);
    return W::template right<32 - bits>(mixed * W::all(int32_t(0x9e3779b1)));
  }
};

// The code c stands for z with the bits (base + c) << 19. `headroom` makes the scale the next power of two when the
// largest value could round above the last code; it is exact so that encoding a decoded block changes nothing.
struct Signed {
  using Code = int8_t;
  static constexpr int32_t base = 0x780, last = 127, headroom = 0xa0000;  // offset 2^-7
  template <class W> static typename W::I sign(typename W::I code, typename W::I bits) {
    return W::select(W::greater(W::all(0), bits), W::all(0) - code, code);
  }
};
struct Unsigned {
  using Code = uint8_t;
  static constexpr int32_t base = 0x700, last = 255, headroom = 0x80200;  // offset 2^-15
  template <class W> static typename W::I sign(typename W::I code, typename W::I bits) {
    return W::select(W::greater(bits, W::all(0)), W::max(code, W::all(1)), code);
  }
};

template <class V> inline int32_t highest_magnitude(const float* x, size_t n) {
  auto wide = V::all(0);
  size_t i = 0;
  for (; i + V::width <= n; i += V::width) wide = V::max(wide, V::bits(V::load(x + i)) & V::all(0x7fffffff));
  int32_t highest = V::highest(wide);
  for (; i < n; ++i) {
    const int32_t magnitude = int32_t(bits_of(x[i]) & 0x7fffffff);
    highest = magnitude > highest ? magnitude : highest;
  }
  return highest;
}

// A block with an infinity or a NaN gets a NaN scale and decodes to NaN throughout.
inline float block_scale(int32_t highest, int32_t headroom) {
  if (highest >= 0x7f800000) return float_of(0x7fc00000);
  const int32_t exponent = (highest + headroom) >> 23;
  return float_of(uint32_t(exponent < 1 ? 1 : exponent > 253 ? 253 : exponent) << 23);
}

template <class V, class Kind, class Round>
inline void encode_block(const float* x, size_t n, typename Kind::Code* codes, float* scale, Round round) {
  *scale = block_scale(highest_magnitude<V>(x, n), Kind::headroom);
  const float inverse = *scale == *scale ? float_of((254u << 23) - bits_of(*scale)) : 0.0f;
  sweep<V>(n, [=]<class W>(size_t i) {
    const auto value = W::load(x + i);
    const auto bits = W::bits(value);
    const auto y = W::floats(W::bits(value * W::all(inverse)) & W::all(0x7fffffff));
    const auto z = W::bits(y + W::all(float_of(uint32_t(Kind::base) << 19)));
    const auto code = W::template right<19>(z + round.template noise<W, 19>(bits, i)) - W::all(Kind::base);
    W::store_int(codes + i, Kind::template sign<W>(W::min(code, W::all(Kind::last)), bits));
  });
}

template <class V, class Kind>
inline void decode_block(const typename Kind::Code* codes, float scale, float* x, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) {
    const auto code = W::load_int(codes + i);
    const auto z = W::floats(W::template left<19>(W::max(code, W::all(0) - code) + W::all(Kind::base)));
    const auto y = W::bits(z - W::all(float_of(uint32_t(Kind::base) << 19)));
    W::store(x + i, W::floats(y | (code & W::all(int32_t(0x80000000)))) * W::all(scale));
  });
}

template <class V, class Kind, class Round>
inline void encode_moment(const float* x, size_t n, typename Kind::Code* codes, float* scales, Round round) {
  for (size_t i = 0; i < n; i += BLOCK)
    encode_block<V, Kind>(x + i, n - i < BLOCK ? n - i : BLOCK, codes + i, scales + i / BLOCK, round);
}

template <class V, class Kind>
inline void decode_moment(const typename Kind::Code* codes, const float* scales, float* x, size_t n) {
  for (size_t i = 0; i < n; i += BLOCK)
    decode_block<V, Kind>(codes + i, scales[i / BLOCK], x + i, n - i < BLOCK ? n - i : BLOCK);
}

template <class V, class Round>
inline void encode_weight(const float* master, Bf16* weight, int8_t* low, size_t n, Round round) {
  sweep<V>(n, [=]<class W>(size_t i) {
    const auto bits = quiet<W>(W::bits(W::load(master + i)));
    const auto kept = W::template right<8>(bits + round.template noise<W, 8>(bits, i));
    W::store_int(reinterpret_cast<uint16_t*>(weight + i), W::template right<8>(kept + W::all(0x80)));
    W::store_int(low + i, kept);
  });
}

template <class V> inline void decode_weight(const Bf16* weight, const int8_t* low, float* master, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) {
    W::store(master + i, W::floats(W::bits(W::load(weight + i)) + W::template left<8>(W::load_int(low + i))));
  });
}

// The exponent field of an fp16 number's last place: below 2^-14 it is that of 2^-14.
template <class W> inline typename W::I fp16_exponent(typename W::F weight) {
  return W::max(W::bits(weight) & W::all(0x7f800000), W::all(113 << 23));
}

template <class V, class Round>
inline void encode_weight(const float* master, Fp16* weight, int8_t* low, size_t n, Round round) {
  sweep<V>(n, [=]<class W>(size_t i) {
    const auto x = W::load(master + i);
    W::store(weight + i, x);
    const auto h = W::load(weight + i);
    const auto exponent = fp16_exponent<W>(h);
    const auto per_unit = W::floats(W::all(int32_t((272u + 5) << 23)) - exponent);  // 32 / (ulp / 256)
    const auto rest = W::bits((x - h) * per_unit);
    const auto finite = W::select(W::greater(W::all(0x7f800000), exponent), rest, W::all(0));
    const auto steps = W::to_int(W::floats(finite) + W::all(4096.0f));
    const auto kept = W::template right<5>(steps + round.template noise<W, 5>(W::bits(x), i)) - W::all(128);
    W::store_int(low + i, W::max(W::min(kept, W::all(127)), W::all(-127)));
  });
}

template <class V> inline void decode_weight(const Fp16* weight, const int8_t* low, float* master, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) {
    const auto h = W::load(weight + i);
    const auto unit = W::floats(fp16_exponent<W>(h) - W::all(18 << 23));
    W::store(master + i, h + W::from_int(W::load_int(low + i)) * unit);
  });
}

}  // namespace
}  // namespace unbounded
