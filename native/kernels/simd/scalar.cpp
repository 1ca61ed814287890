// The specification: every kernel, one element at a time.
#include "kernels/table.h"

namespace unbounded {

const Kernels& scalar_kernels() {
  static constexpr Kernels kernels = table<Scalar>("scalar");
  return kernels;
}

}  // namespace unbounded
