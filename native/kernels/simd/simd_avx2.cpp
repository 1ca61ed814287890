// AVX2 with FMA and F16C: 8 lanes.
#include <immintrin.h>

#include "kernels/table.h"

namespace unbounded {
namespace {

struct Avx2 {
  static constexpr size_t width = 8;
  struct M {
    __m256i x;
  };
  struct D {
    __m256d low, high;
  };
  struct F {
    __m256 x;
    friend F operator+(F a, F b) { return {_mm256_add_ps(a.x, b.x)}; }
    friend F operator-(F a, F b) { return {_mm256_sub_ps(a.x, b.x)}; }
    friend F operator*(F a, F b) { return {_mm256_mul_ps(a.x, b.x)}; }
    friend F operator/(F a, F b) { return {_mm256_div_ps(a.x, b.x)}; }
  };
  struct I {
    __m256i x;
    friend I operator+(I a, I b) { return {_mm256_add_epi32(a.x, b.x)}; }
    friend I operator-(I a, I b) { return {_mm256_sub_epi32(a.x, b.x)}; }
    friend I operator*(I a, I b) { return {_mm256_mullo_epi32(a.x, b.x)}; }
    friend I operator&(I a, I b) { return {_mm256_and_si256(a.x, b.x)}; }
    friend I operator|(I a, I b) { return {_mm256_or_si256(a.x, b.x)}; }
    friend I operator^(I a, I b) { return {_mm256_xor_si256(a.x, b.x)}; }
  };

  static F all(float x) { return {_mm256_set1_ps(x)}; }
  static I all(int32_t x) { return {_mm256_set1_epi32(x)}; }
  static I all(uint32_t x) { return all(int32_t(x)); }
  static I bits(F a) { return {_mm256_castps_si256(a.x)}; }
  static F floats(I a) { return {_mm256_castsi256_ps(a.x)}; }
  static F sqrt(F a) { return {_mm256_sqrt_ps(a.x)}; }
  static F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
  static F fms(F a, F b, F c) { return {_mm256_fmsub_ps(a.x, b.x, c.x)}; }
  static F fnma(F a, F b, F c) { return {_mm256_fnmadd_ps(a.x, b.x, c.x)}; }
  static F from_int(I a) { return {_mm256_cvtepi32_ps(a.x)}; }
  static I to_int(F a) { return {_mm256_cvttps_epi32(a.x)}; }

