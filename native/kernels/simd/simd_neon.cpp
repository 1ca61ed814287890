// NEON as every aarch64 has it: 16 lanes in four registers. Halves and bytes are then moved a whole register at a time, and
// four roots and quotients are under way at once: with one register, the exact format took a quarter longer.
// What only update_blocks in update_compact.h needs is missing here: compact_neon.h does its work.
#include <arm_neon.h>

#include "kernels/formats/compact_neon.h"
#include "kernels/table.h"

namespace unbounded {
namespace {

// The operation on the registers of its operands, one by one.
template <class To, class Op, class... From> [[gnu::always_inline]] inline To each(Op op, const From&... x) {
  return {op(x.a...), op(x.b...), op(x.c...), op(x.d...)};
}

struct Neon {
  static constexpr size_t width = 16;
  template <class T> struct Four {
    T a, b, c, d;
  };
  using M = Four<uint32x4_t>;
  struct D {
    float64x2_t x[8];
  };
  struct F : Four<float32x4_t> {
    friend F operator+(const F& x, const F& y) { return each<F>([](auto p, auto q) { return p + q; }, x, y); }
    friend F operator-(const F& x, const F& y) { return each<F>([](auto p, auto q) { return p - q; }, x, y); }
    friend F operator*(const F& x, const F& y) { return each<F>([](auto p, auto q) { return p * q; }, x, y); }
    friend F operator/(const F& x, const F& y) { return each<F>([](auto p, auto q) { return p / q; }, x, y); }
  };
  struct I : Four<uint32x4_t> {
    friend I operator+(const I& x, const I& y) { return each<I>([](auto p, auto q) { return p + q; }, x, y); }
    friend I operator-(const I& x, const I& y) { return each<I>([](auto p, auto q) { return p - q; }, x, y); }
    friend I operator*(const I& x, const I& y) { return each<I>([](auto p, auto q) { return p * q; }, x, y); }
    friend I operator&(const I& x, const I& y) { return each<I>([](auto p, auto q) { return p & q; }, x, y); }
    friend I operator|(const I& x, const I& y) { return each<I>([](auto p, auto q) { return p | q; }, x, y); }
    friend I operator^(const I& x, const I& y) { return each<I>([](auto p, auto q) { return p ^ q; }, x, y); }
  };

  static F all(float x) {
    const float32x4_t y = vdupq_n_f32(x);
    return {y, y, y, y};
  }
  static I all(uint32_t x) {
    const uint32x4_t y = vdupq_n_u32(x);
    return {y, y, y, y};
  }
  static I all(int32_t x) { return all(uint32_t(x)); }
  static I bits(const F& x) { return each<I>([](auto p) { return vreinterpretq_u32_f32(p); }, x); }
  static F floats(const I& x) { return each<F>([](auto p) { return vreinterpretq_f32_u32(p); }, x); }
  static F sqrt(const F& x) { return each<F>([](auto p) { return vsqrtq_f32(p); }, x); }
  static F magnitude(const F& x) { return each<F>([](auto p) { return vabsq_f32(p); }, x); }
  static F fma(const F& x, const F& y, const F& z) {
    return each<F>([](auto p, auto q, auto r) { return vfmaq_f32(r, p, q); }, x, y, z);
  }
  static F fms(const F& x, const F& y, const F& z) {
    return each<F>([](auto p, auto q, auto r) { return vfmaq_f32(vnegq_f32(r), p, q); }, x, y, z);
  }
  static F fnma(const F& x, const F& y, const F& z) {
    return each<F>([](auto p, auto q, auto r) { return vfmsq_f32(r, p, q); }, x, y, z);
  }
  static F from_int(const I& x) { return each<F>([](auto p) { return vcvtq_f32_s32(vreinterpretq_s32_u32(p)); }, x); }
  static I to_int(const F& x) { return each<I>([](auto p) { return vreinterpretq_u32_s32(vcvtq_s32_f32(p)); }, x); }

