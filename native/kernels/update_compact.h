// The update of the compact format. A block goes through four parts, each of them one block behind the part before:
//
//   block j      advance  decode the moments, add the gradient, find the new scales
//   block j - 1  root     of the second moment
//   block j - 2  divide   by it, which gives the direction
//   block j - 3  store    step and encode the weights, encode the moments
//
// One loop over the vectors of a block does all four, each for its own block, so that no operation waits for another:
// not for a root or a quotient, which take longer than everything else a vector needs, and not for the largest value
// of a block. Between its parts a block is in memory that stays in the first cache.
#pragma once

#include "buffers.h"
#include "compact.h"

namespace unbounded {
namespace {

struct Scales {
  float first, second;
};

// A block on its way. `first` is also the numerator of a rule that divides, and `direction` first the root.
struct Stepped {
  alignas(64) float first[BLOCK], magnitude[BLOCK], second[BLOCK], direction[BLOCK];
  Scales inverse;  // of the new moments' scales
};

// The largest magnitudes of a block's new moments, as bits.
template <class V> struct Highest {
  typename V::I first = V::all(0), second = V::all(0);
};

// The four parts for one vector: elements i and on, at place k of their block.

template <class V, class R, class T, class G>
[[gnu::always_inline]] inline void advance_at(const Update& u, size_t i, size_t k, bool scaled, const Scales& scales,
                                              Stepped& b, Highest<V>& highest) {
  auto g = V::load(at<G>(u.grad, i));
  if (scaled) g = g * V::all(u.grad_scale);
  auto w = g, m = g, v = g;
  if (R::couples) w = decode_at<V>(at<T>(u.weight, i), at<int8_t>(u.low, i));
  if (R::first) m = First::decode<V>(V::load_int(at<int8_t>(u.first, i)), scales.first);
  if (R::second) v = Second::decode<V>(V::load_int(at<uint8_t>(u.second, i)), scales.second);
  const auto numerator = R::template advance<V>(u.step, w, g, m, v);
  if (R::first || R::divides) V::store(b.first + k, R::first ? m : numerator);
  if (!R::divides) V::store(b.direction + k, numerator);
  if (R::second) V::store(b.second + k, v);
  const auto magnitude = V::bits(m) & V::all(0x7fffffff);
  if (R::first) V::store(b.magnitude + k, V::floats(magnitude));
  if (R::first) highest.first = V::max(highest.first, magnitude);
  if (R::second) highest.second = V::max(highest.second, V::bits(v));
}

template <class V> [[gnu::always_inline]] inline void root_at(const Update& u, size_t k, Stepped& b) {
  V::store(b.direction + k, root<V>(u.step, V::load(b.second + k)));
}

template <class V> [[gnu::always_inline]] inline void divide_at(size_t k, Stepped& b) {
  V::store(b.direction + k, V::load(b.first + k) / V::load(b.direction + k));
}

template <class V, class R, class T>
[[gnu::always_inline]] inline void store_at(const Update& u, size_t i, size_t k, const Stepped& b) {
  const auto d = V::load(b.direction + k);
  const auto w = R::template apply<V>(u.step, decode_at<V>(at<T>(u.weight, i), at<int8_t>(u.low, i)), d);
  const auto source = R::first ? V::load(b.first + k) : R::second ? V::load(b.second + k) : d;
  encode_at<V>(w, noise_of<V>(source, u.salt + k, weight_noise<T>), at<T>(u.weight, i), at<int8_t>(u.low, i));
  const auto noise = noise_of<V>(R::divides ? d : w, u.salt + k, CODE_NOISE);
  if (R::first) {
    const auto code = First::encode<V>(V::load(b.first + k), V::load(b.magnitude + k), b.inverse.first, noise);
    V::template store_byte<3>(at<int8_t>(u.first, i), code);
  }
  if (R::second) {
    const auto v = V::load(b.second + k);
    const auto code = Second::encode<V>(v, v, b.inverse.second, noise);
    V::template store_byte<3>(at<uint8_t>(u.second, i), code);
  }
}

template <class R> inline Scales scales_of(const Update& u, size_t block) {
  return {R::first ? u.first_scale[block] : 0, R::second ? u.second_scale[block] : 0};
}

// Sets the scales of a block that has been advanced, and returns their inverses.
template <class V, class R> inline Scales rescale(const Update& u, size_t block, const Highest<V>& highest) {
  uint32_t first, second;
  V::highest(highest.first, highest.second, first, second);
  first = block_scale(first, First::headroom), second = block_scale(second, Second::headroom);
  if (R::first) u.first_scale[block] = float_of(first);
  if (R::second) u.second_scale[block] = float_of(second);
  return {inverse_scale(first), inverse_scale(second)};
}

// Always inline: a function that only prefetches looks to the compiler like one that does nothing.
[[gnu::always_inline]] inline void fetch(const void* array, size_t offset, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(array) + offset + line));
}

