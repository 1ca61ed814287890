// The state formats: what is reversible is reversed for every pattern, and what is rounded is right on average.
#include <cmath>
#include <vector>

#include "kernel_check.h"
#include "kernels/packed.h"

using namespace unbounded;

namespace {

bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

// Every upper half of a master, with the lower halves around the places where the rounding turns.
void exact_is_reversible(const Kernels& kernels) {
  const uint32_t lows[] = {0, 1, 2, 0x1234, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xabcd, 0xfffe, 0xffff};
  std::vector<uint32_t> masters;
  for (uint32_t high = 0; high < 0x10000; ++high)
    for (uint32_t low : lows) masters.push_back(high << 16 | low);
  const size_t n = masters.size();
  std::vector<Bf16> weight(n);
  std::vector<int16_t> remainder(n);
  std::vector<uint32_t> back(n);
  kernels.split(reinterpret_cast<const float*>(masters.data()), weight.data(), remainder.data(), n);
  kernels.join(weight.data(), remainder.data(), reinterpret_cast<float*>(back.data()), n);
  for (size_t i = 0; i < n; ++i) {
    if (is_nan(masters[i])) {
      CHECK(is_nan(back[i]) && is_nan(uint32_t(weight[i].bits) << 16));
      continue;
    }
    CHECK(back[i] == masters[i]);
    CHECK(weight[i].bits == uint16_t((uint64_t(masters[i]) + 0x8000) >> 16));
  }
}

// Every fp16 and bf16 number survives the way to fp32 and back.
void conversions_are_reversible(const Kernels& kernels) {
  std::vector<uint16_t> all(0x10000), back(0x10000);
  std::vector<float> wide(0x10000);
  for (uint32_t i = 0; i < 0x10000; ++i) all[i] = uint16_t(i);
  for (DType type : {DType::bf16, DType::f16}) {
    kernels.convert(all.data(), type, wide.data(), DType::f32, all.size());
    kernels.convert(wide.data(), DType::f32, back.data(), type, all.size());
    for (uint32_t i = 0; i < 0x10000; ++i) CHECK(std::isnan(wide[i]) || back[i] == all[i]);
  }
}

// A block that holds every code below the last decodes and encodes to itself, at every scale that a block can have.
// The last code is left for the largest value to round up to, and next time takes the scale above.
void codes_encode_to_themselves(const Kernels& kernels) {
  for (uint32_t exponent = 24; exponent < 254; ++exponent)  // below, the lowest codes are less than a float can hold
    for (Moment moment : {Moment::first, Moment::second})
      for (uint32_t half = 0; half < 2; ++half) {
        std::vector<uint8_t> codes(BLOCK), again(BLOCK);
        std::vector<float> x(BLOCK);
        float scale = __builtin_bit_cast(float, exponent << 23), scale_again = 0;
        for (uint32_t i = 0; i < BLOCK; ++i) codes[i] = uint8_t(i | half << 7);
        codes[0] = codes[127] = moment == Moment::first ? 126 : 254;  // neither 0, -0 nor the last
        kernels.decode_moment({moment, codes.data(), &scale}, x.data(), 0, BLOCK);
        kernels.encode_moment(x.data(), {moment, again.data(), &scale_again}, 0, BLOCK);
        CHECK(scale == scale_again && codes == again);
      }
}

void codes_are_near(const Kernels& kernels) {
  Random random(5);
  std::vector<float> x(BLOCK), back(BLOCK);
  std::vector<uint8_t> codes(BLOCK);
  float scale;
  for (int round = 0; round < 200; ++round) {
    for (auto& value : x) value = random.around_zero() * std::exp2(float(round) - 100);
    kernels.encode_moment(x.data(), {Moment::first, codes.data(), &scale}, 0, BLOCK);
    kernels.decode_moment({Moment::first, codes.data(), &scale}, back.data(), 0, BLOCK);
    for (size_t i = 0; i < BLOCK; ++i) CHECK(std::fabs(back[i] - x[i]) <= std::fabs(x[i]) / 32 + scale * 0x1p-12f);
    for (auto& value : x) value = std::fabs(value);
    kernels.encode_moment(x.data(), {Moment::second, codes.data(), &scale}, 0, BLOCK);
    kernels.decode_moment({Moment::second, codes.data(), &scale}, back.data(), 0, BLOCK);
    for (size_t i = 0; i < BLOCK; ++i) CHECK(back[i] > 0 && std::fabs(back[i] - x[i]) <= x[i] / 32 + scale * 0x1p-19f);
  }
}

void bad_blocks_are_nan(const Kernels& kernels) {
  for (float bad : {INFINITY, -INFINITY, NAN, 3e38f})
    for (Moment moment : {Moment::first, Moment::second}) {
      std::vector<float> x(BLOCK, 1.0f), back(BLOCK);
      std::vector<uint8_t> codes(BLOCK);
      float scale;
      x[77] = bad;
      kernels.encode_moment(x.data(), {moment, codes.data(), &scale}, 0, BLOCK);
      kernels.decode_moment({moment, codes.data(), &scale}, back.data(), 0, BLOCK);
      for (float value : back) CHECK(std::isnan(value));
    }
}

void compact_masters_are_near(const Kernels& kernels) {
  Random random(7);
  const size_t n = 4096;
  std::vector<float> master(n), back(n), again(n);
  std::vector<uint16_t> weight(n);
  std::vector<int8_t> remainder(n);
  for (DType type : {DType::bf16, DType::f16}) {
    for (size_t i = 0; i < n; ++i) master[i] = random.around_zero() * std::exp2(float(i % 32) - 20);
    kernels.encode_weight(master.data(), {type, weight.data(), remainder.data()}, 0, n);
    kernels.decode_weight({type, weight.data(), remainder.data()}, back.data(), 0, n);
    kernels.encode_weight(back.data(), {type, weight.data(), remainder.data()}, 0, n);
    kernels.decode_weight({type, weight.data(), remainder.data()}, again.data(), 0, n);
    const float relative = type == DType::bf16 ? 0x1p-16f : 0x1p-18f, least = type == DType::bf16 ? 0 : 0x1p-32f;
    for (size_t i = 0; i < n; ++i) {
      CHECK(std::fabs(back[i] - master[i]) <= std::fabs(master[i]) * relative + least);
      CHECK(again[i] == back[i]);
    }
  }
}

// 4,000 steps of a decay that is far smaller than the distance of two codes: only rounding up by chance follows it.
void stochastic_rounding_is_unbiased(const Kernels& kernels) {
  const size_t n = 4 * BLOCK;
  std::vector<Bf16> weight(n, Bf16{0x3f80}), grad(n, Bf16{0});
  std::vector<int8_t> remainder(n), first(n);
  std::vector<uint8_t> second(n);
  std::vector<float> first_scale(4), second_scale(4), v(n, 1.0f), w(n);
  kernels.encode_moment(v.data(), {Moment::second, second.data(), second_scale.data()}, 0, n);
  Update u{};
  u.step.rule = Rule::adamw, u.step.beta2 = 0.9995f, u.step.rest2 = 0.0005f, u.step.keep = 0.99999f, u.step.eps = 1;
  u.format = Format::compact, u.weight_type = u.grad_type = DType::bf16, u.grad_scale = 1;
  u.weight = weight.data(), u.remainder = remainder.data(), u.grad = grad.data();
  u.first = first.data(), u.first_scale = first_scale.data();
  u.second = second.data(), u.second_scale = second_scale.data();
  u.old = u;
  Random random(11);
  for (int step = 0; step < 4000; ++step) {
    for (auto& salt : u.salt) salt = int32_t(random.bits());
    kernels.update(u, 0, n);
  }
  kernels.decode_moment({Moment::second, second.data(), second_scale.data()}, v.data(), 0, n);
  kernels.decode_weight({DType::bf16, weight.data(), remainder.data()}, w.data(), 0, n);
  double mean_v = 0, mean_w = 0;
  for (size_t i = 0; i < n; ++i) mean_v += v[i] / double(n), mean_w += w[i] / double(n);
  CHECK(std::fabs(mean_v / std::pow(0.9995, 4000) - 1) < 0.1);
  CHECK(std::fabs(mean_w / std::pow(0.99999, 4000) - 1) < 0.001);
}

// Frozen weights come back with every bit, in any part of a record; zeros, denormals and some small ones among them.
void packed_weights_come_back() {
  Random random(12);
  for (const size_t n : {size_t(1), size_t(100), PACKED - 1, PACKED}) {
    Buffer weights(2 * n), record(RECORD_BYTES);
    uint16_t* bits = weights.as<uint16_t>();
    for (size_t i = 0; i < n; ++i) bits[i] = uint16_t(random.bits() & 0x807f) | uint16_t((100 + random.bits() % 15) << 7);
    for (size_t i = 0; i < n; i += 150) bits[i] = uint16_t(random.bits() & (i % 300 ? 0x807f : 0x83ff));
    pack_record(bits, n, record.as<uint8_t>());
    for (const size_t skip : {size_t(0), n / 2}) {
      Buffer back(2 * (n - skip));
      unpack_record(record.as<uint8_t>(), back.as<uint16_t>(), skip, n - skip);
      CHECK(!std::memcmp(back.as<uint16_t>(), bits + skip, 2 * (n - skip)));
    }
  }
}

}  // namespace

int main() {
  packed_weights_come_back();
  const Kernels* found[4];
  const int count = levels(found);
  for (int level = 0; level < count; ++level) {
    exact_is_reversible(*found[level]);
    conversions_are_reversible(*found[level]);
    codes_encode_to_themselves(*found[level]);
    codes_are_near(*found[level]);
    bad_blocks_are_nan(*found[level]);
    compact_masters_are_near(*found[level]);
    stochastic_rounding_is_unbiased(*found[level]);
  }
  std::printf("formats hold in %d instruction sets\n", count);
}
