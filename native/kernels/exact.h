// The exact format: a bf16 weight and the 16 bits that complete it to its fp32 master.
//
// The weight is the master rounded to nearest (half away from zero) and the completion is what was rounded off, as a
// signed number of units of the master's last place: master bits = (weight bits << 16) + low. Adding integers to the
// bits of a float walks through the floats in order, so this is reversible for every finite and infinite master.
// A NaN becomes the quiet NaN of its sign, so that the bf16 weight shows it too.
#pragma once

#include "vector_scalar.h"

namespace unbounded {
namespace {

template <class W> inline typename W::I quiet(typename W::I bits) {
  const auto nan = (bits & W::all(int32_t(0x80000000))) | W::all(0x7fc00000);
  return W::select(W::greater(bits & W::all(0x7fffffff), W::all(0x7f800000)), nan, bits);
}

template <class V> inline void split(const float* master, Bf16* weight, int16_t* low, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) {
    const auto bits = quiet<W>(W::bits(W::load(master + i)));
    W::store_int(reinterpret_cast<uint16_t*>(weight + i), W::template right<16>(bits + W::all(0x8000)));
    W::store_int(low + i, bits);
  });
}

template <class V> inline void join(const Bf16* weight, const int16_t* low, float* master, size_t n) {
  sweep<V>(n, [=]<class W>(size_t i) {
    W::store(master + i, W::floats(W::bits(W::load(weight + i)) + W::load_int(low + i)));
  });
}

}  // namespace
}  // namespace unbounded
