// NEON as every aarch64 has it: 4 lanes.
#include <arm_neon.h>

#include <cstring>

#include "kernels/formats/compact_neon.h"
#include "kernels/table.h"

namespace unbounded {
namespace {

struct Neon {
  static constexpr size_t width = 4;
  struct M {
    uint32x4_t x;
  };
  struct D {
    float64x2_t low, high;
  };
  struct F {
    float32x4_t x;
    friend F operator+(F a, F b) { return {vaddq_f32(a.x, b.x)}; }
    friend F operator-(F a, F b) { return {vsubq_f32(a.x, b.x)}; }
    friend F operator*(F a, F b) { return {vmulq_f32(a.x, b.x)}; }
    friend F operator/(F a, F b) { return {vdivq_f32(a.x, b.x)}; }
  };
  struct I {
    int32x4_t x;
    friend I operator+(I a, I b) { return {vaddq_s32(a.x, b.x)}; }
    friend I operator-(I a, I b) { return {vsubq_s32(a.x, b.x)}; }
    friend I operator*(I a, I b) { return {vmulq_s32(a.x, b.x)}; }
    friend I operator&(I a, I b) { return {vandq_s32(a.x, b.x)}; }
    friend I operator|(I a, I b) { return {vorrq_s32(a.x, b.x)}; }
    friend I operator^(I a, I b) { return {veorq_s32(a.x, b.x)}; }
  };

  static F all(float x) { return {vdupq_n_f32(x)}; }
  static I all(int32_t x) { return {vdupq_n_s32(x)}; }
  static I all(uint32_t x) { return all(int32_t(x)); }
  static I bits(F a) { return {vreinterpretq_s32_f32(a.x)}; }
  static F floats(I a) { return {vreinterpretq_f32_s32(a.x)}; }
  static F sqrt(F a) { return {vsqrtq_f32(a.x)}; }
  static F magnitude(F a) { return {vabsq_f32(a.x)}; }
  static F fma(F a, F b, F c) { return {vfmaq_f32(c.x, a.x, b.x)}; }
  static F fms(F a, F b, F c) { return {vfmaq_f32(vnegq_f32(c.x), a.x, b.x)}; }
  static F fnma(F a, F b, F c) { return {vfmsq_f32(c.x, a.x, b.x)}; }
  static F from_int(I a) { return {vcvtq_f32_s32(a.x)}; }
  static I to_int(F a) { return {vcvtq_s32_f32(a.x)}; }

  static uint32x4_t natural(I a) { return vreinterpretq_u32_s32(a.x); }
  template <int n> static I left(I a) { return {vshlq_n_s32(a.x, n)}; }
  template <int n> static I right(I a) {
    if constexpr (n == 0) return a;
    else return {vreinterpretq_s32_u32(vshrq_n_u32(natural(a), n))};
  }
  static I min(I a, I b) { return {vreinterpretq_s32_u32(vminq_u32(natural(a), natural(b)))}; }
  static I max(I a, I b) { return {vreinterpretq_s32_u32(vmaxq_u32(natural(a), natural(b)))}; }
  static M greater(I a, I b) { return {vcgtq_s32(a.x, b.x)}; }
  static I select(M m, I yes, I no) { return {vbslq_s32(m.x, yes.x, no.x)}; }
  static I pick(I mask, I yes, I no) { return {vbslq_s32(natural(mask), yes.x, no.x)}; }
  static uint32_t highest(I a) { return vmaxvq_u32(natural(a)); }
  static void highest(I a, I b, uint32_t& of_a, uint32_t& of_b) { of_a = highest(a), of_b = highest(b); }
  static I mix(I a, I b, I mask) { return (a & mask) ^ b; }
  static I quiet(F a) { return {vbslq_s32(vceqq_f32(a.x, a.x), bits(a).x, all(0xffc00000u).x)}; }

  static uint16x4_t load64(const void* p) { return vld1_u16(static_cast<const uint16_t*>(p)); }
  static uint8x8_t load32(const void* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    return vreinterpret_u8_u32(vdup_n_u32(four));
  }
  static uint16x4_t low_halves(I a) { return vreinterpret_u16_s16(vmovn_s32(a.x)); }

