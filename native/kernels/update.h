// The fused update: states are decoded to fp32 in registers, stepped by their rule, and encoded again, so that every
// array crosses the memory bus once each way.
#pragma once

#include "kernels/formats/exact.h"
#include "kernels/formats/update_compact.h"

namespace unbounded {
namespace {

inline constexpr size_t LINE = 16;  // elements of a cache line in fp32

// Fetches what is used 1 KiB after this element of an array. The processor does so too, but of seven streams that are
// read and written at once it keeps too little under way: without, a step takes 8 % longer.
[[gnu::always_inline]] inline void fetch_later(const void* array, size_t i, size_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(array) + i * bytes + 1024));
}

// Runs `body<V>(i)` over [begin, end), a line of elements at a time with `ahead(i)` before it, then lane by lane.
template <class V, class Ahead, class Body>
[[gnu::always_inline]] inline void sweep_lines(size_t begin, size_t end, Ahead ahead, Body body) {
  size_t i = begin;
  for (; i + LINE <= end; i += LINE) {
    ahead(i);
#pragma GCC unroll 4
    for (size_t k = 0; k < LINE; k += V::width) body.template operator()<V>(i + k);
  }
  for (; i < end; ++i) body.template operator()<Scalar>(i);
}

// The gradient as the step uses it. What does not change from element to element is a type: a choice in the loop would
// be made for every vector.
template <class G, bool scaled> struct Gradient {
  const G* values;
  float scale;
  template <class W> [[gnu::always_inline]] typename W::F load(size_t i) const {
    const auto g = W::load(values + i);
    return scaled ? g * W::all(scale) : g;
  }
  void fetch(size_t i) const { fetch_later(values, i, sizeof(G)); }
};

template <class Body> inline void with_gradient(const Update& u, Body body) {
  typed(u.grad, u.grad_type, [&]<class G>(const G* values) {
    if (u.grad_scale == 1.0f) return body(Gradient<G, false>{values, 1.0f});
    body(Gradient<G, true>{values, u.grad_scale});
  });
}

// Steps one vector of weights whose moments are fp32 in memory.
template <class W, class R, class Grad>
[[gnu::always_inline]] inline typename W::F step_at(const Update& u, const Grad& grad, size_t i, typename W::F w) {
  auto m = R::first ? W::load(at<float>(u.first, i)) : w;
  auto v = R::second ? W::load(at<float>(u.second, i)) : w;
  w = step<W, R>(u.step, w, grad.template load<W>(i), m, v);
  if (R::first) W::store(at<float>(u.first, i), m);
  if (R::second) W::store(at<float>(u.second, i), v);
  return w;
}

template <class R, class Grad> [[gnu::always_inline]] inline void fetch_moments(const Update& u, const Grad& grad, size_t i) {
  grad.fetch(i);
  if (R::first) fetch_later(u.first, i, sizeof(float));
  if (R::second) fetch_later(u.second, i, sizeof(float));
}

template <class V, class R, class Grad>
inline void update_fp32(const Update& given, const Grad& grad, size_t begin, size_t end) {
  const Update u = given;  // a copy that no store can change: its values need not be loaded again after each
  const auto ahead = [&](size_t i) { fetch_later(u.weight, i, sizeof(float)), fetch_moments<R>(u, grad, i); };
  const auto keep = [&]<class W>(size_t i) {
    const auto w = step_at<W, R>(u, grad, i, W::load(at<float>(u.weight, i)));
    W::store(at<float>(u.weight, i), w);
    return w;
  };
  if (!u.out) return sweep_lines<V>(begin, end, ahead, [&]<class W>(size_t i) { keep.template operator()<W>(i); });
  typed(u.out, u.out_type, [&](auto* out) {
    sweep_lines<V>(begin, end, ahead, [&]<class W>(size_t i) { W::store(out + i, keep.template operator()<W>(i)); });
  });
}

template <class V, class R, class Grad>
inline void update_exact(const Update& given, const Grad& grad, size_t begin, size_t end) {
  const Update u = given;
  Bf16* weight = at<Bf16>(u.weight, 0);
  int16_t* remainder = at<int16_t>(u.remainder, 0);
  const auto ahead = [&](size_t i) {
    fetch_later(weight, i, sizeof(Bf16)), fetch_later(remainder, i, sizeof(int16_t)), fetch_moments<R>(u, grad, i);
  };
  sweep_lines<V>(begin, end, ahead, [&]<class W>(size_t i) {
    split_at<W>(step_at<W, R>(u, grad, i, join_at<W>(weight + i, remainder + i)), weight + i, remainder + i);
  });
}

template <class V> inline void update(const Update& u, size_t begin, size_t end) {
  with_rule(u.step, [&]<class R>(R) {
    if (u.format == Format::fp32)
      return with_gradient(u, [&](const auto& grad) { update_fp32<V, R>(u, grad, begin, end); });
    if (u.format == Format::exact)
      return with_gradient(u, [&](const auto& grad) { update_exact<V, R>(u, grad, begin, end); });
    if (u.weight_type == DType::bf16) return update_compact<V, R, Bf16>(u, begin, end);
    return update_compact<V, R, Fp16>(u, begin, end);
  });
}

}  // namespace
}  // namespace unbounded
