// How an update walks over states whose elements are independent: in place, or from old arrays to new ones.
//
// New arrays are written past the caches: a cache would read a line before it is written, 12 bytes more per parameter in
// the exact format. Whole lines only go that way, so a few elements are stepped into memory that stays in the first
// cache, and leave it line by line. More of them at a time are slower: loads then wait while stores leave. Where there is no
// such way, or the processor takes it by itself, new arrays are written as old ones are. New weights that nobody
// wants (null, next to a copy in another dtype) end in that first cache.
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd/vector_scalar.h"

namespace unbounded {
namespace {

inline constexpr size_t LINE_BYTES = 64, LINE = 16;  // LINE: elements of a cache line in fp32
inline constexpr size_t GROUP = 2 * LINE;            // a whole line also where an element has two bytes

// Bytes per element of the states, 0 for those that a rule does not keep.
struct Widths {
  size_t weight, remainder, first, second;
};

// The new states of a group on their way to memory.
struct Outgoing {
  alignas(LINE_BYTES) char weight[GROUP * 4], remainder[GROUP * 2], first[GROUP * 4], second[GROUP * 4];
  States states() { return {weight, remainder, first, nullptr, second, nullptr}; }
};

// Writes `num` elements to their place, or nowhere. Where they are not whole lines, they are copied.
template <class V>
[[gnu::always_inline]] inline void send(void* array, const char* from, size_t i, size_t num, size_t width) {
  if (!array) return;
  char* to = static_cast<char*>(array) + i * width;
  if constexpr (V::streams) {
    if (num == GROUP && uintptr_t(to) % LINE_BYTES == 0) {
      for (size_t k = 0; k < GROUP * width; k += LINE_BYTES) V::stream_line(to + k, from + k);
      return;
    }
  }
  __builtin_memcpy(to, from, num * width);
}

// Runs `body<W>(i, to, k)` over [begin, end): it steps the old states at i and writes the new ones to place k of `to`.
// A line of elements at a time, with `ahead(i)` before it.
template <class V, class Ahead, class Body>
[[gnu::always_inline]] inline void sweep_states(const Update& u, const Widths& widths, size_t begin,
                                                size_t end, Ahead ahead, Body body) {
  const auto line = [&](size_t i, const States& to, size_t place) __attribute__((always_inline)) {
    ahead(i);
#pragma GCC unroll 4
    for (size_t k = 0; k < LINE; k += V::width) body.template operator()<V>(i + k, to, place + k);
  };
  size_t i = begin;
  const bool drops = u.part == Part::weights && !u.is_in_place();
  if (V::streams ? !u.is_in_place() : drops) {
    Outgoing out;
    const States to = out.states();
    const auto leave = [&](size_t num) __attribute__((always_inline)) {
      send<V>(u.weight, out.weight, i, num, widths.weight), send<V>(u.remainder, out.remainder, i, num, widths.remainder);
      send<V>(u.first, out.first, i, num, widths.first), send<V>(u.second, out.second, i, num, widths.second);
    };
    for (; i + GROUP <= end; i += GROUP) line(i, to, 0), line(i + LINE, to, LINE), leave(GROUP);
    for (; drops && i < end; ++i) body.template operator()<Scalar>(i, to, 0), leave(1);
    if constexpr (V::streams) V::finish_streams();
  }
  for (; i + LINE <= end; i += LINE) line(i, u, i);
  for (; i < end; ++i) body.template operator()<Scalar>(i, u, i);
}

}  // namespace
}  // namespace unbounded
