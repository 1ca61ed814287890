// The checksums of one block, in slices that any thread may take.
//
// They are no part of moving the block. What is written is summed while it is on its way, and what was read while the
// next blocks are: the disk never waits for a checksum, and several threads share the last block of a transfer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "disk/transfer.h"

namespace unbounded::disk {

// Bytes of one run. `carry_out` records their checksums (a write) or compares them (a read), and completes the part.
struct Slice {
  std::shared_ptr<Transfer> transfer;
  std::size_t run;
  std::uint64_t start, end;  // within the run

  void carry_out() const;

 private:
  std::uint32_t checksum(std::uint64_t at) const;
};

class Check {
 public:
  // [start, end) of a run that has checksums; `start` is on a grain of them.
  Check(std::shared_ptr<Transfer> transfer, std::size_t run, std::uint64_t start, std::uint64_t end);

  std::size_t num_left() const;
  // The next slice; call it only if some are left.
  Slice take();

 private:
  std::shared_ptr<Transfer> transfer_;
  std::size_t run_;
  std::uint64_t next_, end_, slice_bytes_;
};

}  // namespace unbounded::disk
