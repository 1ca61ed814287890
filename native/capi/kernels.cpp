// C ABI of the kernels: pointers, sizes and codes in, threads from a pool handle. Arguments are checked by the caller.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "kernels/kernels.h"
#include "kernels/packed.h"
#include "kernels/pool.h"

using namespace unbounded;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Mirrored by UpdateArguments in unbounded/native/kernels.py.
struct UpdateArguments {
  int32_t rule, format, weight_type, grad_type, out_type, nesterov, maximize, part;
  int64_t numel, step;
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, grad_scale;
  void *weight, *grad, *remainder, *first, *first_scale, *second, *second_scale, *out;
};

namespace {

constexpr size_t CHUNK = 128 * BLOCK;  // elements a thread takes at a time; fixed, so that sums never depend on threads

// What a handle stands for: threads, and the instruction set that they use.
struct Crew {
  Pool pool;
  const Kernels& kernels;
};

const Kernels& kernels_of(void* pool) { return static_cast<Crew*>(pool)->kernels; }

// Runs body(begin, end) over chunks of [0, n).
template <class Body> void parallel(void* pool, int64_t n, Body body, size_t chunk_numel = CHUNK) {
  struct Context {
    Body& body;
    size_t n, chunk_numel;
  } context{body, size_t(n), chunk_numel};
  const auto chunk = [](void* opaque, int64_t i) {
    auto& c = *static_cast<Context*>(opaque);
    const size_t begin = size_t(i) * c.chunk_numel, end = std::min(begin + c.chunk_numel, c.n);
    c.body(begin, end);
  };
  static_cast<Crew*>(pool)->pool.run(int64_t((size_t(n) + chunk_numel - 1) / chunk_numel), chunk, &context);
}

// Elements of an update that a thread takes at a time. Larger than CHUNK if every thread still gets turns: each
// turn starts on memory that is not in any cache yet and ends by fetching what another thread will use, for all of an
// update's arrays. Turns of CHUNK took a fifth longer.
size_t update_chunk(void* pool, int64_t n) {
  const size_t turns = 8 * size_t(static_cast<Crew*>(pool)->pool.num_threads());
  return CHUNK * std::clamp<size_t>(size_t(n) / (turns * CHUNK), 1, 16);
}

size_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }

// Adds up what `part(begin, end)` gives for chunks, computed in parallel, in their order; NaN if there is no memory for that.
template <class Part> double sum_of_chunks(void* pool, int64_t n, Part part) {
  const size_t count = (size_t(n) + CHUNK - 1) / CHUNK;
  double* parts = static_cast<double*>(std::calloc(count + 1, sizeof(double)));
  parallel(pool, n, [&](size_t begin, size_t end) {
    const double found = part(begin, end);
    if (parts) parts[begin / CHUNK] = found;
  });
  if (!parts) return std::nan("");
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += parts[i];
  std::free(parts);
  return sum;
}

// Random bits for a place in a block at a step.
int32_t salt_of(int64_t step, size_t place) {
  uint64_t h = (uint64_t(step) * BLOCK + place + 1) * 0x9e3779b97f4a7c15u;
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9u;
  h = (h ^ h >> 27) * 0x94d049bb133111ebu;
  return int32_t(uint32_t(h >> 32));
}

Step resolve(const UpdateArguments& a) {
  const Rule rule = Rule(a.rule);
  const double t = double(a.step);
  const bool decoupled = rule == Rule::adamw || rule == Rule::lion;
  Step s{};
  s.rule = rule;
  s.nesterov = a.nesterov;
  s.has_momentum = a.momentum != 0;
  s.first_step = a.step == 1;
  s.lr = float(rule == Rule::adagrad ? a.lr / (1 + (t - 1) * a.lr_decay) : a.lr);
  s.keep = float(1 - a.lr * a.weight_decay);
  s.decay = float(decoupled ? 0 : a.weight_decay);
  s.beta1 = float(a.beta1), s.beta2 = float(a.beta2);
  s.rest1 = float(1 - a.beta1), s.rest2 = float(1 - a.beta2);
  s.eps = float(a.eps);
  s.momentum = float(a.momentum), s.undamped = float(1 - a.dampening);
  if (rule == Rule::adamw || rule == Rule::adam) {
    const double root = std::sqrt(1 - std::pow(a.beta2, t));
    s.step_size = float(a.lr * root / (1 - std::pow(a.beta1, t)));
    s.eps = float(a.eps * root);
  }
  return s;
}

