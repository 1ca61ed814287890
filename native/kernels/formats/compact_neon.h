// The update of the compact format on NEON, in two loops over a block: advance decodes the moments, adds the gradient,
// takes the root of the second moment and finds the new scales; store divides by the root, steps and encodes. Each has
// one of the two operations that take longest, and the processor keeps those of several vectors under way by itself,
// which the five parts of update_compact.h arrange for on wider vectors.
//
// Both loops wait for the two pipes of vector arithmetic. Storing a register takes a place in them, and so does copying
// one; loading does not. So nothing is stored between the loops that the second can compute as cheaply, and a constant
// that an operation overwrites is loaded each time.
#pragma once

#include <arm_neon.h>

#include "kernels/formats/update_compact.h"

namespace unbounded {
namespace {

// A value for all lanes of two vectors, kept in memory: the compiler takes each place for another value.
template <class V> struct Constants {
  alignas(64) float values[2 * V::width];
  Constants(float first, float second) {
    V::store(values, V::all(first)), V::store(values + V::width, V::all(second));
    asm("" : "+m"(values));
  }
  // Out of the compiler's sight, or it would load once and copy.
  typename V::F load(size_t vector) const {
    const float* from = values + vector * V::width;
    asm("" : "+r"(from));
    return V::load(from);
  }
};

// The floats whose upper halves these are.
template <class V> inline typename V::F floats_of(uint16x8_t first, uint16x8_t last) {
  return V::floats(V::joined({vdupq_n_u16(0), vdupq_n_u16(0)}, {first, last}));
}

// For -z, whose sign reverses the difference: offset - z * scale is one instruction, z * scale - offset is two.
template <class V>
inline typename V::F decode_first(const int8_t* codes, const typename V::F& scale, const typename V::F& offset) {
  const int8x16_t c = veorq_s8(vld1q_s8(codes), vdupq_n_s8(-0x80));
  const auto placed = [](int16x8_t shifted) {
    return vbslq_u16(vdupq_n_u16(0x83f8), vreinterpretq_u16_s16(shifted), vdupq_n_u16(FIRST_BASE >> 16));
  };
  const auto z = floats_of<V>(placed(vshll_n_s8(vget_low_s8(c), 3)), placed(vshll_high_n_s8(c, 3)));
  return V::fnma(z, scale, V::floats(V::pick(V::all(0x80000000u), V::bits(z), V::bits(offset))));
}

template <class V>
inline typename V::F decode_second(const uint8_t* codes, const typename V::F& scale, const typename V::F& minus_offset) {
  const uint8x16_t c = vld1q_u8(codes);
  const auto placed = [](uint16x8_t shifted) { return vorrq_u16(shifted, vdupq_n_u16(SECOND_BASE >> 16)); };
  const auto z = floats_of<V>(placed(vshll_n_u8(vget_low_u8(c), 3)), placed(vshll_high_n_u8(c, 3)));
  return V::fma(z, scale, minus_offset);
}

// The remainder makes the lower halves; where it is negative, the upper ones are one less.
template <class V> inline typename V::F decode_sixteen(const Bf16* weight, const int8_t* remainder) {
  const int8x16_t bytes = vld1q_s8(remainder), zero = vdupq_n_s8(0);
  const int16x8_t first = vreinterpretq_s16_s8(vzip1q_s8(zero, bytes)), last = vreinterpretq_s16_s8(vzip2q_s8(zero, bytes));
  const auto lessened = [](uint16x8_t high, int16x8_t low) {
    return vreinterpretq_u16_s16(vsraq_n_s16(vreinterpretq_s16_u16(high), low, 15));
  };
  const auto high = V::load_halves(weight);
  return V::floats(V::joined({vreinterpretq_u16_s16(first), vreinterpretq_u16_s16(last)},
                             {lessened(high.first, first), lessened(high.last, last)}));
}
template <class V> inline typename V::F decode_sixteen(const Fp16* weight, const int8_t* remainder) {
  return decode_at<V>(weight, remainder);
}

inline uint32x4_t higher(uint32x4_t highest, uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  return vmaxq_u32(highest, vmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d)));
}