  template <int n> static I left(const I& x) { return each<I>([](auto p) { return vshlq_n_u32(p, n); }, x); }
  template <int n> static I right(const I& x) { return each<I>([](auto p) { return p >> n; }, x); }
  static I min(const I& x, const I& y) { return each<I>([](auto p, auto q) { return vminq_u32(p, q); }, x, y); }
  static I max(const I& x, const I& y) { return each<I>([](auto p, auto q) { return vmaxq_u32(p, q); }, x, y); }
  static M greater(const I& x, const I& y) {
    return each<M>([](auto p, auto q) { return vcgtq_s32(vreinterpretq_s32_u32(p), vreinterpretq_s32_u32(q)); }, x, y);
  }
  template <class Mask> static I pick(const Mask& mask, const I& yes, const I& no) {
    return each<I>([](auto m, auto p, auto q) { return vbslq_u32(m, p, q); }, mask, yes, no);
  }
  static I select(const M& mask, const I& yes, const I& no) { return pick(mask, yes, no); }
  static I mix(const I& x, const I& y, const I& mask) { return (x & mask) ^ y; }
  static I quiet(const F& x) {
    return pick(each<M>([](auto p) { return vceqq_f32(p, p); }, x), bits(x), all(0xffc00000u));
  }

  struct Halves {  // 16 bits of every lane, in order
    uint16x8_t first, last;
  };
  static uint16x8_t halves(uint32x4_t x) { return vreinterpretq_u16_u32(x); }
  static Halves low(const I& x) {
    return {vuzp1q_u16(halves(x.a), halves(x.b)), vuzp1q_u16(halves(x.c), halves(x.d))};
  }
  static Halves high(const I& x) {
    return {vuzp2q_u16(halves(x.a), halves(x.b)), vuzp2q_u16(halves(x.c), halves(x.d))};
  }
  static uint8x16_t low(const Halves& x) { return vuzp1q_u8(vreinterpretq_u8_u16(x.first), vreinterpretq_u8_u16(x.last)); }
  static uint8x16_t high(const Halves& x) { return vuzp2q_u8(vreinterpretq_u8_u16(x.first), vreinterpretq_u8_u16(x.last)); }
  template <int n> static uint8x16_t shifted(const Halves& x) {
    return vshrn_high_n_u16(vshrn_n_u16(x.first, n), x.last, n);
  }
  template <int n> static uint8x16_t bytes_from(const I& x) {  // bits n to n + 7 of every lane
    if constexpr (n == 0) return low(low(x));
    else if constexpr (n == 8) return high(low(x));
    else if constexpr (n == 24) return high(high(x));
    else if constexpr (n < 8) return shifted<n>(low(x));
    else return shifted<n - 16>(high(x));
  }
  static I joined(const Halves& low, const Halves& high) {
    const auto wide = [](uint16x8_t x) { return vreinterpretq_u32_u16(x); };
    return {wide(vzip1q_u16(low.first, high.first)), wide(vzip2q_u16(low.first, high.first)),
            wide(vzip1q_u16(low.last, high.last)), wide(vzip2q_u16(low.last, high.last))};
  }
  static Halves load_halves(const void* p) {
    const auto* at = static_cast<const uint16_t*>(p);
    return {vld1q_u16(at), vld1q_u16(at + 8)};
  }
  static void store_halves(void* p, const Halves& x) {
    auto* at = static_cast<uint16_t*>(p);
    vst1q_u16(at, x.first), vst1q_u16(at + 8, x.last);
  }

