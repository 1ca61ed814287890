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

struct Held {
  Buffer weight, remainder, first, first_scale, second, second_scale, out;
  Held(const Case& c, size_t n)
      : weight(n * bytes_of(c.weight)), remainder(n * 2), first(n * 4), first_scale((n + BLOCK - 1) / BLOCK * 4),
        second(n * 4), second_scale((n + BLOCK - 1) / BLOCK * 4), out(n * 2) {}
  bool operator==(const Held&) const = default;
  States states() const {
    return {weight.data(), remainder.data(), first.data(), first_scale.as<float>(), second.data(), second_scale.as<float>()};
  }
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

bool has_first(const Step& s) { return s.rule != Rule::adagrad && (s.rule != Rule::sgd || s.has_momentum); }
bool has_second(const Step& s) { return s.rule == Rule::adam || s.rule == Rule::adamw || s.rule == Rule::adagrad; }

// The states without those that the rule does not keep.
States kept(const Step& step, States s) {
  if (!has_first(step)) s.first = s.first_scale = nullptr;
  if (!has_second(step)) s.second = s.second_scale = nullptr;
  return s;
}

Update update_of(const Case& c, const Step& step, const Buffer& grad, uint64_t salt, const States& from, const States& to) {
  Update u{};
  static_cast<States&>(u) = kept(step, to);
  u.old = kept(step, from);
  u.step = step, u.format = c.format;
  u.weight_type = c.weight, u.grad_type = c.grad, u.out_type = c.out;
  u.grad_scale = 0.37f;
  Random random(salt);
  for (auto& x : u.salt) x = int32_t(random.bits());
  u.grad = grad.data();
  return u;
}

void run(const Kernels& kernels, const Case& c, const Step& step, const Buffer& grad, Held& s, size_t n, uint64_t salt) {
  Update u = update_of(c, step, grad, salt, s.states(), s.states());
  if (c.out != DType::f32) u.out = s.out.data();
  kernels.update(u, 0, n);
}

// States after one step, so that moments are not zero, and a gradient for the next.
struct Begun {
  Buffer grad;
  Held held;
  Begun(const Kernels& kernels, const Case& c, const Step& step, size_t n) : grad(n * bytes_of(c.grad)), held(c, n) {
    Random random(n * 10 + size_t(step.rule));
    Buffer values(n * 4);
    for (size_t i = 0; i < n; ++i) values.as<float>()[i] = random.around_zero();
    kernels.convert(values.data(), DType::f32, held.weight.data(), c.weight, n);
    kernels.convert(values.data(), DType::f32, grad.data(), c.grad, n);
    run(kernels, c, step, grad, held, n, 1);
  }
};

// New states in one piece of memory, each `shift` elements after the beginning of a line; all bytes are 0xff before.
class Beside {
 public:
  Beside(const Case& c, size_t n, size_t shift) {
    const bool is_compact = c.format == Format::compact;
    const size_t blocks = (n + BLOCK - 1) / BLOCK, moment = is_compact ? 1 : 4;
    const size_t widths[6] = {bytes_of(c.weight), size_t(is_compact ? 1 : 2), moment, 4, moment, 4};
    for (int i = 0; i < 6; ++i) {
      const bool is_scale = i == 3 || i == 5, is_used = is_scale ? is_compact : i != 1 || c.format != Format::fp32;
      offsets_[i] = (end_ + 63) / 64 * 64 + (is_scale ? 0 : shift * widths[i]);
      bytes_[i] = is_used ? (is_scale ? blocks : n) * widths[i] : 0;
      end_ = offsets_[i] + bytes_[i] + 64;
    }
    memory_.reset(static_cast<char*>(std::aligned_alloc(64, (end_ + 63) / 64 * 64)));
    std::memset(memory_.get(), 0xff, end_);
  }
  States states() const {
    const auto at = [&](int i) { return static_cast<void*>(memory_.get() + offsets_[i]); };
    return {at(0), at(1), at(2), static_cast<float*>(at(3)), at(4), static_cast<float*>(at(5))};
  }
  void fill(const States& s) {
    const void* arrays[6] = {s.weight, s.remainder, s.first, s.first_scale, s.second, s.second_scale};
    for (int i = 0; i < 6; ++i)
      if (arrays[i]) std::memcpy(memory_.get() + offsets_[i], arrays[i], bytes_[i]);
  }
  bool operator==(const Beside& other) const { return !std::memcmp(memory_.get(), other.memory_.get(), end_); }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  size_t offsets_[6], bytes_[6], end_ = 0;
  std::unique_ptr<char[], Free> memory_;
};

// Only the new weights, where the format has them: with the bits of a whole update, and nothing else written.
void check_weights_only(const Kernels& kernels, const Case& c, const Step& step, const Buffer& grad, Held& before,
                        Held& expected, size_t n, size_t shift) {
  Beside written(c, n, shift), right(c, n, shift);
  Update u = update_of(c, step, grad, 2, before.states(), written.states());
  const bool has_out = c.out != DType::f32;
  Buffer out(n * 2);
  static_cast<States&>(u) = {has_out ? nullptr : u.weight, nullptr, nullptr, nullptr, nullptr, nullptr};
  u.part = Part::weights;
  if (has_out) u.out = out.data();
  kernels.update(u, 0, n);
  if (!has_out) right.fill({expected.states().weight, nullptr, nullptr, nullptr, nullptr, nullptr});
  CHECK(written == right);
  if (has_out) CHECK(!std::memcmp(out.data(), expected.out.data(), n * 2));
}

// From old states to new ones elsewhere: the bits of an update in place, the old ones unchanged, nothing else written.
void check_beside(const Kernels& kernels, const Case& c, size_t n, size_t shift) {
  for (Rule rule : {Rule::adamw, Rule::adam, Rule::sgd, Rule::lion, Rule::adagrad})
    for (int variant = 0; variant < 2; ++variant) {
      const Step step = step_of(rule, variant);
      Begun begun(kernels, c, step, n);
      const Buffer& grad = begun.grad;
      Held& before = begun.held;
      const Held unchanged = before;
      Held expected = before;
      run(kernels, c, step, grad, expected, n, 2);
      Beside written(c, n, shift), right(c, n, shift);
      kernels.update(update_of(c, step, grad, 2, before.states(), written.states()), 0, n);
      right.fill(kept(step, expected.states()));
      CHECK(before == unchanged);
      CHECK(written == right);
      check_weights_only(kernels, c, step, grad, before, expected, n, shift);
      CHECK(before == unchanged);
    }
}

// The weights and then the moments: the bits of a whole update, and each part leaves the other's arrays as they are.
void check_parts(const Kernels& kernels, const Case& c, size_t n) {
  if (c.format == Format::compact) return;
  for (Rule rule : {Rule::adamw, Rule::adam, Rule::sgd, Rule::lion, Rule::adagrad})
    for (float scale : {1.0f, 0.37f}) {
      const Step step = step_of(rule, 2);  // with momentum, and without a decay that adds the weight to the gradient
      Begun begun(kernels, c, step, n);
      Held& held = begun.held;
      Held whole = held;
      const auto update = [&](Held& of, Part part) {
        Update u = update_of(c, step, begun.grad, 2, of.states(), of.states());
        if (c.out != DType::f32) u.out = of.out.data();
        u.grad_scale = scale, u.part = part;
        kernels.update(u, 0, n);
      };
      update(whole, Part::whole);
      const Held before = held;
      update(held, Part::weights);
      CHECK(held.weight == whole.weight && held.remainder == whole.remainder && held.out == whole.out);
      CHECK(held.first == before.first && held.second == before.second);
      update(held, Part::moments);
      CHECK(held == whole);
    }
}

void check_updates(const Kernels& fast, const Kernels& scalar, const Case& c, size_t n) {
  const Rule rules[] = {Rule::adamw, Rule::adam, Rule::sgd, Rule::lion, Rule::adagrad};
  for (Rule rule : rules)
    for (int variant = 0; variant < 3; ++variant) {
      Random random(n * 100 + size_t(rule) * 10 + size_t(variant));
      Buffer master(n * 4), values(n * 4), grad(n * bytes_of(c.grad));
      Held a(c, n);
      for (size_t i = 0; i < n; ++i) master.as<float>()[i] = random.around_zero();
      scalar.convert(master.data(), DType::f32, a.weight.data(), c.weight, n);
      Held b = a;
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
    Buffer source(n * bytes_of(from)), values(n * 4);
    for (size_t i = 0; i < n; ++i) values.as<float>()[i] = random.around_zero();
    scalar.convert(values.data(), DType::f32, source.data(), from, n);
    const double x = fast.sum_squares(source.data(), from, n), y = scalar.sum_squares(source.data(), from, n);
    CHECK(!std::memcmp(&x, &y, 8));
    for (DType held : types)
      for (DType to : types) {
        Buffer sum(n * 4), a(n * bytes_of(to)), b(n * bytes_of(to));
        scalar.convert(values.data(), DType::f32, sum.data(), held, n);
        const double u = fast.add(a.data(), to, sum.data(), held, source.data(), from, n);
        const double v = scalar.add(b.data(), to, sum.data(), held, source.data(), from, n);
        CHECK(a == b && !std::memcmp(&u, &v, 8));
        const double again = scalar.sum_squares(b.data(), to, n);
        CHECK(!std::memcmp(&u, &again, 8));
      }
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
  for (int level = 0; level < count; ++level)
    for (size_t n : {1, 31, 64, 129, 300})
      for (const Case& c : CASES) check_parts(*found[level], c, n);
  for (int level = 0; level < count; ++level)
    for (size_t n : {1, 31, 64, 129, 300})
      for (size_t shift : {0, 1, 30})
        for (const Case& c : CASES) check_beside(*found[level], c, n, shift);
  std::printf("%d instruction sets agree with the scalar kernels\n", count - 1);
}
