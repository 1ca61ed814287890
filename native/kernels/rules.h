// The update rules, each one step on a tile of fp32 weights, gradients and moments.
//
// They read like the formulas of torch.optim and keep its order of operations; no product is fused with a sum.
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

struct Tile {
  float* weight;
  const float* grad;
  float* first;   // exp_avg or momentum_buffer
  float* second;  // exp_avg_sq or sum
};

// Of the bias-corrected quotient, (m / c1) / (sqrt(v) / sqrt(c2) + eps), the corrections are in step_size and eps.
template <class V> inline void adam(const Step& s, size_t n, const Tile& t, bool decoupled) {
  sweep<V>(n, [&]<class W>(size_t i) {
    auto w = W::load(t.weight + i), g = W::load(t.grad + i);
    auto m = W::load(t.first + i), v = W::load(t.second + i);
    if (decoupled)
      w = w * W::all(s.keep);
    else if (s.decay != 0)
      g = g + W::all(s.decay) * w;
    m = m + W::all(s.rest1) * (g - m);
    v = W::all(s.beta2) * v + (W::all(s.rest2) * g) * g;
    w = w - W::all(s.step_size) * (m / (W::sqrt(v) + W::all(s.eps)));
    W::store(t.weight + i, w), W::store(t.first + i, m), W::store(t.second + i, v);
  });
}

template <class V> inline void sgd_plain(const Step& s, size_t n, const Tile& t) {
  sweep<V>(n, [&]<class W>(size_t i) {
    auto w = W::load(t.weight + i), g = W::load(t.grad + i);
    if (s.decay != 0) g = g + W::all(s.decay) * w;
    W::store(t.weight + i, w - W::all(s.lr) * g);
  });
}

template <class V> inline void sgd_momentum(const Step& s, size_t n, const Tile& t) {
  sweep<V>(n, [&]<class W>(size_t i) {
    auto w = W::load(t.weight + i), g = W::load(t.grad + i);
    if (s.decay != 0) g = g + W::all(s.decay) * w;
    auto b = s.first_step ? g : W::all(s.momentum) * W::load(t.first + i) + W::all(s.undamped) * g;
    auto d = s.nesterov ? g + W::all(s.momentum) * b : b;
    W::store(t.weight + i, w - W::all(s.lr) * d), W::store(t.first + i, b);
  });
}

// -1, 0 or 1; a NaN stays one.
template <class W> inline auto sign(typename W::F a) {
  const auto bits = W::bits(a), magnitude = bits & W::all(0x7fffffff);
  const auto one = (bits & W::all(int32_t(0x80000000))) | W::all(0x3f800000);
  const auto finite = W::select(W::greater(magnitude, W::all(0)), one, bits);
  return W::floats(W::select(W::greater(magnitude, W::all(0x7f800000)), bits, finite));
}

template <class V> inline void lion(const Step& s, size_t n, const Tile& t) {
  sweep<V>(n, [&]<class W>(size_t i) {
    auto w = W::load(t.weight + i), g = W::load(t.grad + i), m = W::load(t.first + i);
    auto c = W::all(s.beta1) * m + W::all(s.rest1) * g;
    w = w * W::all(s.keep) - W::all(s.lr) * sign<W>(c);
    m = W::all(s.beta2) * m + W::all(s.rest2) * g;
    W::store(t.weight + i, w), W::store(t.first + i, m);
  });
}

template <class V> inline void adagrad(const Step& s, size_t n, const Tile& t) {
  sweep<V>(n, [&]<class W>(size_t i) {
    auto w = W::load(t.weight + i), g = W::load(t.grad + i), sum = W::load(t.second + i);
    if (s.decay != 0) g = g + W::all(s.decay) * w;
    sum = sum + g * g;
    w = w - W::all(s.lr) * (g / (W::sqrt(sum) + W::all(s.eps)));
    W::store(t.weight + i, w), W::store(t.second + i, sum);
  });
}

template <class V> inline void apply(const Step& s, size_t n, const Tile& t) {
  switch (s.rule) {
    case Rule::adamw: return adam<V>(s, n, t, true);
    case Rule::adam: return adam<V>(s, n, t, false);
    case Rule::sgd: return s.has_momentum ? sgd_momentum<V>(s, n, t) : sgd_plain<V>(s, n, t);
    case Rule::lion: return lion<V>(s, n, t);
    case Rule::adagrad: return adagrad<V>(s, n, t);
  }
}

}  // namespace
}  // namespace unbounded
