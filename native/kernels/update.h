// The fused update: states are decoded to fp32 in registers, stepped by their rule, and encoded again, so that every
// array crosses the memory bus once each way.
#pragma once

#include "exact.h"
#include "update_compact.h"

namespace unbounded {
namespace {

// Fetches what is used 1 KiB after this offset into an array. The processor does so too, but of seven streams that are
// read and written at once it keeps too little under way: without, a step takes 8 % longer.
template <class W> [[gnu::always_inline]] inline void fetch_later(const void* array, size_t offset) {
  if (W::width > 1) __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(array) + offset + 1024));
}

template <class W> inline typename W::F load_grad(const Update& u, size_t i) {
  fetch_later<W>(u.grad, i * (u.grad_type == DType::f32 ? 4 : 2));
  const auto g = u.grad_type == DType::bf16  ? W::load(at<Bf16>(u.grad, i))
                 : u.grad_type == DType::f32 ? W::load(at<float>(u.grad, i))
                                             : W::load(at<Fp16>(u.grad, i));
  return u.grad_scale == 1.0f ? g : g * W::all(u.grad_scale);
}

// Steps one vector of weights whose moments are fp32 in memory.
template <class W, class R> inline typename W::F step_at(const Update& u, size_t i, typename W::F w) {
  if (R::first) fetch_later<W>(u.first, i * sizeof(float));
  if (R::second) fetch_later<W>(u.second, i * sizeof(float));
  auto m = R::first ? W::load(at<float>(u.first, i)) : w;
  auto v = R::second ? W::load(at<float>(u.second, i)) : w;
  w = step<W, R>(u.step, w, load_grad<W>(u, i), m, v);
  if (R::first) W::store(at<float>(u.first, i), m);
  if (R::second) W::store(at<float>(u.second, i), v);
  return w;
}

template <class V, class R> inline void update_fp32(const Update& u, size_t begin, size_t end) {
  sweep<V>(end - begin, [&]<class W>(size_t k) {
    const size_t i = begin + k;
    fetch_later<W>(u.weight, i * sizeof(float));
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
    fetch_later<W>(weight, 0), fetch_later<W>(low, 0);
    split_at<W>(step_at<W, R>(u, i, join_at<W>(weight, low)), weight, low);
  });
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
