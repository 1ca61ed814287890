// The fused update: a tile of states is decoded to fp32, stepped by its rule, and encoded again.
//
// A tile stays in the first-level cache, so every array crosses the memory bus once each way. Arrays that are fp32
// in memory are stepped in place.
#pragma once

#include "buffers.h"
#include "compact.h"
#include "kernels.h"

namespace unbounded {
namespace {

inline constexpr size_t TILE = 4 * BLOCK;

struct Scratch {
  alignas(64) float weight[TILE], grad[TILE], first[TILE], second[TILE];
};

template <class T> inline T* at(void* p, size_t i) { return static_cast<T*>(p) + i; }

template <class V> inline void update_fp32(const Update& u, Scratch& scratch, size_t i, size_t n) {
  const bool plain = u.grad_type == DType::f32 && u.grad_scale == 1.0f;
  const float* grad = plain ? static_cast<const float*>(u.grad) + i : scratch.grad;
  if (!plain) scaled<V>(u.grad, u.grad_type, i, u.grad_scale, scratch.grad, n);
  float* weight = at<float>(u.weight, i);
  apply<V>(u.step, n, {weight, grad, at<float>(u.first, i), at<float>(u.second, i)});
  if (u.out)
    typed(u.out, u.out_type, [&](auto* out) {
      sweep<V>(n, [=]<class W>(size_t k) { W::store(out + i + k, W::load(weight + k)); });
    });
}

template <class V> inline void update_exact(const Update& u, Scratch& scratch, size_t i, size_t n) {
  Bf16* weight = at<Bf16>(u.weight, i);
  int16_t* low = at<int16_t>(u.low, i);
  scaled<V>(u.grad, u.grad_type, i, u.grad_scale, scratch.grad, n);
  join<V>(weight, low, scratch.weight, n);
  apply<V>(u.step, n, {scratch.weight, scratch.grad, at<float>(u.first, i), at<float>(u.second, i)});
  split<V>(scratch.weight, weight, low, n);
}

template <class V> inline void update_compact(const Update& u, Scratch& scratch, size_t i, size_t n) {
  int8_t* low = at<int8_t>(u.low, i);
  int8_t* first = at<int8_t>(u.first, i);
  uint8_t* second = at<uint8_t>(u.second, i);
  const size_t block = i / BLOCK;
  scaled<V>(u.grad, u.grad_type, i, u.grad_scale, scratch.grad, n);
  if (u.first) decode_moment<V, Signed>(first, u.first_scale + block, scratch.first, n);
  if (u.second) decode_moment<V, Unsigned>(second, u.second_scale + block, scratch.second, n);
  const Tile tile{scratch.weight, scratch.grad, scratch.first, scratch.second};
  const auto step = [&](auto* weight) {
    decode_weight<V>(weight, low, scratch.weight, n);
    apply<V>(u.step, n, tile);
    encode_weight<V>(scratch.weight, weight, low, n, Stochastic{u.seeds[0]});
  };
  if (u.weight_type == DType::bf16)
    step(at<Bf16>(u.weight, i));
  else
    step(at<Fp16>(u.weight, i));
  if (u.first) encode_moment<V, Signed>(scratch.first, n, first, u.first_scale + block, Stochastic{u.seeds[1]});
  if (u.second) encode_moment<V, Unsigned>(scratch.second, n, second, u.second_scale + block, Stochastic{u.seeds[2]});
}

template <class V> inline void update(const Update& u, size_t begin, size_t end) {
  Scratch scratch;
  for (size_t i = begin; i < end; i += TILE) {
    const size_t n = end - i < TILE ? end - i : TILE;
    switch (u.format) {
      case Format::fp32: update_fp32<V>(u, scratch, i, n); break;
      case Format::exact: update_exact<V>(u, scratch, i, n); break;
      case Format::compact: update_compact<V>(u, scratch, i, n); break;
    }
  }
}

}  // namespace
}  // namespace unbounded