// The first loop: the new moments of a block, what to divide by, and the new scales.
template <class V, class R, class G, bool scaled, class T>
[[gnu::always_inline]] inline void advance_block(const Update& u, const Place<T>& p, Stepped& b) {
  using F = typename V::F;
  const float first = R::first ? *p.first_scale : 0, second = R::second ? *p.second_scale : 0;
  const F first_scale = V::all(first), second_scale = V::all(second);
  const Constants<V> offsets(first * First::offset, -second * Second::offset);
  uint32x4_t first_highest = vdupq_n_u32(0), second_highest = vdupq_n_u32(0);
  for (size_t k = 0; k < BLOCK; k += V::width) {
    if (k % 64 == 0) {
      fetch(p.grad, k, sizeof(G));
      if (R::first) fetch(p.first, k, 1);
      if (R::second) fetch(p.second, k, 1);
    }
    F g = V::load(static_cast<const G*>(p.grad) + k);
    if (scaled) g = g * V::all(u.grad_scale);
    F w = g, m = g, v = g;
    if (R::couples) w = decode_sixteen<V>(p.weight + k, p.remainder + k);
    if (R::first) m = decode_first<V>(p.first + k, first_scale, offsets.load(0));
    if (R::second) v = decode_second<V>(p.second + k, second_scale, offsets.load(1));
    const F numerator = R::template advance<V>(u.step, w, g, m, v);
    V::store(b.direction + k, R::divides ? root<V>(u.step, v) : numerator);
    if (R::first || R::divides) V::store(b.first + k, R::first ? m : numerator);
    if (R::second) V::store(b.second + k, v);
    const auto raw = V::bits(V::magnitude(m)), square = V::bits(v);
    if (R::first) first_highest = higher(first_highest, raw.a, raw.b, raw.c, raw.d);
    if (R::second) second_highest = higher(second_highest, square.a, square.b, square.c, square.d);
  }
  rescale<R>(p, vmaxvq_u32(first_highest), vmaxvq_u32(second_highest), b);
}

// Codes of z + noise: bits CODE_SHIFT and on.
template <class V> inline uint8x16_t codes_of(const typename V::I& z, const typename V::I& noise) {
  const uint16x8_t first = vaddhn_high_u32(vaddhn_u32(z.a, noise.a), z.b, noise.b);
  const uint16x8_t last = vaddhn_high_u32(vaddhn_u32(z.c, noise.c), z.d, noise.d);
  return V::template shifted<CODE_SHIFT - 16>({first, last});
}

// The second loop: direction, weights and codes.
template <class V, class R, class T>
[[gnu::always_inline]] inline void store_block(const Update& u, const Salts& salts, const Constants<V>& offsets,
                                               const Place<T>& p, const Stepped& b) {
  using F = typename V::F;
  using I = typename V::I;
  const F first_inverse = V::all(b.first_inverse), second_inverse = V::all(b.second_inverse);
  const auto put = [](void* to, uint8x16_t bytes) { vst1q_u8(static_cast<uint8_t*>(to), bytes); };
  for (size_t k = 0; k < BLOCK; k += V::width) {
    if (k % 64 == 0) fetch(p.weight, k, sizeof(T)), fetch(p.remainder, k, 1);
    const F stored = V::load(b.direction + k), direction = R::divides ? V::load(b.first + k) / stored : stored;
    const F w = R::template apply<V>(u.step, decode_sixteen<V>(p.weight + k, p.remainder + k), direction);
    const I m = V::bits(R::first ? V::load(b.first + k) : R::second ? V::load(b.second + k) : direction);
    const I left = encode_at<V>(w, V::mix(m, V::load_int(salts.weight + k), V::all(weight_noise<T>)), p.weight + k);
    put(p.remainder + k, veorq_u8(V::template bytes_from<remainder_shift<T>>(left), vdupq_n_u8(0x80)));
    const I noise = V::mix(V::bits(R::divides ? direction : w), V::load_int(salts.code + k), V::all(CODE_NOISE));
    if (R::first) {
      const I z = V::bits(V::fma(V::magnitude(V::floats(m)), first_inverse, offsets.load(0)));
      put(p.first + k, vbslq_u8(vdupq_n_u8(0x80), V::template bytes_from<24>(m), codes_of<V>(z, noise)));
    }
    if (R::second) {
      const I z = V::bits(V::fma(V::load(b.second + k), second_inverse, offsets.load(1)));
      put(p.second + k, vmaxq_u8(codes_of<V>(z, noise), vdupq_n_u8(1)));
    }
  }
}

template <class V, class R, class T> inline void update_blocks_neon(const Update& given, size_t begin, size_t end) {
  const Update u = given;  // a copy that no store can change: its values need not be loaded again after each
  const Salts salts = salts_of<T>(u);
  const Constants<V> offsets(First::offset, Second::offset);
  const bool scaled = bits_of(u.grad_scale) != bits_of(1.0f);
  Stepped stepped;
  for (size_t i = begin; i < end; i += BLOCK) {
    const Place<T> p = place_of<R, T>(u, i);
    typed(u.grad, u.grad_type, [&]<class G>(const G*) {
      scaled ? advance_block<V, R, G, true>(u, p, stepped) : advance_block<V, R, G, false>(u, p, stepped);
    });
    store_block<V, R>(u, salts, offsets, p, stepped);
  }
}

}  // namespace
}  // namespace unbounded
