// The exact format: a bf16 weight and the 16 bits that complete it to its fp32 master.
//
// The weight is the master rounded to nearest (half away from zero) and the remainder is what was rounded off, as a
// signed number of units of the master's last place: master bits = (weight bits << 16) + remainder. Adding integers to
// the bits of a float walks through the floats in order, so this is reversible for every finite and infinite master.
// A NaN becomes the quiet NaN, so that the bf16 weight shows it too.
#pragma once

#include "kernels/simd/vector_scalar.h"

namespace unbounded {
namespace {

template <class W> inline typename W::F join_at(const Bf16* weight, const int16_t* remainder) {
  return W::floats(W::bits(W::load(weight)) + W::load_int(remainder));
}

template <class W> inline void split_at(typename W::F master, Bf16* weight, int16_t* remainder) {
  const auto bits = W::quiet(master);
  W::store_high(&weight->bits, bits + W::all(0x8000));
  W::store_int(remainder, bits);
}

template <class V> inline void join(const Bf16* weight, const int16_t* remainder, float* master, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) { W::store(master + i, join_at<W>(weight + i, remainder + i)); });
}

template <class V> inline void split(const float* master, Bf16* weight, int16_t* remainder, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) { split_at<W>(W::load(master + i), weight + i, remainder + i); });
}

}  // namespace
}  // namespace unbounded
