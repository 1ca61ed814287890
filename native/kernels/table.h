// Fills an instruction set's table from the kernels written over its vectors.
#pragma once

#include "kernels/buffers.h"
#include "kernels/formats/compact.h"
#include "kernels/formats/exact.h"
#include "kernels/update.h"

namespace unbounded {
namespace {

template <class V> inline void encode_master(const float* master, const Master& to, size_t begin, size_t n) {
  if (to.type == DType::bf16)
    encode_weight<V>(master + begin, at<Bf16>(to.weight, begin), to.remainder + begin, n);
  else
    encode_weight<V>(master + begin, at<Fp16>(to.weight, begin), to.remainder + begin, n);
}

template <class V> inline void decode_master(const Master& from, float* master, size_t begin, size_t n) {
  if (from.type == DType::bf16)
    decode_weight<V>(at<Bf16>(from.weight, begin), from.remainder + begin, master + begin, n);
  else
    decode_weight<V>(at<Fp16>(from.weight, begin), from.remainder + begin, master + begin, n);
}

template <class V> inline void encode_codes(const float* x, const Codes& to, size_t begin, size_t n) {
  float* scales = to.scales + begin / BLOCK;
  if (to.moment == Moment::first)
    encode_moment<V, First>(x + begin, at<int8_t>(to.codes, begin), scales, n);
  else
    encode_moment<V, Second>(x + begin, at<uint8_t>(to.codes, begin), scales, n);
}

template <class V> inline void decode_codes(const Codes& from, float* x, size_t begin, size_t n) {
  const float* scales = from.scales + begin / BLOCK;
  if (from.moment == Moment::first)
    decode_moment<V, First>(at<int8_t>(from.codes, begin), scales, x + begin, n);
  else
    decode_moment<V, Second>(at<uint8_t>(from.codes, begin), scales, x + begin, n);
}

template <class V> constexpr Kernels table(const char* name) {
  return {name,          update<V>,        sum_squares<V>,   convert<V>,      add<V>,         split<V>,
          join<V>,       encode_master<V>, decode_master<V>, encode_codes<V>, decode_codes<V>};
}

}  // namespace
}  // namespace unbounded