  static F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
  static F load(const Bf16* p) { return floats(joined({vdupq_n_u16(0), vdupq_n_u16(0)}, load_halves(p))); }
  static F load(const Fp16* p) {
    const Halves x = load_halves(p);
    const float16x8_t y = vreinterpretq_f16_u16(x.first), z = vreinterpretq_f16_u16(x.last);
    return {vcvt_f32_f16(vget_low_f16(y)), vcvt_high_f32_f16(y), vcvt_f32_f16(vget_low_f16(z)), vcvt_high_f32_f16(z)};
  }
  static void store(float* p, const F& x) {
    vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
  }
  [[gnu::always_inline]] static void store(Bf16* p, const F& x) {  // or it is a call, with the lanes in memory
    const Halves low_bits = low(bits(x)), high_bits = high(bits(x));
    const Halves number = low(each<I>([](auto q) { return vceqq_f32(q, q); }, x));
    const auto round = [](uint16x8_t low, uint16x8_t high, uint16x8_t is_number) {
      const uint16x8_t up = vcgtq_u16(vorrq_u16(low, vandq_u16(high, vdupq_n_u16(1))), vdupq_n_u16(0x8000));  // or 0
      return vbslq_u16(is_number, vsubq_u16(high, up), vorrq_u16(high, vdupq_n_u16(0x40)));
    };
    store_halves(p, {round(low_bits.first, high_bits.first, number.first),
                     round(low_bits.last, high_bits.last, number.last)});
  }
  static void store(Fp16* p, const F& x) {
    const auto narrow = [](float32x4_t first, float32x4_t last) {
      return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(first), last));
    };
    store_halves(p, {narrow(x.a, x.b), narrow(x.c, x.d)});
  }

  static I load_int(const int32_t* p) { return bits(load(reinterpret_cast<const float*>(p))); }
  static I load_int(const int16_t* p) {
    const auto widened = [](int16x4_t x) { return vreinterpretq_u32_s32(vmovl_s16(x)); };
    const int16x8_t x = vld1q_s16(p), y = vld1q_s16(p + 8);
    return {widened(vget_low_s16(x)), widened(vget_high_s16(x)), widened(vget_low_s16(y)), widened(vget_high_s16(y))};
  }
  static I load_int(const int8_t* p) {
    const int8x16_t x = vld1q_s8(p);
    const auto widened = [](int16x4_t x) { return vreinterpretq_u32_s32(vmovl_s16(x)); };
    const int16x8_t y = vmovl_s8(vget_low_s8(x)), z = vmovl_s8(vget_high_s8(x));
    return {widened(vget_low_s16(y)), widened(vget_high_s16(y)), widened(vget_low_s16(z)), widened(vget_high_s16(z))};
  }
  static I load_int(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    const uint16x8_t y = vmovl_u8(vget_low_u8(x)), z = vmovl_u8(vget_high_u8(x));
    return {vmovl_u16(vget_low_u16(y)), vmovl_high_u16(y), vmovl_u16(vget_low_u16(z)), vmovl_high_u16(z)};
  }
  static void store_int(int16_t* p, const I& x) { store_halves(p, low(x)); }
  static void store_high(uint16_t* p, const I& x) { store_halves(p, high(x)); }
  template <int n> static void store_byte(void* p, const I& x) { vst1q_u8(static_cast<uint8_t*>(p), bytes_from<8 * n>(x)); }

  static constexpr bool streams = false;  // the cores notice that whole lines are written

  static D zero() { return {}; }
  static D add_squares(const D& sum, const F& x) {  // a product of two floats is exact in double, so fusing changes nothing
    const auto add = [](float64x2_t sum, float64x2_t x) { return vfmaq_f64(sum, x, x); };
    const auto low = [](float32x4_t x) { return vcvt_f64_f32(vget_low_f32(x)); };
    return {{add(sum.x[0], low(x.a)), add(sum.x[1], vcvt_high_f64_f32(x.a)), add(sum.x[2], low(x.b)),
             add(sum.x[3], vcvt_high_f64_f32(x.b)), add(sum.x[4], low(x.c)), add(sum.x[5], vcvt_high_f64_f32(x.c)),
             add(sum.x[6], low(x.d)), add(sum.x[7], vcvt_high_f64_f32(x.d))}};
  }
  static void store(double* p, const D& x) {
    for (int i = 0; i < 8; ++i) vst1q_f64(p + 2 * i, x.x[i]);
  }
};

}  // namespace

const Kernels& neon_kernels() {
  static constexpr Kernels kernels = table<Neon>("neon");
  return kernels;
}

}  // namespace unbounded
