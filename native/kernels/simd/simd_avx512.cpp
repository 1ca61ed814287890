// AVX-512 with bytes and words (Skylake, Zen 4 and later): 16 lanes.
#include <immintrin.h>

#include "kernels/table.h"

namespace unbounded {
namespace {

struct Avx512 {
  static constexpr size_t width = 16;
  using M = __mmask16;
  struct D {
    __m512d low, high;
  };
  struct F {
    __m512 x;
    friend F operator+(F a, F b) { return {_mm512_add_ps(a.x, b.x)}; }
    friend F operator-(F a, F b) { return {_mm512_sub_ps(a.x, b.x)}; }
    friend F operator*(F a, F b) { return {_mm512_mul_ps(a.x, b.x)}; }
    friend F operator/(F a, F b) { return {_mm512_div_ps(a.x, b.x)}; }
  };
  struct I {
    __m512i x;
    friend I operator+(I a, I b) { return {_mm512_add_epi32(a.x, b.x)}; }
    friend I operator-(I a, I b) { return {_mm512_sub_epi32(a.x, b.x)}; }
    friend I operator*(I a, I b) { return {_mm512_mullo_epi32(a.x, b.x)}; }
    friend I operator&(I a, I b) { return {_mm512_and_si512(a.x, b.x)}; }
    friend I operator|(I a, I b) { return {_mm512_or_si512(a.x, b.x)}; }
    friend I operator^(I a, I b) { return {_mm512_xor_si512(a.x, b.x)}; }
  };

  template <class T, class Index> static __m512i place(Index index) {  // the indices of a shuffle, a constant
    alignas(64) T places[64 / sizeof(T)];
    for (int j = 0; j < int(64 / sizeof(T)); ++j) places[j] = T(index(j));
    return _mm512_load_si512(places);
  }

