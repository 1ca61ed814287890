// One lane: the vector interface in plain C++. Kernels written over it are the specification of the SIMD ones,
// and handle what is left over when a length is not a multiple of a vector's width.
//
// Every instruction set offers the same types and functions: F (floats), I (32-bit integers, wrapping), M (mask),
// D (doubles), each `width` lanes, with IEEE results, so that all instruction sets agree bit for bit.
#pragma once

#include "kernels/formats/floats.h"

namespace unbounded {
namespace {

struct Scalar {
  static constexpr size_t width = 1;
  using M = bool;
  using D = double;

  struct F {
    float x;
    friend F operator+(F a, F b) { return {a.x + b.x}; }
    friend F operator-(F a, F b) { return {a.x - b.x}; }
    friend F operator*(F a, F b) { return {a.x * b.x}; }
    friend F operator/(F a, F b) { return {a.x / b.x}; }
  };
  struct I {
    uint32_t x;
    friend I operator+(I a, I b) { return {a.x + b.x}; }
    friend I operator-(I a, I b) { return {a.x - b.x}; }
    friend I operator*(I a, I b) { return {a.x * b.x}; }
    friend I operator&(I a, I b) { return {a.x & b.x}; }
    friend I operator|(I a, I b) { return {a.x | b.x}; }
    friend I operator^(I a, I b) { return {a.x ^ b.x}; }
  };

  static F all(float x) { return {x}; }
  static I all(int32_t x) { return {uint32_t(x)}; }
  static I all(uint32_t x) { return {x}; }
  static I bits(F a) { return {bits_of(a.x)}; }
  static F floats(I a) { return {float_of(a.x)}; }
  static F sqrt(F a) { return {__builtin_sqrtf(a.x)}; }
  static F fma(F a, F b, F c) { return {__builtin_fmaf(a.x, b.x, c.x)}; }    // a * b + c, rounded once
  static F fms(F a, F b, F c) { return {__builtin_fmaf(a.x, b.x, -c.x)}; }   // a * b - c
  static F fnma(F a, F b, F c) { return {__builtin_fmaf(-a.x, b.x, c.x)}; }  // c - a * b
  static F from_int(I a) { return {float(int32_t(a.x))}; }
  static I to_int(F a) { return {uint32_t(int32_t(a.x))}; }  // towards zero; the caller keeps it in range

  template <int n> static I left(I a) { return {a.x << n}; }
  template <int n> static I right(I a) { return {a.x >> n}; }
  static I min(I a, I b) { return a.x < b.x ? a : b; }  // min, max and highest are unsigned, greater is signed
  static I max(I a, I b) { return a.x < b.x ? b : a; }
  static M greater(I a, I b) { return int32_t(a.x) > int32_t(b.x); }
  static I select(M m, I yes, I no) { return m ? yes : no; }
  static I pick(I mask, I yes, I no) { return {(mask.x & yes.x) | (~mask.x & no.x)}; }  // bit by bit
  static uint32_t highest(I a) { return a.x; }
  static void highest(I a, I b, uint32_t& of_a, uint32_t& of_b) { of_a = highest(a), of_b = highest(b); }
  static I mix(I a, I b, I mask) { return {(a.x & mask.x) ^ b.x}; }  // bits of b beyond the mask pass
  static I quiet(F a) { return {a.x == a.x ? bits_of(a.x) : 0xffc00000}; }  // the bits, of every NaN the same

  template <class T> static F load(const T* p) { return {widen(*p)}; }
  template <class T> static void store(T* p, F a) { narrow(a.x, *p); }
  template <class T> static I load_int(const T* p) { return {uint32_t(int32_t(*p))}; }
  static void store_int(int16_t* p, I a) { *p = int16_t(a.x); }
  static void store_high(uint16_t* p, I a) { *p = uint16_t(a.x >> 16); }
  template <int n, class T> static void store_byte(T* p, I a) { *p = T(a.x >> 8 * n); }  // byte n of every lane

  // Bytes of four vectors: put() takes bits shift to shift + 7 of the lanes of vector q, packed() has them in order.
  struct Bytes {
    uint8_t x[4];
  };
  using Quad = Bytes;
  struct Masks {};  // what put() needs, made once
  template <int q, int shift> static void put(const Masks&, Quad& quad, I a) { quad.x[q] = uint8_t(a.x >> shift); }
  static Bytes packed(const Quad& quad) { return quad; }
  template <class Op> static Bytes each(Op op) { return {{op(0), op(1), op(2), op(3)}}; }
  static Bytes all_bytes(uint8_t x) { return {{x, x, x, x}}; }
  static Bytes max(Bytes a, Bytes b) {
    return each([&](int i) { return a.x[i] < b.x[i] ? b.x[i] : a.x[i]; });
  }
  static Bytes flip(Bytes a, Bytes b) {
    return each([&](int i) { return uint8_t(a.x[i] ^ b.x[i]); });
  }
  static void store(void* p, Bytes a) { __builtin_memcpy(p, a.x, 4); }

  // Whether stream_line() writes one line of a cache without reading it first. Others may see such lines late: only after
  // finish_streams() what was written is there for everybody.
  static constexpr bool streams = false;

  // Roots and quotients from memory to memory, where a vector need not be one operation.
  static void store_root(float* to, const float* of) { store(to, sqrt(load(of))); }
  static void store_quotient(float* to, const float* a, const float* b) { store(to, load(a) / load(b)); }

  static D zero() { return 0; }
  static D add_squares(D sum, F a) { return sum + double(a.x) * double(a.x); }
  static void store(double* p, D a) { *p = a; }
};

// Runs `body<V>(i)` over [0, n) a vector at a time, then lane by lane over the rest.
template <class V, class Body> inline void sweep(size_t n, Body body) {
  size_t i = 0;
  for (; i + V::width <= n; i += V::width) body.template operator()<V>(i);
  for (; i < n; ++i) body.template operator()<Scalar>(i);
}

}  // namespace
}  // namespace unbounded
