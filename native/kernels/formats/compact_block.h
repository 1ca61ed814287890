// The data that an update of the compact format works on: a block in its arrays, a block between the parts of its
// update, and the salts of the noise.
#pragma once

#include "kernels/buffers.h"
#include "kernels/formats/compact.h"

namespace unbounded {
namespace {

// Where the arrays of a block are.
template <class T> struct Place {
  const void* grad;
  T* weight;
  int8_t *remainder, *first;
  uint8_t* second;
  float *first_scale, *second_scale;
};

template <class R, class T> inline Place<T> place_of(const Update& u, size_t i) {
  Place<T> p{};
  p.grad = at<char>(u.grad, i * (u.grad_type == DType::f32 ? 4 : 2));
  p.weight = at<T>(u.weight, i), p.remainder = at<int8_t>(u.remainder, i);
  if (R::first) p.first = at<int8_t>(u.first, i), p.first_scale = u.first_scale + i / BLOCK;
  if (R::second) p.second = at<uint8_t>(u.second, i), p.second_scale = u.second_scale + i / BLOCK;
  return p;
}

// A block of its own. One stands before the first and after the last block of an update, where a part has none to
// work on.
template <class T> struct Spare {
  alignas(64) float grad[BLOCK];  // room for every type
  T weight[BLOCK];
  int8_t remainder[BLOCK], first[BLOCK];
  uint8_t second[BLOCK];
  float first_scale, second_scale;
  Place<T> place() { return {grad, weight, remainder, first, second, &first_scale, &second_scale}; }
};

// A block between its parts. `first` is also the numerator of a rule that divides, and `direction` first the root.
struct Stepped {
  alignas(64) float first[BLOCK], second[BLOCK], direction[BLOCK];
  float first_inverse, second_inverse;  // of the new scales
};

// What the noise is salted with. The salt of the weights also holds what they are raised by.
struct Salts {
  alignas(64) int32_t weight[BLOCK], code[BLOCK];
};

template <class T> inline Salts salts_of(const Update& u) {
  Salts salts;
  for (size_t k = 0; k < BLOCK; ++k) {
    salts.weight[k] = (u.salt[k] & weight_noise<T>) | weight_raise<T>;
    salts.code[k] = u.salt[k] & CODE_NOISE;
  }
  return salts;
}

}  // namespace
}  // namespace unbounded
