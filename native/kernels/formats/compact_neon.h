// The update of the compact format on NEON, sixteen elements at a time: the bytes of a code are put in their places
// sixteen lanes at once, before they are spread over four vectors, and gathered from four vectors by three unzips.
//
// A block goes through two loops: advance decodes the moments, adds the gradient and finds the new scales; store takes
// root and quotient, steps and encodes. Vectors of 128 bits are so short that the processor has the roots and quotients
// of several in flight by itself, which the five parts of update_compact.h arrange for on wider ones. Written vector by
// vector, as there, an element cost 27 instructions; it costs 15.
#pragma once

#include <arm_neon.h>

#include "kernels/formats/update_compact.h"

namespace unbounded {
namespace {

template <class V> struct Sixteen {
  typename V::F x[4];
};

// The upper halves of four vectors of floats, from the two bytes of each element.
template <class V> inline Sixteen<V> spread(uint8x16_t low, uint8x16_t high) {
  const uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(low, high)), b = vreinterpretq_u16_u8(vzip2q_u8(low, high));
  return {{V::upper(vget_low_u16(a)), V::upper_high(a), V::upper(vget_low_u16(b)), V::upper_high(b)}};
}

template <class V> inline Sixteen<V> load_sixteen(const Bf16* p) {
  const uint16x8_t a = vld1q_u16(&p->bits), b = vld1q_u16(&p[8].bits);
  return {{V::upper(vget_low_u16(a)), V::upper_high(a), V::upper(vget_low_u16(b)), V::upper_high(b)}};
}
template <class V, class T> inline Sixteen<V> load_sixteen(const T* p) {
  return {{V::load(p), V::load(p + 4), V::load(p + 8), V::load(p + 12)}};
}

// For -z, whose sign reverses the difference: c - z * scale is one instruction, z * scale - c is two.
template <class V>
inline Sixteen<V> decode_first(const int8_t* codes, typename V::F scale, typename V::F offset) {
  const uint8x16_t c = vreinterpretq_u8_s8(vld1q_s8(codes));
  const uint8x16_t exponent = vorrq_u8(vshrq_n_u8(vaddq_u8(c, c), 6), vdupq_n_u8(0x80 | FIRST_BASE >> 24));
  const uint8x16_t high = vandq_u8(exponent, vornq_u8(vdupq_n_u8(0x7f), c));
  Sixteen<V> z = spread<V>(vshlq_n_u8(c, 3), high);
  const uint32x4_t sign = vdupq_n_u32(0x80000000);
  for (auto& part : z.x) part = {vfmsq_f32(vbslq_f32(sign, part.x, offset.x), part.x, scale.x)};
  return z;
}

template <class V>
inline Sixteen<V> decode_second(const uint8_t* codes, typename V::F scale, typename V::F minus_offset) {
  const uint8x16_t c = vld1q_u8(codes);
  Sixteen<V> z = spread<V>(vshlq_n_u8(c, 3), vorrq_u8(vshrq_n_u8(c, 5), vdupq_n_u8(SECOND_BASE >> 24)));
  for (auto& part : z.x) part = V::fma(part, scale, minus_offset);
  return z;
}

template <class V> inline Sixteen<V> decode_sixteen(const Bf16* weight, const int8_t* remainder) {
  const int8x16_t bytes = vld1q_s8(remainder);
  const int16x8_t a = vreinterpretq_s16_u16(vshll_n_u8(vreinterpret_u8_s8(vget_low_s8(bytes)), 8));
  const int16x8_t b = vreinterpretq_s16_u16(vshll_high_n_u8(vreinterpretq_u8_s8(bytes), 8));
  Sixteen<V> w = load_sixteen<V>(weight);
  const auto add = [](typename V::F& x, int16x4_t remainder) { x = V::floats({vaddw_s16(V::bits(x).x, remainder)}); };
  add(w.x[0], vget_low_s16(a)), add(w.x[1], vget_high_s16(a)), add(w.x[2], vget_low_s16(b)), add(w.x[3], vget_high_s16(b));
  return w;
}
template <class V> inline Sixteen<V> decode_sixteen(const Fp16* weight, const int8_t* remainder) {
  return {{decode_at<V>(weight, remainder), decode_at<V>(weight + 4, remainder + 4),
           decode_at<V>(weight + 8, remainder + 8), decode_at<V>(weight + 12, remainder + 12)}};
}

// Halves and bytes of four vectors, in order.
template <class V> inline uint16x8_t low_halves(typename V::I a, typename V::I b) {
  return vuzp1q_u16(vreinterpretq_u16_s32(a.x), vreinterpretq_u16_s32(b.x));
}
template <class V> inline uint16x8_t high_halves(typename V::I a, typename V::I b) {
  return vuzp2q_u16(vreinterpretq_u16_s32(a.x), vreinterpretq_u16_s32(b.x));
}
template <class V> inline uint8x16_t top_bytes(const typename V::I (&x)[4]) {
  return vuzp2q_u8(vreinterpretq_u8_u16(high_halves<V>(x[0], x[1])), vreinterpretq_u8_u16(high_halves<V>(x[2], x[3])));
}
template <class V> inline uint8x16_t codes_of(const typename V::I (&z)[4]) {  // bits CODE_SHIFT and on
  const uint8x8_t half = vshrn_n_u16(high_halves<V>(z[0], z[1]), CODE_SHIFT - 16);
  return vshrn_high_n_u16(half, high_halves<V>(z[2], z[3]), CODE_SHIFT - 16);
}

template <class V>
inline void store_weights(const typename V::F (&w)[4], const typename V::I (&noise)[4], Bf16* weight,
                          int8_t* remainder) {
  typename V::I kept[4];
  for (int q = 0; q < 4; ++q) kept[q] = V::quiet(w[q]) + noise[q];
  vst1q_u16(&weight->bits, high_halves<V>(kept[0], kept[1]));
  vst1q_u16(&weight[8].bits, high_halves<V>(kept[2], kept[3]));
  const uint8x16_t bytes = vuzp2q_u8(vreinterpretq_u8_u16(low_halves<V>(kept[0], kept[1])),
                                     vreinterpretq_u8_u16(low_halves<V>(kept[2], kept[3])));
  vst1q_u8(reinterpret_cast<uint8_t*>(remainder), veorq_u8(bytes, vdupq_n_u8(0x80)));
}
template <class V>
inline void store_weights(const typename V::F (&w)[4], const typename V::I (&noise)[4], Fp16* weight,
                          int8_t* remainder) {
  typename V::Quad quad;
  const auto encode = [&]<int q>() {
    V::template put<q, remainder_shift<Fp16>>({}, quad, encode_at<V>(w[q], noise[q], weight + 4 * q));
  };
  encode.template operator()<0>(), encode.template operator()<1>();
  encode.template operator()<2>(), encode.template operator()<3>();
  V::store(remainder, V::flip(V::packed(quad), V::all_bytes(0x80)));
}

// The first loop: the new moments of a block, and its new scales.
template <class V, class R, class G, class T>
inline void advance_block(const Update& u, const Place<T>& p, Stepped& b) {
  using F = typename V::F;
  const F first_scale = V::all(R::first ? *p.first_scale : 0), second_scale = V::all(R::second ? *p.second_scale : 0);
  const F first_offset = first_scale * V::all(First::offset), minus = second_scale * V::all(-Second::offset);
  const bool scaled = bits_of(u.grad_scale) != bits_of(1.0f);
  Highest<V> highest;
  for (size_t k = 0; k < BLOCK; k += 16) {
    if (k % 64 == 0) {
      fetch(p.grad, k, sizeof(G));
      if (R::first) fetch(p.first, k, 1);
      if (R::second) fetch(p.second, k, 1);
    }
    Sixteen<V> g = load_sixteen<V>(static_cast<const G*>(p.grad) + k);
    if (scaled)
      for (auto& part : g.x) part = part * V::all(u.grad_scale);
    Sixteen<V> w = g, m = g, v = g;
    if (R::couples) w = decode_sixteen<V>(p.weight + k, p.remainder + k);
    if (R::first) m = decode_first<V>(p.first + k, first_scale, first_offset);
    if (R::second) v = decode_second<V>(p.second + k, second_scale, minus);
    for (size_t q = 0; q < 4; ++q) {
      const F numerator = R::template advance<V>(u.step, w.x[q], g.x[q], m.x[q], v.x[q]);
      if (!R::divides) V::store(b.direction + k + 4 * q, numerator);
      if (R::first || R::divides) V::store(b.first + k + 4 * q, R::first ? m.x[q] : numerator);
      if (R::second) V::store(b.second + k + 4 * q, v.x[q]);
      if (R::first) highest.first = V::max(highest.first, V::bits(V::magnitude(m.x[q])));
      if (R::second) highest.second = V::max(highest.second, V::bits(v.x[q]));
    }
  }
  rescale<V, R>(p, highest, b);
}

// The second loop: direction, weights and codes.
template <class V, class R, class T>
inline void store_block(const Update& u, const Salts& salts, const Place<T>& p, const Stepped& b) {
  using F = typename V::F;
  using I = typename V::I;
  const F first_inverse = V::all(b.first_inverse), second_inverse = V::all(b.second_inverse);
  const F first_offset = V::all(First::offset), second_offset = V::all(Second::offset);
  for (size_t k = 0; k < BLOCK; k += 16) {
    if (k % 64 == 0) fetch(p.weight, k, sizeof(T)), fetch(p.remainder, k, 1);
    Sixteen<V> w = decode_sixteen<V>(p.weight + k, p.remainder + k);
    I raw[4], weight_noise_of[4], first[4], second[4];
    for (size_t q = 0; q < 4; ++q) {
      const size_t at = k + 4 * q;
      const F v = R::second ? V::load(b.second + at) : w.x[q];
      const F direction = R::divides ? V::load(b.first + at) / root<V>(u.step, v) : V::load(b.direction + at);
      w.x[q] = R::template apply<V>(u.step, w.x[q], direction);
      raw[q] = V::bits(R::first ? V::load(b.first + at) : R::second ? v : direction);
      weight_noise_of[q] = V::mix(raw[q], V::load_int(salts.weight + at), V::all(weight_noise<T>));
      const I noise = V::mix(V::bits(R::divides ? direction : w.x[q]), V::load_int(salts.code + at), V::all(CODE_NOISE));
      if (R::first) {
        const F magnitude = V::magnitude(V::floats(raw[q]));
        first[q] = V::bits(V::fma(magnitude, first_inverse, first_offset)) + noise;
      }
      if (R::second) second[q] = V::bits(V::fma(v, second_inverse, second_offset)) + noise;
    }
    store_weights<V>(w.x, weight_noise_of, p.weight + k, p.remainder + k);
    if (R::first) {
      const uint8x16_t codes = vbslq_u8(vdupq_n_u8(0x80), top_bytes<V>(raw), codes_of<V>(first));
      vst1q_u8(reinterpret_cast<uint8_t*>(p.first + k), codes);
    }
    if (R::second) vst1q_u8(p.second + k, vmaxq_u8(codes_of<V>(second), vdupq_n_u8(1)));
  }
}

template <class V, class R, class T> inline void update_blocks_neon(const Update& given, size_t begin, size_t end) {
  const Update u = given;  // a copy that no store can change: its values need not be loaded again after each
  const Salts salts = salts_of<T>(u);
  Stepped stepped;
  for (size_t i = begin; i < end; i += BLOCK) {
    const Place<T> p = place_of<R, T>(u, i);
    typed(u.grad, u.grad_type, [&]<class G>(const G*) { advance_block<V, R, G>(u, p, stepped); });
    store_block<V, R>(u, salts, p, stepped);
  }
}

}  // namespace
}  // namespace unbounded
