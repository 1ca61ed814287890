// The fused update: states are decoded to fp32 in registers, stepped by their rule, and encoded again, so that every
// array crosses the memory bus once each way.
#pragma once

#include "buffers.h"
#include "compact.h"
#include "exact.h"
#include "kernels.h"

namespace unbounded {
namespace {

template <class T> inline T* at(void* p, size_t i) { return static_cast<T*>(p) + i; }
template <class T> inline const T* at(const void* p, size_t i) { return static_cast<const T*>(p) + i; }

template <class W> inline typename W::F load_grad(const Update& u, size_t i) {
  const auto g = u.grad_type == DType::bf16  ? W::load(at<Bf16>(u.grad, i))
                 : u.grad_type == DType::f32 ? W::load(at<float>(u.grad, i))
                                             : W::load(at<Fp16>(u.grad, i));
  return u.grad_scale == 1.0f ? g : g * W::all(u.grad_scale);
}

// Steps one vector of weights whose moments are fp32 in memory.
template <class W, class R> inline typename W::F step_at(const Update& u, size_t i, typename W::F w) {
  auto m = R::first ? W::load(at<float>(u.first, i)) : w;
  auto v = R::second ? W::load(at<float>(u.second, i)) : w;
  R::template step<W>(u.step, w, load_grad<W>(u, i), m, v);
  if (R::first) W::store(at<float>(u.first, i), m);
  if (R::second) W::store(at<float>(u.second, i), v);
  return w;
}

template <class V, class R> inline void update_fp32(const Update& u, size_t begin, size_t end) {
  sweep<V>(end - begin, [&]<class W>(size_t k) {
    const size_t i = begin + k;
    const auto w = step_at<W, R>(u, i, W::load(at<float>(u.weight, i)));
    W::store(at<float>(u.weight, i), w);
    if (!u.out) return;
    if (u.out_type == DType::bf16)
      W::store(at<Bf16>(u.out, i), w);
    else
      W::store(at<Fp16>(u.out, i), w);
  });
}

template <class V, class R> inline void update_exact(const Update& u, size_t begin, size_t end) {
  sweep<V>(end - begin, [&]<class W>(size_t k) {
    const size_t i = begin + k;
    Bf16* weight = at<Bf16>(u.weight, i);
    int16_t* low = at<int16_t>(u.low, i);
    split_at<W>(step_at<W, R>(u, i, join_at<W>(weight, low)), weight, low);
  });
}

// A block after its step, until its new moments are stored.
struct Stepped {
  alignas(64) float first[BLOCK], second[BLOCK], weight[BLOCK];  // weights where one moment is the only other array
};

struct Scales {
  float first, second;
};

// The largest magnitudes of a block's new moments, as bits.
template <class V> struct Highest {
  typename V::I first = V::all(0), second = V::all(0);
};

// Steps the vector of elements i and on, at place k of their block: weights are stored, moments are left in `out`.
template <class V, class R, class T>
inline void step_at(const Update& u, size_t i, size_t k, const Scales& scales, Stepped& out, Highest<V>& highest) {
  auto w = decode_at<V>(at<T>(u.weight, i), at<int8_t>(u.low, i)), m = w, v = w;
  const auto g = load_grad<V>(u, i);
  if (R::first) m = First::decode<V>(V::load_int(at<int8_t>(u.first, i)), scales.first);
  if (R::second) v = Second::decode<V>(V::load_int(at<uint8_t>(u.second, i)), scales.second);
  R::template step<V>(u.step, w, g, m, v);
  const auto noise = noise_of<V>(R::first ? m : R::second ? v : g, u.salt + k, weight_noise<T>);
  encode_at<V>(w, noise, at<T>(u.weight, i), at<int8_t>(u.low, i));
  if (R::first) V::store(out.first + k, m);
  if (R::second) V::store(out.second + k, v);
  if (R::first != R::second) V::store(out.weight + k, w);
  if (R::first) highest.first = V::max(highest.first, V::bits(m) & V::all(0x7fffffff));
  if (R::second) highest.second = V::max(highest.second, V::bits(v));
}

// Stores the moments of a vector that has been stepped.
template <class V, class R>
inline void store_at(const Update& u, size_t i, size_t k, const Scales& inverse, const Stepped& b) {
  if (R::first) {
    const auto noise = noise_of<V>(V::load((R::second ? b.second : b.weight) + k), u.salt + k, CODE_NOISE);
    const auto code = First::encode<V>(V::load(b.first + k), inverse.first, noise);
    V::template store_byte<3>(at<int8_t>(u.first, i), code);
  }
  if (R::second) {
    const auto noise = noise_of<V>(V::load((R::first ? b.first : b.weight) + k), u.salt + k, CODE_NOISE);
    const auto code = Second::encode<V>(V::load(b.second + k), inverse.second, noise);
    V::template store_byte<3>(at<uint8_t>(u.second, i), code);
  }
}

template <class R> inline Scales scales_of(const Update& u, size_t block) {
  return {R::first ? u.first_scale[block] : 0, R::second ? u.second_scale[block] : 0};
}

// Sets the scales of a block that has been stepped, and returns their inverses.
template <class V, class R> inline Scales rescale(const Update& u, size_t block, const Highest<V>& highest) {
  if (R::first) u.first_scale[block] = block_scale(V::highest(highest.first), First::headroom);
  if (R::second) u.second_scale[block] = block_scale(V::highest(highest.second), Second::headroom);
  const Scales scales = scales_of<R>(u, block);
  return {inverse_scale(scales.first), inverse_scale(scales.second)};
}

// Always inline: a function that only prefetches looks to the compiler like one that does nothing.
[[gnu::always_inline]] inline void fetch(const void* array, size_t offset, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(array) + offset + line));
}

