// The update rules, each one step on fp32 values in registers.
//
// They read like the formulas of torch.optim and keep its order of operations; a product is fused with
// a sum where `fma` says so and nowhere else.
// What depends on the step alone is resolved once, in double, into `Step`.
#pragma once

#include "vector_scalar.h"

namespace unbounded {

enum class Rule : int32_t { adamw = 0, adam = 1, sgd = 2, lion = 3, adagrad = 4 };

struct Step {
  Rule rule;
  bool nesterov, has_momentum, first_step;
  float lr;             // adagrad: after its decay
  float keep;           // 1 - lr * weight_decay: decoupled decay
  float decay;          // weight_decay added to the gradient: L2
  float beta1, beta2;
  float rest1, rest2;   // 1 - beta1, 1 - beta2
  float step_size;      // adam: lr * sqrt(1 - beta2^t) / (1 - beta1^t)
  float eps;            // adam: eps * sqrt(1 - beta2^t)
  float momentum, undamped;  // sgd: undamped = 1 - dampening
};

namespace {

// A rule steps one vector of fp32 values: weight, gradient, first moment (exp_avg, momentum_buffer) and second moment
// (exp_avg_sq, sum); `first` and `second` say which moments it keeps.

// Of the bias-corrected quotient, (m / c1) / (sqrt(v) / sqrt(c2) + eps), the corrections are in step_size and eps.
template <bool decoupled> struct Adam {
  static constexpr bool first = true, second = true;
  template <class W, class F> static void step(const Step& s, F& w, F g, F& m, F& v) {
    if (decoupled)
      w = w * W::all(s.keep);
    else if (s.decay != 0)
      g = W::fma(W::all(s.decay), w, g);
    m = W::fma(W::all(s.rest1), g - m, m);
    v = W::fma(W::all(s.rest2) * g, g, W::all(s.beta2) * v);
    w = W::fnma(W::all(s.step_size), m / (W::sqrt(v) + W::all(s.eps)), w);
  }
};

struct Sgd {
  static constexpr bool first = false, second = false;
  template <class W, class F> static void step(const Step& s, F& w, F g, F&, F&) {
    if (s.decay != 0) g = W::fma(W::all(s.decay), w, g);
    w = W::fnma(W::all(s.lr), g, w);
  }
};

struct SgdMomentum {
  static constexpr bool first = true, second = false;
  template <class W, class F> static void step(const Step& s, F& w, F g, F& m, F&) {
    if (s.decay != 0) g = W::fma(W::all(s.decay), w, g);
    m = s.first_step ? g : W::fma(W::all(s.undamped), g, W::all(s.momentum) * m);
    w = W::fnma(W::all(s.lr), s.nesterov ? W::fma(W::all(s.momentum), m, g) : m, w);
  }
};

// -1, 0 or 1; a NaN stays one.
template <class W, class F> inline F sign(F a) {
  const auto bits = W::bits(a), magnitude = bits & W::all(0x7fffffff);
  const auto one = W::pick(W::all(0x80000000u), bits, W::all(0x3f800000));
  const auto finite = W::select(W::greater(magnitude, W::all(0)), one, bits);
  return W::floats(W::select(W::greater(magnitude, W::all(0x7f800000)), bits, finite));
}

struct Lion {
  static constexpr bool first = true, second = false;
  template <class W, class F> static void step(const Step& s, F& w, F g, F& m, F&) {
    const auto c = W::fma(W::all(s.rest1), g, W::all(s.beta1) * m);
    w = W::fnma(W::all(s.lr), sign<W>(c), w * W::all(s.keep));
    m = W::fma(W::all(s.rest2), g, W::all(s.beta2) * m);
  }
};

struct Adagrad {
  static constexpr bool first = false, second = true;
  template <class W, class F> static void step(const Step& s, F& w, F g, F&, F& v) {
    if (s.decay != 0) g = W::fma(W::all(s.decay), w, g);
    v = W::fma(g, g, v);
    w = W::fnma(W::all(s.lr), g / (W::sqrt(v) + W::all(s.eps)), w);
  }
};

// Calls body(rule) with the rule of the step as a type.
template <class Body> inline void with_rule(const Step& s, Body body) {
  switch (s.rule) {
    case Rule::adamw: return body(Adam<true>{});
    case Rule::adam: return body(Adam<false>{});
    case Rule::sgd: return s.has_momentum ? body(SgdMomentum{}) : body(Sgd{});
    case Rule::lion: return body(Lion{});
    case Rule::adagrad: return body(Adagrad{});
  }
}

}  // namespace
}  // namespace unbounded
