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
  const auto scale = W::all(u.grad_scale);
  if (u.grad_type == DType::bf16) return W::load(at<Bf16>(u.grad, i)) * scale;
  if (u.grad_type == DType::f32) return W::load(at<float>(u.grad, i)) * scale;
  return W::load(at<Fp16>(u.grad, i)) * scale;
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

// A block after its step, until the scales of its new moments are known.
struct Stepped {
  alignas(64) float weight[BLOCK], first[BLOCK], second[BLOCK];
  uint32_t highest_first, highest_second;
};

// Steps a whole block: weights are stored, moments are left in `out`.
template <class V, class R, class T> inline void step_block(const Update& u, size_t begin, Stepped& out) {
  T* const weight = at<T>(u.weight, begin);
  int8_t* const low = at<int8_t>(u.low, begin);
  const size_t block = begin / BLOCK;
  const float first_scale = R::first ? u.first_scale[block] : 0, second_scale = R::second ? u.second_scale[block] : 0;
  auto highest_first = V::all(0), highest_second = V::all(0);
  for (size_t k = 0; k < BLOCK; k += V::width) {
    auto w = decode_at<V>(weight + k, low + k), m = w, v = w;
    const auto g = load_grad<V>(u, begin + k);
    if (R::first) m = First::decode<V>(V::load_int(at<int8_t>(u.first, begin) + k), first_scale);
    if (R::second) v = Second::decode<V>(V::load_int(at<uint8_t>(u.second, begin) + k), second_scale);
    R::template step<V>(u.step, w, g, m, v);
    encode_at<V>(w, noise_of<V>(R::first ? m : R::second ? v : g, u.salt + k, weight_noise<T>), weight + k, low + k);
    V::store(out.weight + k, w), V::store(out.first + k, m), V::store(out.second + k, v);
    if (R::first) highest_first = V::max(highest_first, V::bits(m) & V::all(0x7fffffff));
    if (R::second) highest_second = V::max(highest_second, V::bits(v));
  }
  out.highest_first = V::highest(highest_first), out.highest_second = V::highest(highest_second);
}

template <class V, class M>
inline void store_moment(const Update& u, const float* x, const float* other, uint32_t highest, void* codes,
                         float* scale) {
  *scale = block_scale(highest, M::headroom);
  const float inverse = inverse_scale(*scale);
  for (size_t k = 0; k < BLOCK; k += V::width) {
    const auto noise = noise_of<V>(V::load(other + k), u.salt + k, CODE_NOISE);
    V::template store_byte<3>(at<typename M::Code>(codes, k), M::template encode<V>(V::load(x + k), inverse, noise));
  }
}

template <class V, class R> inline void store_moments(const Update& u, size_t begin, const Stepped& b) {
  const size_t block = begin / BLOCK;
  if (R::first)
    store_moment<V, First>(u, b.first, b.weight, b.highest_first, at<int8_t>(u.first, begin), u.first_scale + block);
  if (R::second)
    store_moment<V, Second>(u, b.second, R::first ? b.first : b.weight, b.highest_second,
                            at<uint8_t>(u.second, begin), u.second_scale + block);
}

// A block's moments are stored after the next block has been stepped: their scales need a reduction over the block,
// and waiting for it would leave the processor idle.
template <class V, class R, class T> inline void update_blocks(const Update& u, size_t begin, size_t end) {
  Stepped stepped[2];
  size_t i = begin, parity = 0;
  for (; i < end; i += BLOCK, parity ^= 1) {
    step_block<V, R, T>(u, i, stepped[parity]);
    if (i > begin) store_moments<V, R>(u, i - BLOCK, stepped[parity ^ 1]);
  }
  if (i > begin) store_moments<V, R>(u, i - BLOCK, stepped[parity ^ 1]);
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
