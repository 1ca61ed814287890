// What the kernels' tests share: a check, random numbers, and buffers of exactly the size asked for.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels/formats/floats.h"
#include "kernels/kernels.h"

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

namespace unbounded {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint32_t bits() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return uint32_t(state_ >> 32);
  }
  float uniform() { return float(bits() >> 8) * 0x1p-24f; }
  float around_zero() { return (uniform() + uniform() + uniform() - 1.5f) * 2; }

 private:
  uint64_t state_;
};

// Bytes on the heap, neither more nor less, so that the address sanitizer sees one read too far.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes), data_(static_cast<char*>(std::calloc(bytes ? bytes : 1, 1))) {}
  Buffer(const Buffer& other) : Buffer(other.bytes_) { std::memcpy(data_.get(), other.data_.get(), bytes_); }
  void* data() const { return data_.get(); }
  template <class T> T* as() const { return reinterpret_cast<T*>(data_.get()); }
  bool operator==(const Buffer& other) const {
    return bytes_ == other.bytes_ && !std::memcmp(data_.get(), other.data_.get(), bytes_);
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  size_t bytes_;
  std::unique_ptr<char[], Free> data_;
};

// Every instruction set of this machine, the scalar one last.
inline int levels(const Kernels* (&found)[4]) {
  int count = 0;
  for (const char* name : {"avx512", "avx2", "neon", "scalar"})
    if (const Kernels* kernels = choose_kernels(name)) found[count++] = kernels;
  return count;
}

}  // namespace unbounded
