// The fused update: states are decoded to fp32 in registers, stepped by their rule, and encoded again, so that every
// array crosses the memory bus once each way.
#pragma once

#include "kernels/formats/exact.h"
#include "kernels/formats/update_compact.h"
#include "kernels/sweep_states.h"

namespace unbounded {
namespace {

// Fetches what is used 1 KiB after this element of an array. The processor does so too, but of seven streams that are
// read and written at once it keeps too little under way: without, a step takes 8 % longer.
[[gnu::always_inline]] inline void fetch_later(const void* array, size_t i, size_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(uintptr_t(array) + i * bytes + 1024));
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

// `plain`: with a kernel of its own where the scale is 1. A product with 1 is the same, and little beside the memory.
template <bool plain, class Body> inline void with_gradient(const Update& u, Body body) {
  typed(u.grad, u.grad_type, [&]<class G>(const G* values) {
    if constexpr (plain)
      if (u.grad_scale == 1.0f) return body(Gradient<G, false>{values, 1.0f});
    body(Gradient<G, true>{values, u.grad_scale});
  });
}

// Steps one vector of weights whose moments are fp32 in memory; the new ones go to place k of `to` if they are wanted.
template <class W, class R, bool moments, class Grad>
[[gnu::always_inline]] inline typename W::F step_at(const Update& u, const Grad& grad, size_t i, typename W::F w,
                                                    const States& to, size_t k) {
  auto m = R::first ? W::load(at<float>(u.old.first, i)) : w;
  auto v = R::second ? W::load(at<float>(u.old.second, i)) : w;
  w = step<W, R>(u.step, w, grad.template load<W>(i), m, v);
  if (R::first && moments) W::store(at<float>(to.first, k), m);
  if (R::second && moments) W::store(at<float>(to.second, k), v);
  return w;
}

template <class R, class Grad> [[gnu::always_inline]] inline void fetch_moments(const Update& u, const Grad& grad, size_t i) {
  grad.fetch(i);
  if (R::first) fetch_later(u.old.first, i, sizeof(float));
  if (R::second) fetch_later(u.old.second, i, sizeof(float));
}

template <class V, class R, bool moments, class Grad>
inline void update_fp32(const Update& given, const Grad& grad, size_t begin, size_t end) {
  const Update u = given;  // a copy that no store can change: its values need not be loaded again after each
  const auto ahead = [&](size_t i) { fetch_later(u.old.weight, i, sizeof(float)), fetch_moments<R>(u, grad, i); };
  const Widths widths{4, 0, R::first && moments ? 4 : 0, R::second && moments ? 4 : 0};
  const auto body = [&]<class W>(size_t i, const States& to, size_t k) __attribute__((always_inline)) {
    const auto w = step_at<W, R, moments>(u, grad, i, W::load(at<float>(u.old.weight, i)), to, k);
    W::store(at<float>(to.weight, k), w);
    if (u.out) u.out_type == DType::bf16 ? W::store(at<Bf16>(u.out, i), w) : W::store(at<Fp16>(u.out, i), w);
  };
  sweep_states<V>(u, widths, begin, end, ahead, body);
}

template <class V, class R, bool moments, class Grad>
inline void update_exact(const Update& given, const Grad& grad, size_t begin, size_t end) {
  const Update u = given;
  const Bf16* weight = at<Bf16>(u.old.weight, 0);
  const int16_t* remainder = at<int16_t>(u.old.remainder, 0);
  const auto ahead = [&](size_t i) {
    fetch_later(weight, i, sizeof(Bf16)), fetch_later(remainder, i, sizeof(int16_t)), fetch_moments<R>(u, grad, i);
  };
  const Widths widths{2, 2, R::first && moments ? 4 : 0, R::second && moments ? 4 : 0};
  const auto body = [&]<class W>(size_t i, const States& to, size_t k) __attribute__((always_inline)) {
    const auto w = step_at<W, R, moments>(u, grad, i, join_at<W>(weight + i, remainder + i), to, k);
    split_at<W>(w, at<Bf16>(to.weight, k), at<int16_t>(to.remainder, k));
  };
  sweep_states<V>(u, widths, begin, end, ahead, body);
}

// The moments alone, in place, after the weights were stepped from the old ones.
template <class V, class R, class Grad>
inline void update_moments(const Update& given, const Grad& grad, size_t begin, size_t end) {
  const Update u = given;
  const auto body = [&]<class W>(size_t i) __attribute__((always_inline)) {
    const auto g = grad.template load<W>(i);
    auto m = R::first ? W::load(at<float>(u.first, i)) : g;
    auto v = R::second ? W::load(at<float>(u.second, i)) : g;
    R::template advance<W>(u.step, g, g, m, v);  // the weight is looked at only by a rule that adds it to the gradient
    if (R::first) W::store(at<float>(u.first, i), m);
    if (R::second) W::store(at<float>(u.second, i), v);
  };
  size_t i = begin;
  for (; i + LINE <= end; i += LINE) {
    fetch_moments<R>(u, grad, i);
#pragma GCC unroll 4
    for (size_t k = 0; k < LINE; k += V::width) body.template operator()<V>(i + k);
  }
  for (; i < end; ++i) body.template operator()<Scalar>(i);
}

// The compact format is updated in place. Old states that are to stay as they are, are copied first, so many at a time
// that they are still in a core's own cache: to their new place or, if only the weights are wanted, to one that is used
// again and again.
template <class V, class R, class T> inline void update_compact_beside(const Update& u, size_t begin, size_t end) {
  constexpr size_t NUM = 32 * BLOCK;
  struct Dropped {
    alignas(64) int8_t remainder[NUM], first[NUM], second[NUM];
    float first_scale[NUM / BLOCK], second_scale[NUM / BLOCK];
  } dropped;
  Update part = u;
  for (size_t i = begin; i < end; i += NUM) {
    const size_t n = i + NUM < end ? NUM : end - i, first_block = i / BLOCK, num_blocks = (n + BLOCK - 1) / BLOCK;
    const auto bring = [](const void* from, void* to, size_t first, size_t num, size_t bytes, void* otherwise) {
      void* place = to ? at<char>(to, first * bytes) : otherwise;
      __builtin_memcpy(place, at<char>(from, first * bytes), num * bytes);
      return place;
    };
    const auto bring_scales = [&](const float* from, float* to, float* otherwise) {
      return static_cast<float*>(bring(from, to, first_block, num_blocks, sizeof(float), otherwise));
    };
    part.grad = at<char>(u.grad, i * (u.grad_type == DType::f32 ? 4 : 2));
    part.weight = bring(u.old.weight, u.weight, i, n, sizeof(T), nullptr);
    part.remainder = bring(u.old.remainder, u.remainder, i, n, 1, dropped.remainder);
    if (R::first) {
      part.first = bring(u.old.first, u.first, i, n, 1, dropped.first);
      part.first_scale = bring_scales(u.old.first_scale, u.first_scale, dropped.first_scale);
    }
    if (R::second) {
      part.second = bring(u.old.second, u.second, i, n, 1, dropped.second);
      part.second_scale = bring_scales(u.old.second_scale, u.second_scale, dropped.second_scale);
    }
    update_compact<V, R, T>(part, 0, n);
  }
}

template <class V> inline void update(const Update& u, size_t begin, size_t end) {
  with_rule(u.step, [&]<class R>(R) {
    const auto weights = [&]<bool moments>() {
      with_gradient<moments>(u, [&](const auto& grad) {
        if (u.format == Format::fp32) return update_fp32<V, R, moments>(u, grad, begin, end);
        update_exact<V, R, moments>(u, grad, begin, end);
      });
    };
    if (u.part == Part::moments)
      return with_gradient<false>(u, [&](const auto& grad) { update_moments<V, R>(u, grad, begin, end); });
    if (u.format != Format::compact)
      return u.part == Part::whole ? weights.template operator()<true>() : weights.template operator()<false>();
    const auto compact = [&]<class T>(T) {
      u.is_in_place() ? update_compact<V, R, T>(u, begin, end) : update_compact_beside<V, R, T>(u, begin, end);
    };
    u.weight_type == DType::bf16 ? compact(Bf16{}) : compact(Fp16{});
  });
}

}  // namespace
}  // namespace unbounded
