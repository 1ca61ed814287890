// The update rules, each one step on fp32 values in registers.
//
// They read like the formulas of torch.optim and keep its order of operations; a product is fused with
// a sum only where `fma` says so.
// What depends only on the step is resolved once, in double, into `Step`.
#pragma once

#include "kernels/simd/vector_scalar.h"

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

// A rule steps one vector of fp32 values in parts, so that a kernel can let other work pass between them:
//   advance   the moments, from the gradient; returns the direction, or its numerator if the rule divides
//   (root, quotient: below, the same for all rules that divide)
//   apply     the direction to the weight
// `first` (exp_avg, momentum_buffer) and `second` (exp_avg_sq, sum) say which moments it keeps, `couples` whether
// advance looks at the weight.

template <class W, class F> inline F coupled(const Step& s, F w, F g) {
  return s.decay != 0 ? W::fma(W::all(s.decay), w, g) : g;
}

// Of the bias-corrected quotient, (m / c1) / (sqrt(v) / sqrt(c2) + eps), the corrections are in step_size and eps.
template <bool decoupled> struct Adam {
  static constexpr bool first = true, second = true, divides = true, couples = !decoupled;
  template <class W, class F> static F advance(const Step& s, F w, F g, F& m, F& v) {
    if (!decoupled) g = coupled<W>(s, w, g);
    m = W::fma(W::all(s.rest1), g - m, m);
    v = W::fma(W::all(s.rest2) * g, g, W::all(s.beta2) * v);
    return m;
  }
  template <class W, class F> static F apply(const Step& s, F w, F direction) {
    return W::fnma(W::all(s.step_size), direction, decoupled ? w * W::all(s.keep) : w);
  }
};

struct Sgd {
  static constexpr bool first = false, second = false, divides = false, couples = true;
  template <class W, class F> static F advance(const Step& s, F w, F g, F&, F&) { return coupled<W>(s, w, g); }
  template <class W, class F> static F apply(const Step& s, F w, F g) { return W::fnma(W::all(s.lr), g, w); }
};

struct SgdMomentum {
  static constexpr bool first = true, second = false, divides = false, couples = true;
  template <class W, class F> static F advance(const Step& s, F w, F g, F& m, F&) {
    g = coupled<W>(s, w, g);
    m = s.first_step ? g : W::fma(W::all(s.undamped), g, W::all(s.momentum) * m);
    return s.nesterov ? W::fma(W::all(s.momentum), m, g) : m;
  }
  template <class W, class F> static F apply(const Step& s, F w, F m) { return W::fnma(W::all(s.lr), m, w); }
};

// -1, 0 or 1; a NaN stays one.
template <class W, class F> inline F sign(F a) {
  const auto bits = W::bits(a), magnitude = bits & W::all(0x7fffffff);
  const auto one = W::pick(W::all(0x80000000u), bits, W::all(0x3f800000));
  const auto finite = W::select(W::greater(magnitude, W::all(0)), one, bits);
  return W::floats(W::select(W::greater(magnitude, W::all(0x7f800000)), bits, finite));
}

struct Lion {
  static constexpr bool first = true, second = false, divides = false, couples = false;
  template <class W, class F> static F advance(const Step& s, F, F g, F& m, F&) {
    const auto c = W::fma(W::all(s.rest1), g, W::all(s.beta1) * m);
    m = W::fma(W::all(s.rest2), g, W::all(s.beta2) * m);
    return sign<W>(c);
  }
  template <class W, class F> static F apply(const Step& s, F w, F direction) {
    return W::fnma(W::all(s.lr), direction, w * W::all(s.keep));
  }
};

struct Adagrad {
  static constexpr bool first = false, second = true, divides = true, couples = true;
  template <class W, class F> static F advance(const Step& s, F w, F g, F&, F& v) {
    g = coupled<W>(s, w, g);
    v = W::fma(g, g, v);
    return g;
  }
  template <class W, class F> static F apply(const Step& s, F w, F direction) {
    return W::fnma(W::all(s.lr), direction, w);
  }
};

// What a rule that divides divides by.
template <class W, class F> inline F root(const Step& s, F v) { return W::sqrt(v) + W::all(s.eps); }

// All parts together; returns the new weight.
template <class W, class R, class F> inline F step(const Step& s, F w, F g, F& m, F& v) {
  const auto numerator = R::template advance<W>(s, w, g, m, v);
  return R::template apply<W>(s, w, R::divides ? numerator / root<W>(s, v) : numerator);
}

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
