// What an instruction set offers: a table of functions over parts of flat buffers, without threads or allocation.
#pragma once

#include "kernels/formats/floats.h"
#include "kernels/rules.h"

namespace unbounded {

enum class Format : int32_t { fp32 = 0, exact = 1, compact = 2 };
enum class Moment : int32_t { first = 0, second = 1 };
// What an update writes: everything; the weights and what completes them; or the moments, which is what is left after that.
enum class Part : int32_t { whole = 0, weights = 1, moments = 2 };

// The states of an update; which pointers are used follows from the format and the rule.
struct States {
  void* weight;
  void* remainder;
  void* first;
  float* first_scale;
  void* second;
  float* second_scale;
};

// One fused update of whole buffers. It writes to the states that it is, and reads `old`: the same arrays, or others that
// have nothing in common with them and stay as they are.
struct Update : States {
  States old;
  Step step;
  Format format;
  DType weight_type, grad_type, out_type;
  float grad_scale;   // negative if the objective is maximised
  alignas(64) int32_t salt[BLOCK];  // of the stochastic rounding: random bits for every place in a block at this step
  const void* grad;
  void* out;          // null, or receives the weights of the fp32 format in out_type: bf16 or f16
  Part part;          // in place, and not in the compact format; or `weights` beside: then states that are null are dropped,
                      // and so are moments. `moments` is not for rules that add the weight to the gradient
  bool is_in_place() const { return weight == old.weight; }
};

// A master in `weight` and `remainder`, or a moment in codes and scales, next to its fp32 values.
struct Master {
  DType type;
  void* weight;
  int8_t* remainder;
};
struct Codes {
  Moment moment;
  void* codes;
  float* scales;
};

inline constexpr size_t SQUARE_LANES = 16;  // partial sums kept apart, whatever the width of the vectors

struct Kernels {
  const char* name;
  void (*update)(const Update&, size_t begin, size_t end);  // begin: a multiple of BLOCK
  double (*sum_squares)(const void* x, DType type, size_t n);
  void (*convert)(const void* from, DType from_type, void* to, DType to_type, size_t n);
  // to = held + fresh, in fp32; `to` may be `held`. Returns the sum of squares of `to`.
  double (*add)(void* to, DType to_type, const void* held, DType held_type, const void* fresh, DType fresh_type, size_t n);
  void (*split)(const float* master, Bf16* weight, int16_t* remainder, size_t n);
  void (*join)(const Bf16* weight, const int16_t* remainder, float* master, size_t n);
  void (*encode_weight)(const float* master, const Master& to, size_t begin, size_t n);
  void (*decode_weight)(const Master& from, float* master, size_t begin, size_t n);
  void (*encode_moment)(const float* x, const Codes& to, size_t begin, size_t n);
  void (*decode_moment)(const Codes& from, float* x, size_t begin, size_t n);
};

const Kernels& scalar_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& neon_kernels();

// The best instruction set that this machine has and `wanted` (a name, or empty) allows; null if there is none.
const Kernels* choose_kernels(const char* wanted);

}  // namespace unbounded