States states_of(const UpdateArguments& a) {
  return {a.weight, a.remainder,
          a.first,  static_cast<float*>(a.first_scale),
          a.second, static_cast<float*>(a.second_scale)};
}

Update update_of(const UpdateArguments& a, const UpdateArguments& old) {
  Update u{};
  static_cast<States&>(u) = states_of(a);
  u.old = states_of(old);
  u.step = resolve(a);
  u.format = Format(a.format);
  u.weight_type = DType(a.weight_type), u.grad_type = DType(a.grad_type), u.out_type = DType(a.out_type);
  u.grad_scale = float(a.maximize ? -a.grad_scale : a.grad_scale);
  for (size_t i = 0; i < BLOCK; ++i) u.salt[i] = salt_of(a.step, i);
  u.grad = a.grad, u.out = a.out;
  u.part = Part(a.part);
  if (u.part == Part::weights && &a != &old)  // new weights alone: of both copies, the one that is computed with
    static_cast<States&>(u) = {a.out ? nullptr : a.weight, nullptr, nullptr, nullptr, nullptr, nullptr};
  return u;
}

}  // namespace

// The name of the instruction set that `wanted` (or an empty string: the best) gives here; null where there is none.
EXPORT const char* unbounded_simd(const char* wanted) {
  const Kernels* found = choose_kernels(wanted);
  return found ? found->name : nullptr;
}

// Null if the threads cannot be started or the instruction set is not there.
EXPORT void* unbounded_pool_create(int num_threads, const char* simd) {
  const Kernels* found = choose_kernels(simd);
  try {
    return found ? new Crew{Pool(num_threads), *found} : nullptr;
  } catch (...) {
    return nullptr;
  }
}
EXPORT void unbounded_pool_close(void* pool) { delete static_cast<Crew*>(pool); }

// Reads the old states from `old`, which stay as they are; if that is `a` itself, they are updated in place.
EXPORT void unbounded_update_beside(void* pool, const UpdateArguments* a, const UpdateArguments* old) {
  const Update u = update_of(*a, *old);
  const auto update = [&](size_t begin, size_t end) { kernels_of(pool).update(u, begin, end); };
  parallel(pool, a->numel, update, update_chunk(pool, a->numel));
}

EXPORT void unbounded_update(void* pool, const UpdateArguments* a) { unbounded_update_beside(pool, a, a); }

EXPORT double unbounded_sum_squares(void* pool, const void* x, int32_t type, int64_t n) {
  const size_t bytes = size_of(DType(type));
  return sum_of_chunks(pool, n, [&](size_t begin, size_t end) {
    const void* part = static_cast<const char*>(x) + begin * bytes;
    return kernels_of(pool).sum_squares(part, DType(type), end - begin);
  });
}

EXPORT void unbounded_convert(void* pool, const void* from, int32_t from_type, void* to, int32_t to_type, int64_t n) {
  const size_t from_bytes = size_of(DType(from_type)), to_bytes = size_of(DType(to_type));
  parallel(pool, n, [&](size_t begin, size_t end) {
    kernels_of(pool).convert(static_cast<const char*>(from) + begin * from_bytes, DType(from_type),
                      static_cast<char*>(to) + begin * to_bytes, DType(to_type), end - begin);
  });
}

