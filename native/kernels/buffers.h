// Passes over one to three buffers: sum of squares, conversion, addition.
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd/vector_scalar.h"

namespace unbounded {
namespace {

template <class T> inline T* at(void* p, size_t i) { return static_cast<T*>(p) + i; }
template <class T> inline const T* at(const void* p, size_t i) { return static_cast<const T*>(p) + i; }

// Calls body(pointer) with `p` as a pointer to its type.
template <class Body> inline void typed(const void* p, DType type, Body body) {
  switch (type) {
    case DType::f32: return body(static_cast<const float*>(p));
    case DType::bf16: return body(static_cast<const Bf16*>(p));
    case DType::f16: return body(static_cast<const Fp16*>(p));
  }
}
template <class Body> inline void typed(void* p, DType type, Body body) {
  switch (type) {
    case DType::f32: return body(static_cast<float*>(p));
    case DType::bf16: return body(static_cast<Bf16*>(p));
    case DType::f16: return body(static_cast<Fp16*>(p));
  }
}

inline double folded(double* lanes) {
  for (size_t half = SQUARE_LANES / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// The sum of squares of x[i], after `make<V>(i)` has written it: element i is added to lane i % 16 and the lanes are
// folded in halves, one order of additions for every width.
template <class V, class T, class Make> inline double squares_of_made(const T* x, size_t n, Make make) {
  constexpr size_t groups = SQUARE_LANES / V::width;
  typename V::D sums[groups];
  for (auto& sum : sums) sum = V::zero();
  size_t i = 0;
  for (; i + SQUARE_LANES <= n; i += SQUARE_LANES)
    for (size_t k = 0; k < groups; ++k) {
      const size_t place = i + k * V::width;
      make.template operator()<V>(place);
      sums[k] = V::add_squares(sums[k], V::load(x + place));
    }
  alignas(64) double lanes[SQUARE_LANES];
  for (size_t k = 0; k < groups; ++k) V::store(lanes + k * V::width, sums[k]);
  for (size_t lane = 0; i < n; ++i, ++lane) {
    make.template operator()<Scalar>(i);
    lanes[lane] = Scalar::add_squares(lanes[lane], Scalar::load(x + i));
  }
  return folded(lanes);
}

template <class V> inline double sum_squares(const void* x, DType type, size_t n) {
  double sum = 0;
  typed(x, type, [&](auto* p) { sum = squares_of_made<V>(p, n, []<class W>(size_t) {}); });
  return sum;
}

template <class V> inline void convert(const void* from, DType from_type, void* to, DType to_type, size_t n) {
  typed(from, from_type, [&](auto* source) {
    typed(to, to_type, [&](auto* target) {
      sweep<V>(n, [=]<class W>(size_t i) { W::store(target + i, W::load(source + i)); });
    });
  });
}

template <class V>
inline double add(void* to, DType to_type, const void* held, DType held_type, const void* fresh, DType fresh_type,
                  size_t n) {
  double sum = 0;
  typed(to, to_type, [&](auto* target) {
    typed(held, held_type, [&](auto* a) {
      typed(fresh, fresh_type, [&](auto* b) {
        sum = squares_of_made<V>(target, n, [=]<class W>(size_t i) {
          W::store(target + i, W::load(a + i) + W::load(b + i));
        });
      });
    });
  });
  return sum;
}

}  // namespace
}  // namespace unbounded