  static F all(float x) { return {_mm512_set1_ps(x)}; }
  static I all(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static I all(uint32_t x) { return all(int32_t(x)); }
  static I bits(F a) { return {_mm512_castps_si512(a.x)}; }
  static F floats(I a) { return {_mm512_castsi512_ps(a.x)}; }
  static F sqrt(F a) { return {_mm512_sqrt_ps(a.x)}; }
  static F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
  static F fms(F a, F b, F c) { return {_mm512_fmsub_ps(a.x, b.x, c.x)}; }
  static F fnma(F a, F b, F c) { return {_mm512_fnmadd_ps(a.x, b.x, c.x)}; }
  static F from_int(I a) { return {_mm512_cvtepi32_ps(a.x)}; }
  static I to_int(F a) { return {_mm512_cvttps_epi32(a.x)}; }

  template <int n> static I left(I a) { return {_mm512_slli_epi32(a.x, n)}; }
  template <int n> static I right(I a) { return {_mm512_srli_epi32(a.x, n)}; }
  static I min(I a, I b) { return {_mm512_min_epu32(a.x, b.x)}; }
  static I max(I a, I b) { return {_mm512_max_epu32(a.x, b.x)}; }
  static M greater(I a, I b) { return _mm512_cmpgt_epi32_mask(a.x, b.x); }
  static I select(M m, I yes, I no) { return {_mm512_mask_mov_epi32(no.x, m, yes.x)}; }
  static I pick(I mask, I yes, I no) { return {_mm512_ternarylogic_epi32(yes.x, no.x, mask.x, 0xe4)}; }
  static uint32_t highest(I a) { return _mm512_reduce_max_epu32(a.x); }
  static void highest(I a, I b, uint32_t& of_a, uint32_t& of_b) {  // both at once: a in the lower half, b in the upper
    I x = max(I{_mm512_shuffle_i64x2(a.x, b.x, 0x44)}, I{_mm512_shuffle_i64x2(a.x, b.x, 0xee)});
    x = max(x, I{_mm512_shuffle_i64x2(x.x, x.x, 0xb1)});
    x = max(x, I{_mm512_shuffle_epi32(x.x, _MM_PERM_ENUM(0x4e))});
    x = max(x, I{_mm512_shuffle_epi32(x.x, _MM_PERM_ENUM(0xb1))});
    of_a = uint32_t(_mm_cvtsi128_si32(_mm512_castsi512_si128(x.x)));
    of_b = uint32_t(_mm_cvtsi128_si32(_mm512_extracti32x4_epi32(x.x, 2)));
  }
  static I mix(I a, I b, I mask) { return {_mm512_ternarylogic_epi32(a.x, b.x, mask.x, 0x6c)}; }
  static I quiet(F a) {  // 1 and 0 both keep what is no NaN; alternating, they make a constant that is left in memory
    const __m512i table = place<int32_t>([](int j) { return j % 2 ? 0x33 : 0x133; });
    return bits({_mm512_fixupimm_ps(a.x, a.x, table, 0)});
  }

  static __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static void store256(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static void store128(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }

  static F load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F load(const Bf16* p) {  // one shuffle into the upper halves: a widening load would need a shift too
    const __m512i upper = place<int16_t>([](int j) { return j % 2 ? j / 2 : 16; });  // 16: beyond what is loaded, 0
    return floats({_mm512_permutexvar_epi16(upper, _mm512_zextsi256_si512(load256(p)))});
  }
  static F load(const Fp16* p) { return {_mm512_cvtph_ps(load256(p))}; }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a.x); }
  static void store(Bf16* p, F a) {
    const I x = bits(a), even = right<16>(x) & all(1);
    const I rounded = right<16>(x + even + all(0x7fff)), nan = right<16>(x) | all(0x40);
    const M is_nan = greater(x & all(0x7fffffff), all(0x7f800000));
    store256(p, _mm512_cvtepi32_epi16(select(is_nan, nan, rounded).x));
  }
  static void store(Fp16* p, F a) { store256(p, _mm512_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }

  static I load_int(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
  static I load_int(const int16_t* p) { return {_mm512_cvtepi16_epi32(load256(p))}; }
  static I load_int(const int8_t* p) { return {_mm512_cvtepi8_epi32(load128(p))}; }
  static I load_int(const uint8_t* p) { return {_mm512_cvtepu8_epi32(load128(p))}; }
  static void store_int(int32_t* p, I a) { _mm512_storeu_si512(p, a.x); }
  static void store_int(int16_t* p, I a) { store256(p, _mm512_cvtepi32_epi16(a.x)); }
  static void store_high(uint16_t* p, I a) {
    const __m512i odd = place<int16_t>([](int j) { return (2 * j + 1) & 31; });
    store256(p, _mm512_castsi512_si256(_mm512_permutexvar_epi16(odd, a.x)));
  }
  template <int n> static void store_byte(void* p, I a) { store128(p, _mm512_cvtepi32_epi8(right<8 * n>(a).x)); }

  struct Bytes {
    __m512i x;
  };
  using Quad = Bytes;  // while it fills: of every four lanes, the bytes of vector q are bytes 4q to 4q + 3
  struct Masks {  // out of the compiler's sight, which would make them again for every use
    __mmask64 of[4];
    Masks() {
      for (int q = 0; q < 4; ++q) {
        of[q] = 0x000f000f000f000fu << 4 * q;
        asm("" : "+k"(of[q]));
      }
    }
  };
  template <int q, int shift> static void put(const Masks& masks, Quad& quad, I a) {
    constexpr int up = (8 - shift % 8) % 8;  // bits to the next whole byte
    const __m512i places = place<int8_t>([](int j) { return j % 4 * 4 + (shift + up) / 8; });
    const I aligned = up ? left<up>(a) : a;
    if (q == 0)
      quad.x = _mm512_shuffle_epi8(aligned.x, places);
    else
      quad.x = _mm512_mask_shuffle_epi8(quad.x, masks.of[q], aligned.x, places);
  }
  static Bytes packed(Quad quad) {
    const __m512i order = place<int32_t>([](int j) { return j % 4 * 4 + j / 4; });
    return {_mm512_permutexvar_epi32(order, quad.x)};
  }
  static Bytes all_bytes(uint8_t x) { return {_mm512_set1_epi8(int8_t(x))}; }
  static Bytes max(Bytes a, Bytes b) { return {_mm512_max_epu8(a.x, b.x)}; }
  static Bytes flip(Bytes a, Bytes b) { return {_mm512_xor_si512(a.x, b.x)}; }
  static void store(void* p, Bytes a) { _mm512_storeu_si512(p, a.x); }

  static constexpr bool streams = true;
  static void stream_line(void* to, const void* from) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(from));
  }
  static void finish_streams() { _mm_sfence(); }

  // In halves: a root or a quotient of 16 lanes takes three operations.
  static void store_root(float* to, const float* of) {
    for (int half = 0; half < 16; half += 8) _mm256_storeu_ps(to + half, _mm256_sqrt_ps(_mm256_loadu_ps(of + half)));
  }
  static void store_quotient(float* to, const float* a, const float* b) {
    for (int half = 0; half < 16; half += 8)
      _mm256_storeu_ps(to + half, _mm256_div_ps(_mm256_loadu_ps(a + half), _mm256_loadu_ps(b + half)));
  }

  static D zero() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
  static D add_squares(D sum, F a) {  // a product of two floats is exact in double, so fusing changes nothing
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a.x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.x, 1));
    return {_mm512_fmadd_pd(low, low, sum.low), _mm512_fmadd_pd(high, high, sum.high)};
  }
  static void store(double* p, D a) {
    _mm512_storeu_pd(p, a.low);
    _mm512_storeu_pd(p + 8, a.high);
  }
};

}  // namespace

const Kernels& avx512_kernels() {
  static constexpr Kernels kernels = table<Avx512>("avx512");
  return kernels;
}

}  // namespace unbounded