// Returns the sum of squares of what is in `to` then.
EXPORT double unbounded_add(void* pool, void* to, int32_t to_type, const void* held, int32_t held_type,
                            const void* fresh, int32_t fresh_type, int64_t n) {
  const size_t to_bytes = size_of(DType(to_type));
  const size_t held_bytes = size_of(DType(held_type)), fresh_bytes = size_of(DType(fresh_type));
  return sum_of_chunks(pool, n, [&](size_t begin, size_t end) {
    return kernels_of(pool).add(static_cast<char*>(to) + begin * to_bytes, DType(to_type),
                                static_cast<const char*>(held) + begin * held_bytes, DType(held_type),
                                static_cast<const char*>(fresh) + begin * fresh_bytes, DType(fresh_type), end - begin);
  });
}

EXPORT void unbounded_split(void* pool, const float* master, void* weight, int16_t* remainder, int64_t n) {
  parallel(pool, n, [&](size_t begin, size_t end) {
    kernels_of(pool).split(master + begin, static_cast<Bf16*>(weight) + begin, remainder + begin, end - begin);
  });
}

EXPORT void unbounded_join(void* pool, const void* weight, const int16_t* remainder, float* master, int64_t n) {
  parallel(pool, n, [&](size_t begin, size_t end) {
    kernels_of(pool).join(static_cast<const Bf16*>(weight) + begin, remainder + begin, master + begin, end - begin);
  });
}

EXPORT void unbounded_encode_weight(void* pool, const float* master, void* weight, int32_t type, int8_t* remainder,
                                    int64_t n) {
  const Master to{DType(type), weight, remainder};
  parallel(pool, n, [&](size_t begin, size_t end) { kernels_of(pool).encode_weight(master, to, begin, end - begin); });
}

EXPORT void unbounded_decode_weight(void* pool, void* weight, int32_t type, int8_t* remainder, float* master,
                                    int64_t n) {
  const Master from{DType(type), weight, remainder};
  parallel(pool, n, [&](size_t begin, size_t end) { kernels_of(pool).decode_weight(from, master, begin, end - begin); });
}

EXPORT void unbounded_encode_moment(void* pool, const float* x, int32_t moment, void* codes, float* scales,
                                    int64_t n) {
  const Codes to{Moment(moment), codes, scales};
  parallel(pool, n, [&](size_t begin, size_t end) { kernels_of(pool).encode_moment(x, to, begin, end - begin); });
}

EXPORT void unbounded_decode_moment(void* pool, int32_t moment, void* codes, float* scales, float* x, int64_t n) {
  const Codes from{Moment(moment), codes, scales};
  parallel(pool, n, [&](size_t begin, size_t end) { kernels_of(pool).decode_moment(from, x, begin, end - begin); });
}

EXPORT void unbounded_copy(void* pool, const void* from, void* to, int64_t bytes) {
  parallel(pool, (bytes + 15) / 16, [&](size_t begin, size_t end) {
    const size_t first = begin * 16, last = end * 16 < size_t(bytes) ? end * 16 : size_t(bytes);
    std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, last - first);
  });
}

// Packs n weights into records, the last one perhaps in part.
EXPORT void unbounded_pack(void* pool, const uint16_t* weights, uint8_t* records, int64_t n) {
  const auto pack = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; i += PACKED)
      pack_record(weights + i, std::min(PACKED, end - i), records + i / PACKED * RECORD_BYTES);
  };
  parallel(pool, n, pack, 16 * PACKED);
}

// Writes the n weights of records that follow the first `skip` ones, less than a record.
EXPORT void unbounded_unpack(void* pool, const uint8_t* records, uint16_t* weights, int64_t skip, int64_t n) {
  const auto unpack = [&](size_t begin, size_t end) {
    for (size_t i = std::max(begin, size_t(skip)); i < end;) {
      const size_t inside = i % PACKED, count = std::min(PACKED - inside, end - i);
      unpack_record(records + i / PACKED * RECORD_BYTES, weights + (i - size_t(skip)), inside, count);
      i += count;
    }
  };
  parallel(pool, skip + n, unpack, 16 * PACKED);
}
