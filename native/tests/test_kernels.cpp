// Every instruction set gives the bits of the scalar kernels: rules, formats, dtypes, and lengths with every tail.
#include <vector>

#include "kernel_check.h"

using namespace unbounded;

namespace {

struct Case {
  Format format;
  DType weight, grad, out;
};

const std::vector<Case> CASES = {
    {Format::fp32, DType::f32, DType::f32, DType::f32},      {Format::fp32, DType::f32, DType::bf16, DType::bf16},
    {Format::fp32, DType::f32, DType::f16, DType::f16},      {Format::exact, DType::bf16, DType::f32, DType::f32},
    {Format::exact, DType::bf16, DType::bf16, DType::f32},   {Format::exact, DType::bf16, DType::f16, DType::f32},
    {Format::compact, DType::bf16, DType::f32, DType::f32},  {Format::compact, DType::bf16, DType::bf16, DType::f32},
    {Format::compact, DType::bf16, DType::f16, DType::f32},  {Format::compact, DType::f16, DType::f32, DType::f32},
    {Format::compact, DType::f16, DType::bf16, DType::f32},  {Format::compact, DType::f16, DType::f16, DType::f32},
};

size_t bytes_of(DType type) { return type == DType::f32 ? 4 : 2; }

struct States {
  Buffer weight, remainder, first, first_scale, second, second_scale, out;
  States(const Case& c, size_t n)
      : weight(n * bytes_of(c.weight)), remainder(n * 2), first(n * 4), first_scale((n + BLOCK - 1) / BLOCK * 4),
        second(n * 4), second_scale((n + BLOCK - 1) / BLOCK * 4), out(n * 2) {}
  bool operator==(const States&) const = default;
};

Step step_of(Rule rule, int variant) {
  Step s{};
  s.rule = rule;
  s.nesterov = variant & 1, s.has_momentum = variant > 0, s.first_step = variant == 1;
  s.lr = 1e-2f, s.keep = 0.999f, s.decay = variant & 1 ? 0.1f : 0.0f;
  s.beta1 = 0.9f, s.rest1 = 0.1f, s.beta2 = 0.99f, s.rest2 = 0.01f;
  s.step_size = 3e-3f, s.eps = 1e-8f, s.momentum = 0.9f, s.undamped = 0.8f;
  return s;
}

void run(const Kernels& kernels, const Case& c, Step step, const Buffer& grad, States& s, size_t n, uint64_t salt) {
  Update u{};
  u.step = step, u.format = c.format;
  u.weight_type = c.weight, u.grad_type = c.grad, u.out_type = c.out;
  u.grad_scale = 0.37f;
  Random random(salt);
  for (auto& x : u.salt) x = int32_t(random.bits());
  u.weight = s.weight.data(), u.grad = grad.data(), u.remainder = s.remainder.data();
  const bool first = step.rule != Rule::adagrad && (step.rule != Rule::sgd || step.has_momentum);
  const bool second = step.rule == Rule::adam || step.rule == Rule::adamw || step.rule == Rule::adagrad;
  if (first) u.first = s.first.data(), u.first_scale = s.first_scale.as<float>();
  if (second) u.second = s.second.data(), u.second_scale = s.second_scale.as<float>();
  if (c.out != DType::f32) u.out = s.out.data();
  kernels.update(u, 0, n);
}

void check_updates(const Kernels& fast, const Kernels& scalar, const Case& c, size_t n) {
  const Rule rules[] = {Rule::adamw, Rule::adam, Rule::sgd, Rule::lion, Rule::adagrad};
  for (Rule rule : rules)
    for (int variant = 0; variant < 3; ++variant) {
      Random random(n * 100 + size_t(rule) * 10 + size_t(variant));
      Buffer master(n * 4), values(n * 4), grad(n * bytes_of(c.grad));
      States a(c, n);
      for (size_t i = 0; i < n; ++i) master.as<float>()[i] = random.around_zero();
      scalar.convert(master.data(), DType::f32, a.weight.data(), c.weight, n);
      States b = a;
      for (int step = 0; step < 2; ++step) {
        for (size_t i = 0; i < n; ++i) values.as<float>()[i] = random.uniform() < 0.1f ? 0 : random.around_zero();
        scalar.convert(values.data(), DType::f32, grad.data(), c.grad, n);
        run(fast, c, step_of(rule, variant), grad, a, n, uint64_t(step));
        run(scalar, c, step_of(rule, variant), grad, b, n, uint64_t(step));
        CHECK(a == b);
      }
    }
}

void check_buffers(const Kernels& fast, const Kernels& scalar, size_t n) {
  Random random(n + 1);
  const DType types[] = {DType::f32, DType::bf16, DType::f16};
  for (DType from : types) {
    Buffer source(n * bytes_of(from)), values(n * 4);
    for (size_t i = 0; i < n; ++i) values.as<uint32_t>()[i] = random.bits();  // any pattern: denormals, inf, NaN
    scalar.convert(values.data(), DType::f32, source.data(), from, n);
    for (DType to : types) {
      Buffer a(n * bytes_of(to)), b(n * bytes_of(to));
      fast.convert(source.data(), from, a.data(), to, n);
      scalar.convert(source.data(), from, b.data(), to, n);
      CHECK(a == b);
    }
  }
}

void check_sums(const Kernels& fast, const Kernels& scalar, size_t n) {
  Random random(n + 2);
  const DType types[] = {DType::f32, DType::bf16, DType::f16};
  for (DType from : types) {
    Buffer source(n * bytes_of(from)), values(n * 4), a(n * 4), b(n * 4);
    for (size_t i = 0; i < n; ++i) values.as<float>()[i] = random.around_zero();
    scalar.convert(values.data(), DType::f32, source.data(), from, n);
    const double x = fast.sum_squares(source.data(), from, n), y = scalar.sum_squares(source.data(), from, n);
    CHECK(!std::memcmp(&x, &y, 8));
    fast.accumulate(a.data(), DType::f32, source.data(), from, 0.3f, n);
    scalar.accumulate(b.data(), DType::f32, source.data(), from, 0.3f, n);
    CHECK(a == b);
  }
}

void check_codecs(const Kernels& fast, const Kernels& scalar, size_t n) {
  Random random(n + 3);
  const size_t blocks = (n + BLOCK - 1) / BLOCK;
  Buffer values(n * 4);
  for (size_t i = 0; i < n; ++i) values.as<float>()[i] = random.around_zero();
  for (Moment moment : {Moment::first, Moment::second}) {
    Buffer a(n), b(n), scale_a(blocks * 4), scale_b(blocks * 4), back_a(n * 4), back_b(n * 4);
    fast.encode_moment(values.as<float>(), {moment, a.data(), scale_a.as<float>()}, 0, n);
    scalar.encode_moment(values.as<float>(), {moment, b.data(), scale_b.as<float>()}, 0, n);
    fast.decode_moment({moment, a.data(), scale_a.as<float>()}, back_a.as<float>(), 0, n);
    scalar.decode_moment({moment, b.data(), scale_b.as<float>()}, back_b.as<float>(), 0, n);
    CHECK(a == b && scale_a == scale_b && back_a == back_b);
  }
  for (DType type : {DType::bf16, DType::f16}) {
    Buffer a(n * 2), b(n * 2), low_a(n), low_b(n), back_a(n * 4), back_b(n * 4);
    fast.encode_weight(values.as<float>(), {type, a.data(), low_a.as<int8_t>()}, 0, n);
    scalar.encode_weight(values.as<float>(), {type, b.data(), low_b.as<int8_t>()}, 0, n);
    fast.decode_weight({type, a.data(), low_a.as<int8_t>()}, back_a.as<float>(), 0, n);
    scalar.decode_weight({type, b.data(), low_b.as<int8_t>()}, back_b.as<float>(), 0, n);
    CHECK(a == b && low_a == low_b && back_a == back_b);
  }
}

}  // namespace

int main() {
  const Kernels* found[4];
  const int count = levels(found);
  const Kernels& scalar = *found[count - 1];
  std::vector<size_t> lengths;
  for (size_t n = 0; n <= 17; ++n) lengths.push_back(n);
  for (size_t n : {31, 33, 127, 128, 129, 143, 257, 300}) lengths.push_back(n);
  for (int level = 0; level + 1 < count; ++level)
    for (size_t n : lengths) {
      for (const Case& c : CASES) check_updates(*found[level], scalar, c, n);
      check_buffers(*found[level], scalar, n);
      check_sums(*found[level], scalar, n);
      check_codecs(*found[level], scalar, n);
    }
  std::printf("%d instruction sets agree with the scalar kernels\n", count - 1);
}