// Fetches the block that is used some blocks later. The processor's own prefetching stops at the end of a page, where
// arrays of one byte an element arrive often.
template <class R, class T, class G> [[gnu::always_inline]] inline void fetch_ahead(const Update& u, size_t begin) {
  const size_t i = begin + 8 * BLOCK;
  fetch(u.weight, i * sizeof(T), BLOCK * sizeof(T)), fetch(u.low, i, BLOCK);
  fetch(u.grad, i * sizeof(G), BLOCK * sizeof(G));
  if (R::first) fetch(u.first, i, BLOCK);
  if (R::second) fetch(u.second, i, BLOCK);
}

template <class V, class R, class T, class G> inline void update_blocks(const Update& given, size_t begin, size_t end) {
  const Update u = given;  // a copy that no store can change: its values need not be loaded again after each
  const bool scaled = u.grad_scale != 1.0f;
  Stepped ring[4];
  const size_t count = (end - begin) / BLOCK, rounds = count ? count + 3 : 0;
  for (size_t j = 0; j < rounds; ++j) {
    const size_t i = begin + j * BLOCK;
    const auto runs = [&](size_t lag) { return j >= lag && j - lag < count; };
    const auto block = [&](size_t lag) -> Stepped& { return ring[(j + 4 - lag) % 4]; };
    const auto pass = [&]<bool all>() {
      const bool advances = all || runs(0), roots = all || runs(1), divides = all || runs(2), stores = all || runs(3);
      Highest<V> highest;
      Scales scales{};
      if (advances) scales = scales_of<R>(u, i / BLOCK), fetch_ahead<R, T, G>(u, i);
#pragma GCC unroll 2
      for (size_t k = 0; k < BLOCK; k += V::width) {
        if (divides && R::divides) divide_at<V>(k, block(2));
        if (roots && R::divides) root_at<V>(u, k, block(1));
        if (advances) advance_at<V, R, T, G>(u, i + k, k, scaled, scales, block(0), highest);
        if (stores) store_at<V, R, T>(u, i + k - 3 * BLOCK, k, block(3));
      }
      if (advances) block(0).inverse = rescale<V, R>(u, i / BLOCK, highest);
    };
    if (runs(0) && runs(3))
      pass.template operator()<true>();
    else
      pass.template operator()<false>();
  }
}

// The last block, of n < BLOCK elements, filled up with zeros, which change neither its scales nor its other values.
template <class V, class R, class T, class G> inline void update_short_block(const Update& u, size_t begin, size_t n) {
  struct {
    T weight[BLOCK];
    G grad[BLOCK];
    int8_t low[BLOCK], first[BLOCK], second[BLOCK];
  } padded{};
  Update whole = u;
  whole.weight = padded.weight, whole.grad = padded.grad, whole.low = padded.low;
  whole.first = padded.first, whole.second = padded.second;
  if (R::first) whole.first_scale += begin / BLOCK;
  if (R::second) whole.second_scale += begin / BLOCK;
  const auto exchange = [&](auto copy) {
    copy(padded.weight, at<T>(u.weight, begin), n * sizeof(T));
    copy(padded.low, at<int8_t>(u.low, begin), n);
    if (R::first) copy(padded.first, at<int8_t>(u.first, begin), n);
    if (R::second) copy(padded.second, at<int8_t>(u.second, begin), n);
  };
  __builtin_memcpy(padded.grad, at<G>(u.grad, begin), n * sizeof(G));
  exchange([](void* to, const void* from, size_t bytes) { __builtin_memcpy(to, from, bytes); });
  update_blocks<V, R, T, G>(whole, 0, BLOCK);
  exchange([](const void* from, void* to, size_t bytes) { __builtin_memcpy(to, from, bytes); });
}

template <class V, class R, class T> inline void update_compact(const Update& u, size_t begin, size_t end) {
  const size_t rest = (end - begin) % BLOCK;
  typed(u.grad, u.grad_type, [&]<class G>(const G*) {
    update_blocks<V, R, T, G>(u, begin, end - rest);
    if (rest) update_short_block<V, R, T, G>(u, end - rest, rest);
  });
}

}  // namespace
}  // namespace unbounded