  static F load(const float* p) { return {vld1q_f32(p)}; }
  // Floats of their upper halves: of four, and of the last four of eight.
  static F upper(uint16x4_t x) { return {vreinterpretq_f32_u32(vshll_n_u16(x, 16))}; }
  static F upper_high(uint16x8_t x) { return {vreinterpretq_f32_u32(vshll_high_n_u16(x, 16))}; }
  static F load(const Bf16* p) { return upper(load64(p)); }
  static F load(const Fp16* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(load64(p)))}; }
  static void store(float* p, F a) { vst1q_f32(p, a.x); }
  static void store(Bf16* p, F a) {
    const I x = bits(a), even = right<16>(x) & all(1);
    const I rounded = right<16>(x + even + all(0x7fff)), nan = right<16>(x) | all(0x40);
    const M is_nan = greater(x & all(0x7fffffff), all(0x7f800000));
    vst1_u16(&p->bits, low_halves(select(is_nan, nan, rounded)));
  }
  static void store(Fp16* p, F a) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(a.x))); }

  static I load_int(const int32_t* p) { return {vld1q_s32(p)}; }
  static I load_int(const int16_t* p) { return {vmovl_s16(vld1_s16(p))}; }
  static I load_int(const int8_t* p) { return {vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load32(p)))))}; }
  static I load_int(const uint8_t* p) {
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load32(p)))))};
  }
  static void store_int(int32_t* p, I a) { vst1q_s32(p, a.x); }
  static void store_int(int16_t* p, I a) { vst1_s16(p, vmovn_s32(a.x)); }
  static void store_high(uint16_t* p, I a) { vst1_u16(p, vshrn_n_u32(natural(a), 16)); }
  template <int n> static void store_byte(void* p, I a) {
    const uint16x4_t halves = low_halves(right<8 * n>(a));
    const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
    std::memcpy(p, &four, 4);
  }

  struct Bytes {
    uint8x16_t x;
  };
  struct Quad {
    uint16x8_t x[2];
  };
  struct Masks {};  // what put() needs, made once
  template <int q, int shift> static void put(const Masks&, Quad& quad, I a) {
    const uint16x4_t halves = low_halves(right<shift>(a));
    if (q % 2 == 0)
      quad.x[q / 2] = vcombine_u16(halves, halves);
    else
      quad.x[q / 2] = vcombine_u16(vget_low_u16(quad.x[q / 2]), halves);
  }
  static Bytes packed(const Quad& quad) { return {vcombine_u8(vmovn_u16(quad.x[0]), vmovn_u16(quad.x[1]))}; }
  static Bytes all_bytes(uint8_t x) { return {vdupq_n_u8(x)}; }
  static Bytes max(Bytes a, Bytes b) { return {vmaxq_u8(a.x, b.x)}; }
  static Bytes pick(Bytes mask, Bytes yes, Bytes no) { return {vbslq_u8(mask.x, yes.x, no.x)}; }
  static Bytes flip(Bytes a, Bytes b) { return {veorq_u8(a.x, b.x)}; }
  static void store(void* p, Bytes a) { vst1q_u8(static_cast<uint8_t*>(p), a.x); }

  static void stream_line(void* to, const void* from) {  // the cores notice that whole lines are written
    __builtin_memcpy(to, from, 64);
  }
  static void finish_streams() {}

  static void store_root(float* to, const float* of) { store(to, sqrt(load(of))); }
  static void store_quotient(float* to, const float* a, const float* b) { store(to, load(a) / load(b)); }

  static D zero() { return {vdupq_n_f64(0), vdupq_n_f64(0)}; }
  static D add_squares(D sum, F a) {  // a product of two floats is exact in double, so fusing changes nothing
    const float64x2_t low = vcvt_f64_f32(vget_low_f32(a.x)), high = vcvt_high_f64_f32(a.x);
    return {vfmaq_f64(sum.low, low, low), vfmaq_f64(sum.high, high, high)};
  }
  static void store(double* p, D a) {
    vst1q_f64(p, a.low);
    vst1q_f64(p + 2, a.high);
  }
};

}  // namespace

const Kernels& neon_kernels() {
  static constexpr Kernels kernels = table<Neon>("neon");
  return kernels;
}

}  // namespace unbounded
