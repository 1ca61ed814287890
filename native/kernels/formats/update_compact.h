// The update of the compact format. A block goes through five parts, each of them one block later than the part before:
//
//   block j      advance  decode the moments, add the gradient, find the new scales
//   block j - 1  root     of the second moment
//   block j - 2  raise    it by eps
//   block j - 3  divide   by it, which gives the direction
//   block j - 4  store    step and encode the weights, encode the moments
//
// One loop over the vectors of a block does all five, each for its own block, so that no operation waits for another:
// not for a root or a quotient, which take as long as everything else a vector needs, and not for the largest value
// of a block. Between its parts a block is in memory that stays in the first cache.
#pragma once

#include "kernels/formats/compact_block.h"

namespace unbounded {
namespace {

inline constexpr size_t LAG = 4;  // blocks from the first part to the last

// What all vectors of a block share, of the block that advances and of the one that is stored.
template <class V> struct Shared {
  typename V::F first_scale, first_offset, first_inverse, second_scale, second_offset, second_inverse;
};

// The largest magnitudes of a block's new moments, as bits.
template <class V> struct Highest {
  typename V::I first = V::all(0), second = V::all(0);
};

// Bytes of four vectors before they are stored.
template <class V> struct Quads {
  typename V::Quad remainder, first, second;
};

// What stays the same for all blocks.
template <class V> struct Given {
  const Update& u;
  const Salts& salts;
  const Literals& l;
  const typename V::Masks& masks;
  const bool scaled;
};

template <class V>
[[gnu::always_inline]] inline typename V::F load_grad(const Given<V>& c, const void* grad, size_t k) {
  const auto g = c.u.grad_type == DType::bf16  ? V::load(at<Bf16>(grad, k))
                 : c.u.grad_type == DType::f32 ? V::load(at<float>(grad, k))
                                               : V::load(at<Fp16>(grad, k));
  return c.scaled ? g * V::all(c.u.grad_scale) : g;
}

// The parts, for the vector at place k.

template <class V, class R, class T>
[[gnu::always_inline]] inline void advance_at(const Given<V>& c, const Place<T>& p, size_t k, const Shared<V>& shared,
                                              Stepped& b, Highest<V>& highest) {
  const auto g = load_grad<V>(c, p.grad, k);
  auto w = g, m = g, v = g;
  if (R::couples) w = decode_at<V>(p.weight + k, p.remainder + k);
  if (R::first) m = First::decode<V>(c.l, p.first + k, shared.first_scale, shared.first_offset);
  if (R::second) v = Second::decode<V>(c.l, p.second + k, shared.second_scale, shared.second_offset);
  const auto numerator = R::template advance<V>(c.u.step, w, g, m, v);
  if (!R::divides) V::store(b.direction + k, numerator);
  if (R::first || R::divides) V::store(b.first + k, R::first ? m : numerator);
  if (R::second) V::store(b.second + k, v);
  if (R::first) highest.first = V::max(highest.first, V::bits(m) & V::all(c.l.magnitude));
  if (R::second) highest.second = V::max(highest.second, V::bits(v));
}

template <class V> [[gnu::always_inline]] inline void root_at(size_t k, Stepped& b) {
  V::store_root(b.direction + k, b.second + k);
}

template <class V> [[gnu::always_inline]] inline void raise_at(const Given<V>& c, size_t k, Stepped& b) {
  V::store(b.direction + k, V::load(b.direction + k) + V::all(c.u.step.eps));
}

template <class V> [[gnu::always_inline]] inline void divide_at(size_t k, Stepped& b) {
  V::store_quotient(b.direction + k, b.first + k, b.direction + k);
}

// The vector is number q of the four whose bytes are stored together.
template <class V, class R, int q, class T>
[[gnu::always_inline]] inline void encode_at(const Given<V>& c, const Place<T>& p, size_t k, const Shared<V>& shared,
                                             const Stepped& b, Quads<V>& out) {
  const auto direction = V::load(b.direction + k);
  const auto w = R::template apply<V>(c.u.step, decode_at<V>(p.weight + k, p.remainder + k), direction);
  const auto m = V::bits(R::first ? V::load(b.first + k) : R::second ? V::load(b.second + k) : direction);
  const auto weight_noise = V::mix(m, V::load_int(c.salts.weight + k), V::all(c.l.weight_noise));
  V::template put<q, remainder_shift<T>>(c.masks, out.remainder, encode_at<V>(w, weight_noise, p.weight + k));
  const auto noise = V::mix(V::bits(R::divides ? direction : w), V::load_int(c.salts.code + k), V::all(c.l.code_noise));
  if (R::first) {
    const auto magnitude = V::floats(m & V::all(c.l.magnitude));
    const auto z = rounded<V>(magnitude, shared.first_inverse, c.l.first_offset, noise);
    V::template put<q, 24>(c.masks, out.first, First::code<V>(c.l, z, m));
  }
  if (R::second) {
    const auto z = rounded<V>(V::load(b.second + k), shared.second_inverse, c.l.second_offset, noise);
    V::template put<q, CODE_SHIFT>(c.masks, out.second, z);
  }
}

template <class V, class R, class T>
[[gnu::always_inline]] inline void store_at(const Place<T>& p, size_t k, const Quads<V>& quads) {
  V::store(p.remainder + k, V::flip(V::packed(quads.remainder), V::all_bytes(0x80)));
  if (R::first) V::store(p.first + k, V::packed(quads.first));
  if (R::second) V::store(p.second + k, V::max(V::packed(quads.second), V::all_bytes(1)));
}

template <class V, class R, class T> inline Shared<V> shared_of(const Place<T>& p, const Stepped& stored) {
  const auto first = V::all(R::first ? *p.first_scale : 0), second = V::all(R::second ? *p.second_scale : 0);
  return {first,  first * V::all(First::offset),   V::all(stored.first_inverse),
          second, second * V::all(Second::offset), V::all(stored.second_inverse)};
}

// Sets the scales of a block that has been advanced, from the bits of its largest magnitudes.
template <class R, class T> inline void rescale(const Place<T>& p, uint32_t first, uint32_t second, Stepped& advanced) {
  first = block_scale(first, First::headroom), second = block_scale(second, Second::headroom);
  if (R::first) *p.first_scale = float_of(first), advanced.first_inverse = inverse_scale(first);
  if (R::second) *p.second_scale = float_of(second), advanced.second_inverse = inverse_scale(second);
}

// Fetches 64 elements, of this many bytes each, that are used some blocks later. The processor's own prefetching stops
// at the end of a page, which arrays of one byte per element reach often. Always inline: a function that only
// prefetches looks to the compiler like one that does nothing.
[[gnu::always_inline]] inline void fetch(const void* array, size_t k, size_t bytes) {
  const uintptr_t ahead = uintptr_t(array) + (k + 4 * BLOCK) * bytes;
  for (size_t line = 0; line < bytes; ++line) __builtin_prefetch(reinterpret_cast<const void*>(ahead + 64 * line));
}

template <class V, class R, class T>
[[gnu::always_inline]] inline void fetch_ahead(const Given<V>& c, const Place<T>& p, size_t k) {
  fetch(p.weight, k, sizeof(T)), fetch(p.remainder, k, 1);
  c.u.grad_type == DType::f32 ? fetch(p.grad, k, 4) : fetch(p.grad, k, 2);
  if (R::first) fetch(p.first, k, 1);
  if (R::second) fetch(p.second, k, 1);
}

template <class V, class R, class T> inline void update_blocks(const Update& given, size_t begin, size_t end) {
  const Update u = given;  // a copy that no store can change: its values need not be loaded again after each
  const Salts salts = salts_of<T>(u);
  const Literals literals{weight_noise<T>};
  const typename V::Masks masks{};
  const Given<V> c{u, salts, literals, masks, bits_of(u.grad_scale) != bits_of(1.0f)};
  Spare<T> spare{};
  Stepped ring[LAG + 1]{};
  Stepped *advanced = ring, *rooted = ring + 1, *raised = ring + 2, *divided = ring + 3, *stored = ring + 4;
  for (size_t i = begin; i < end + LAG * BLOCK; i += BLOCK) {
    const Place<T> from = i < end ? place_of<R, T>(u, i) : spare.place();
    const Place<T> to = i >= begin + LAG * BLOCK ? place_of<R, T>(u, i - LAG * BLOCK) : spare.place();
    const Shared<V> shared = shared_of<V, R>(from, *stored);
    Highest<V> highest;
#pragma GCC unroll 2
    for (size_t k = 0; k < BLOCK; k += 4 * V::width) {
      if (k % 64 == 0) fetch_ahead<V, R>(c, from, k);
      Quads<V> quads;
      const auto vector = [&]<int q>() __attribute__((always_inline)) {
        const size_t place = k + q * V::width;
        if (R::divides) divide_at<V>(place, *divided), raise_at<V>(c, place, *raised), root_at<V>(place, *rooted);
        advance_at<V, R>(c, from, place, shared, *advanced, highest);
        encode_at<V, R, q>(c, to, place, shared, *stored, quads);
      };
      vector.template operator()<0>(), vector.template operator()<1>();
      vector.template operator()<2>(), vector.template operator()<3>();
      store_at<V, R>(to, k, quads);
    }
    uint32_t first, second;
    V::highest(highest.first, highest.second, first, second);
    rescale<R>(from, first, second, *advanced);
    Stepped* next = stored;
    stored = divided, divided = raised, raised = rooted, rooted = advanced, advanced = next;
  }
}

#if defined(__aarch64__)
template <class V, class R, class T> inline void update_blocks_neon(const Update& u, size_t begin, size_t end);
#endif

// Whole blocks, the way that suits the vectors.
template <class V, class R, class T> inline void update_whole(const Update& u, size_t begin, size_t end) {
#if defined(__aarch64__)
  if constexpr (V::width > 1) update_blocks_neon<V, R, T>(u, begin, end);
  else
#endif
    update_blocks<V, R, T>(u, begin, end);
}

// The last block, of n < BLOCK elements, filled up with zeros, which change neither its scales nor its other values.
template <class V, class R, class T> inline void update_short_block(const Update& u, size_t begin, size_t n) {
  Spare<T> padded{};
  Update whole = u;
  whole.weight = padded.weight, whole.grad = padded.grad, whole.remainder = padded.remainder;
  whole.first = padded.first, whole.second = padded.second;
  if (R::first) whole.first_scale += begin / BLOCK;
  if (R::second) whole.second_scale += begin / BLOCK;
  const auto exchange = [&](auto copy) {
    copy(padded.weight, at<T>(u.weight, begin), n * sizeof(T));
    copy(padded.remainder, at<int8_t>(u.remainder, begin), n);
    if (R::first) copy(padded.first, at<int8_t>(u.first, begin), n);
    if (R::second) copy(padded.second, at<int8_t>(u.second, begin), n);
  };
  const size_t grad_bytes = u.grad_type == DType::f32 ? 4 : 2;
  __builtin_memcpy(padded.grad, at<char>(u.grad, begin * grad_bytes), n * grad_bytes);
  exchange([](void* to, const void* from, size_t bytes) { __builtin_memcpy(to, from, bytes); });
  update_whole<V, R, T>(whole, 0, BLOCK);
  exchange([](const void* from, void* to, size_t bytes) { __builtin_memcpy(to, from, bytes); });
}

template <class V, class R, class T> inline void update_compact(const Update& u, size_t begin, size_t end) {
  const size_t rest = (end - begin) % BLOCK;
  if (begin < end - rest) update_whole<V, R, T>(u, begin, end - rest);
  if (rest) update_short_block<V, R, T>(u, end - rest, rest);
}

}  // namespace
}  // namespace unbounded
