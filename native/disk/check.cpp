#include "disk/check.h"

#include <algorithm>
#include <utility>

#include "checksum/crc32c.h"

namespace unbounded::disk {

namespace {

constexpr std::uint64_t kSliceBytes = 1 << 20;  // a tenth of a millisecond
constexpr char kZeros[kAlignment] = {};
const std::uint32_t kSumOfZeros = crc32c(kZeros, kAlignment, 0);

}  // namespace

// For the grain at `at`; see Run for padded ones, whose grain is a page.
std::uint32_t Slice::checksum(std::uint64_t at) const {
  const Run& target = transfer->runs()[run];
  std::uint64_t length = std::min<std::uint64_t>(target.grain, end - at);
  std::uint32_t sum = crc32c(target.data + at, length, 0);
  if (!target.padded) return sum;
  if (length < kAlignment) sum = crc32c(kZeros, kAlignment - length, sum);
  return sum ^ kSumOfZeros;
}

void Slice::carry_out() const {
  const Run& target = transfer->runs()[run];
  bool is_write = transfer->operation() == Operation::write;
  Failure failure;
  for (std::uint64_t at = start; at < end; at += target.grain) {
    std::uint32_t& slot = target.sums[at / target.grain];
    std::uint32_t sum = checksum(at);
    if (is_write) slot = sum;
    if (slot == sum) continue;
    failure = {kChecksumMismatch, run, target.offset + at, end - at};
    break;
  }
  transfer->complete(failure);
}

Check::Check(std::shared_ptr<Transfer> transfer, std::size_t run, std::uint64_t start, std::uint64_t end)
    : transfer_(std::move(transfer)), run_(run), next_(start), end_(end) {
  std::uint64_t grain = transfer_->runs()[run].grain;
  slice_bytes_ = (kSliceBytes + grain - 1) / grain * grain;
}

std::size_t Check::num_left() const { return (end_ - next_ + slice_bytes_ - 1) / slice_bytes_; }

Slice Check::take() {
  std::uint64_t start = next_;
  next_ = std::min(next_ + slice_bytes_, end_);
  return {transfer_, run_, start, next_};
}

}  // namespace unbounded::disk
