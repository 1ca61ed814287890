// Chooses the instruction set at run time.
#include <cstring>

#include "kernels/kernels.h"

namespace unbounded {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

}  // namespace

const Kernels* choose_kernels(const char* wanted) {
  const Kernels* available[3] = {};
  int count = 0;
#if defined(__x86_64__)
  if (has_avx512()) available[count++] = &avx512_kernels();
  if (has_avx2()) available[count++] = &avx2_kernels();
#elif defined(__aarch64__)
  available[count++] = &neon_kernels();
#endif
  available[count++] = &scalar_kernels();
  for (int i = 0; i < count; ++i)
    if (!wanted || !*wanted || !std::strcmp(wanted, available[i]->name)) return available[i];
  return nullptr;
}

}  // namespace unbounded