// Fetches the block that is used some blocks later. The processor's own prefetching stops at the end of a page, where
// arrays of one byte an element arrive often.
template <class R, class T> [[gnu::always_inline]] inline void fetch_ahead(const Update& u, size_t begin) {
  const size_t i = begin + 8 * BLOCK, grad_bytes = u.grad_type == DType::f32 ? 4 : 2;
  fetch(u.weight, i * sizeof(T), BLOCK * sizeof(T)), fetch(u.low, i, BLOCK);
  fetch(u.grad, i * grad_bytes, BLOCK * grad_bytes);
  if (R::first) fetch(u.first, i, BLOCK);
  if (R::second) fetch(u.second, i, BLOCK);
}

// The moments of a block are stored after the next block has been stepped: their scales need a reduction over the
// block, and waiting for it would leave the processor idle.
template <class V, class R, class T> inline void update_blocks(const Update& given, size_t begin, size_t end) {
  const Update u = given;  // a copy that no store can change: its values need not be loaded again after each
  Stepped stepped[2];
  Scales inverse{};
  size_t parity = 0;
  for (size_t i = begin; i < end; i += BLOCK, parity ^= 1) {
    Highest<V> highest;
    const Scales scales = scales_of<R>(u, i / BLOCK);
    fetch_ahead<R, T>(u, i);
    for (size_t k = 0; k < BLOCK; k += V::width) step_at<V, R, T>(u, i + k, k, scales, stepped[parity], highest);
    for (size_t k = 0; k < BLOCK && i > begin; k += V::width)
      store_at<V, R>(u, i + k - BLOCK, k, inverse, stepped[parity ^ 1]);
    inverse = rescale<V, R>(u, i / BLOCK, highest);
  }
  for (size_t k = 0; k < BLOCK && begin < end; k += V::width)
    store_at<V, R>(u, end + k - BLOCK, k, inverse, stepped[parity ^ 1]);
}

// The last block, of n < BLOCK elements, filled up with zeros, which change neither its scales nor its other values.
template <class V, class R, class T> inline void update_short_block(const Update& u, size_t begin, size_t n) {
  struct {
    T weight[BLOCK];
    float grad[BLOCK];
    int8_t low[BLOCK], first[BLOCK], second[BLOCK];
  } padded{};
  const size_t grad_bytes = u.grad_type == DType::f32 ? 4 : 2;
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
  __builtin_memcpy(padded.grad, at<char>(u.grad, begin * grad_bytes), n * grad_bytes);
  exchange([](void* to, const void* from, size_t bytes) { __builtin_memcpy(to, from, bytes); });
  update_blocks<V, R, T>(whole, 0, BLOCK);
  exchange([](const void* from, void* to, size_t bytes) { __builtin_memcpy(to, from, bytes); });
}

template <class V, class R, class T> inline void update_compact(const Update& u, size_t begin, size_t end) {
  const size_t rest = (end - begin) % BLOCK;
  update_blocks<V, R, T>(u, begin, end - rest);
  if (rest) update_short_block<V, R, T>(u, end - rest, rest);
}

template <class V> inline void update(const Update& u, size_t begin, size_t end) {
  with_rule(u.step, [&]<class R>(R) {
    if (u.format == Format::fp32) return update_fp32<V, R>(u, begin, end);
    if (u.format == Format::exact) return update_exact<V, R>(u, begin, end);
    if (u.weight_type == DType::bf16) return update_compact<V, R, Bf16>(u, begin, end);
    return update_compact<V, R, Fp16>(u, begin, end);
  });
}

}  // namespace
}  // namespace unbounded