  template <int n> static I left(I a) { return {_mm256_slli_epi32(a.x, n)}; }
  template <int n> static I right(I a) { return {_mm256_srli_epi32(a.x, n)}; }
  static I min(I a, I b) { return {_mm256_min_epu32(a.x, b.x)}; }
  static I max(I a, I b) { return {_mm256_max_epu32(a.x, b.x)}; }
  static M greater(I a, I b) { return {_mm256_cmpgt_epi32(a.x, b.x)}; }
  static I select(M m, I yes, I no) { return {_mm256_blendv_epi8(no.x, yes.x, m.x)}; }
  static I pick(I mask, I yes, I no) { return (mask & yes) | I{_mm256_andnot_si256(mask.x, no.x)}; }
  static void highest(I a, I b, uint32_t& of_a, uint32_t& of_b) { of_a = highest(a), of_b = highest(b); }
  static I mix(I a, I b, I mask) { return (a & mask) ^ b; }
  static I quiet(F a) {
    return select({_mm256_castps_si256(_mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q))}, all(0xffc00000u), bits(a));
  }
  static uint32_t highest(I a) {
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(a.x), _mm256_extracti128_si256(a.x, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
    return uint32_t(_mm_cvtsi128_si32(x));
  }

  static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  static void store128(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
  static __m128i low_halves(I a) {  // the low 16 bits of every lane
    const __m256i x = (a & all(0xffff)).x;
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }

  static F load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static F load(const Bf16* p) { return floats(left<16>({_mm256_cvtepu16_epi32(load128(p))})); }
  static F load(const Fp16* p) { return {_mm256_cvtph_ps(load128(p))}; }
  static void store(float* p, F a) { _mm256_storeu_ps(p, a.x); }
  static void store(Bf16* p, F a) {
    const I x = bits(a), even = right<16>(x) & all(1);
    const I rounded = right<16>(x + even + all(0x7fff)), nan = right<16>(x) | all(0x40);
    const M is_nan = greater(x & all(0x7fffffff), all(0x7f800000));
    store128(p, low_halves(select(is_nan, nan, rounded)));
  }
  static void store(Fp16* p, F a) { store128(p, _mm256_cvtps_ph(a.x, _MM_FROUND_TO_NEAREST_INT)); }

  static I load_int(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  static I load_int(const int16_t* p) { return {_mm256_cvtepi16_epi32(load128(p))}; }
  static I load_int(const int8_t* p) { return {_mm256_cvtepi8_epi32(load64(p))}; }
  static I load_int(const uint8_t* p) { return {_mm256_cvtepu8_epi32(load64(p))}; }
  static void store_int(int32_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.x); }
  static void store_int(int16_t* p, I a) { store128(p, low_halves(a)); }
  static void store_high(uint16_t* p, I a) {
    const __m256i x = right<16>(a).x;
    store128(p, _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
  }
  template <int n> static void store_byte(void* p, I a) {
    const __m256i within = _mm256_set1_epi32((12 + n) << 24 | (8 + n) << 16 | (4 + n) << 8 | n);
    const __m256i x = _mm256_shuffle_epi8(a.x, within);
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(static_cast<__m128i*>(p), both);
  }

  struct Bytes {
    __m256i x;
  };
  struct Quad {
    I x[4];
  };
  struct Masks {};  // what put() needs, made once
  template <int q, int shift> static void put(const Masks&, Quad& quad, I a) {
    quad.x[q] = shift == 24 ? right<24>(a) : right<shift>(a) & all(0xff);
  }
  static Bytes packed(const Quad& quad) {
    const __m256i low = _mm256_packus_epi32(quad.x[0].x, quad.x[1].x);
    const __m256i high = _mm256_packus_epi32(quad.x[2].x, quad.x[3].x);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return {_mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order)};
  }
  static Bytes all_bytes(uint8_t x) { return {_mm256_set1_epi8(char(x))}; }
  static Bytes max(Bytes a, Bytes b) { return {_mm256_max_epu8(a.x, b.x)}; }
  static Bytes flip(Bytes a, Bytes b) { return {_mm256_xor_si256(a.x, b.x)}; }
  static void store(void* p, Bytes a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a.x); }

  static constexpr bool streams = true;
  static void stream_line(void* to, const void* from) {
    const auto* source = static_cast<const __m256i*>(from);
    auto* target = static_cast<__m256i*>(to);
    _mm256_stream_si256(target, _mm256_load_si256(source)), _mm256_stream_si256(target + 1, _mm256_load_si256(source + 1));
  }
  static void finish_streams() { _mm_sfence(); }

  static void store_root(float* to, const float* of) { store(to, sqrt(load(of))); }
  static void store_quotient(float* to, const float* a, const float* b) { store(to, load(a) / load(b)); }

  static D zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
  static D add_squares(D sum, F a) {  // a product of two floats is exact in double, so fusing changes nothing
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a.x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(a.x, 1));
    return {_mm256_fmadd_pd(low, low, sum.low), _mm256_fmadd_pd(high, high, sum.high)};
  }
  static void store(double* p, D a) {
    _mm256_storeu_pd(p, a.low);
    _mm256_storeu_pd(p + 4, a.high);
  }
};

}  // namespace

const Kernels& avx2_kernels() {
  static constexpr Kernels kernels = table<Avx2>("avx2");
  return kernels;
}

}  // namespace unbounded
