#include "disk/block.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "checksum/crc32c.h"

namespace unbounded::disk {

namespace {

constexpr std::uint64_t kSliceBytes = 1 << 20;  // a tenth of a millisecond
constexpr char kZeros[kAlignment] = {};
const std::uint32_t kSumOfZeros = crc32c(kZeros, kAlignment, 0);

constexpr int kMaxRetries = 1000;  // a millisecond apart for EAGAIN: about a second

std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
std::uint64_t round_down(std::uint64_t value, std::uint64_t multiple) { return value / multiple * multiple; }

void cut(std::vector<Piece>& pieces, Mode mode, std::uint64_t start, std::uint64_t end, std::size_t block_bytes) {
  for (std::uint64_t at = start; at < end; at += block_bytes) {
    std::uint64_t length = std::min<std::uint64_t>(block_bytes, end - at);
    pieces.push_back({mode, at, length, length});
  }
}

}  // namespace

std::vector<Piece> split(const Run& run, bool direct, std::size_t block_bytes) {
  std::vector<Piece> pieces;
  if (!direct) {
    cut(pieces, Mode::buffered, 0, run.length, block_bytes);
    return pieces;
  }
  std::uint64_t head = std::min(round_up(run.offset, kAlignment) - run.offset, run.length);
  std::uint64_t body_end = head + round_down(run.length - head, kAlignment);
  bool aligned = reinterpret_cast<std::uintptr_t>(run.data + head) % kAlignment == 0;
  cut(pieces, Mode::buffered, 0, head, block_bytes);
  cut(pieces, aligned ? Mode::direct : Mode::bounced, head, body_end, block_bytes);
  std::uint64_t tail = run.length - body_end;
  if (tail == 0) return pieces;
  if (run.padded && head == 0 && !pieces.empty() && pieces.back().length + kAlignment <= block_bytes) {
    // Joined with the last piece: one transfer less.
    pieces.back().length += tail;
    pieces.back().io_length += kAlignment;
  } else if (run.padded && head == 0) {
    pieces.push_back({Mode::bounced, body_end, tail, kAlignment});
  } else {
    pieces.push_back({Mode::buffered, body_end, tail, tail});
  }
  return pieces;
}

Bounce::~Bounce() { std::free(data_); }

Bounce::Bounce(Bounce&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

char* Bounce::reserve(std::size_t bytes) {
  if (bytes <= bytes_) return data_;
  std::free(data_);
  data_ = static_cast<char*>(std::aligned_alloc(kAlignment, round_up(bytes, kAlignment)));
  bytes_ = data_ == nullptr ? 0 : bytes;
  return data_;
}

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
  slice_bytes_ = round_up(kSliceBytes, transfer_->runs()[run].grain);
}

std::size_t Check::num_left() const { return (end_ - next_ + slice_bytes_ - 1) / slice_bytes_; }

Slice Check::take() {
  std::uint64_t start = next_;
  next_ = std::min(next_ + slice_bytes_, end_);
  return {transfer_, run_, start, next_};
}

Block::Block(std::shared_ptr<Transfer> transfer, std::size_t run, const Piece& piece)
    : transfer_(std::move(transfer)), run_(run), piece_(piece) {
  if (this->run().sums != nullptr) check_.emplace_back(transfer_, run_, piece_.start, piece_.start + piece_.length);
}

std::size_t Block::num_parts() const { return 1 + (check_.empty() ? 0 : check_.front().num_left()); }

bool Block::prepare(Bounce& bounce) {
  transfer_->start();
  std::uint64_t straight = num_straight();
  if (straight == piece_.io_length) return true;
  bounce_ = bounce.reserve(piece_.io_length - straight);
  if (bounce_ == nullptr) return fail(ENOMEM);
  if (operation() == Operation::write) {
    std::memcpy(bounce_, memory() + straight, piece_.length - straight);
    std::memset(bounce_ + (piece_.length - straight), 0, piece_.io_length - piece_.length);
  }
  return true;
}

std::uint64_t Block::num_straight() const {
  if (piece_.mode == Mode::bounced) return 0;
  return piece_.io_length == piece_.length ? piece_.length : round_down(piece_.length, kAlignment);
}

Request Block::request() {
  is_direct_ = piece_.mode != Mode::buffered && run().file->direct();
  Request request{run().file->descriptor(is_direct_), {}, 0, run().offset + piece_.start + moved_};
  std::uint64_t straight = num_straight();
  if (moved_ < straight)
    request.parts[request.num_parts++] = {memory() + moved_, static_cast<std::size_t>(straight - moved_)};
  std::uint64_t bounced = std::max(moved_, straight);
  if (bounced < piece_.io_length)
    request.parts[request.num_parts++] = {bounce_ + (bounced - straight), static_cast<std::size_t>(piece_.io_length - bounced)};
  return request;
}

bool Block::advance(std::int64_t result) {
  if (result < 0) return retry(static_cast<int>(-result));
  // The end of a file cuts a direct read at any byte; going on from there needs an aligned offset again.
  std::uint64_t progress = static_cast<std::uint64_t>(result);
  if (is_direct_ && progress < piece_.io_length - moved_) progress = round_down(progress, kAlignment);
  moved_ += progress;
  if (moved_ == piece_.io_length) return false;
  if (progress > 0) return true;
  if (operation() == Operation::read && moved_ + static_cast<std::uint64_t>(result) >= piece_.length) {
    moved_ = piece_.io_length;  // the caller's bytes are there; only padding was past the end
    return false;
  }
  if (operation() == Operation::write) return fail(result == 0 ? ENOSPC : EIO);
  fail(kShortRead);
  failed_at_ += static_cast<std::uint64_t>(result);
  return false;
}

bool Block::retry(int code) {
  if (code == EINVAL && is_direct_) {
    run().file->refuse_direct();
    return true;
  }
  bool again = code == EINTR || code == EAGAIN;
  if (!again || ++num_retries_ > kMaxRetries) return fail(code);
  if (code == EAGAIN) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return true;
}

bool Block::fail(int code) {
  code_ = code;
  failed_at_ = moved_;
  return false;
}

void Block::abandon(int code) {
  fail(code);
  finish();
}

void Block::land() {
  if (!is_moved() || operation() == Operation::write || bounce_ == nullptr) return;
  std::uint64_t straight = num_straight();
  std::memcpy(memory() + straight, bounce_, piece_.length - straight);
}

void Block::finish() {
  Failure failure{code_, run_, run().offset + piece_.start + failed_at_, piece_.length - std::min(failed_at_, piece_.length)};
  transfer_->complete(failure, num_parts());
}

}  // namespace unbounded::disk
