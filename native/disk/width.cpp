#include "disk/width.h"

#include <algorithm>

namespace unbounded::disk {

namespace {
constexpr unsigned kStart = 2;         // level with the best on every disk measured, or close to it
constexpr double kClearlyFaster = 1.04;
}  // namespace

Width::Width(unsigned limit, std::uint64_t window_bytes)
    : limit_(std::max(1u, limit)), window_bytes_(window_bytes), width_(std::min(kStart, limit_)) {}

void Width::restart(std::uint64_t lane_bytes, std::uint64_t device_bytes, std::int64_t now_ns) {
  counting_ = true;
  start_lane_ = lane_bytes;
  start_device_ = device_bytes;
  start_ns_ = now_ns;
}

void Width::completed(std::uint64_t lane_bytes, std::uint64_t device_bytes, std::int64_t now_ns, bool waiting) {
  if (!waiting) {  // the caller, not the disk, sets the pace: nothing can be learned
    counting_ = trying_ = false;
    num_rates_ = 0;
    num_skipped_ = 0;
    return;
  }
  if (!counting_) {
    // What was in flight under the width before belongs to no window.
    if (++num_skipped_ > std::max(width_, other_)) restart(lane_bytes, device_bytes, now_ns);
    return;
  }
  if (lane_bytes - start_lane_ < window_bytes_ || now_ns <= start_ns_) return;
  double rate = static_cast<double>(device_bytes - start_device_) / static_cast<double>(now_ns - start_ns_);
  unsigned before = now();
  window_ended(rate);
  if (now() != before) {
    counting_ = false;
    num_skipped_ = 0;
  } else {
    restart(lane_bytes, device_bytes, now_ns);
  }
}

void Width::window_ended(double rate) {
  if (num_rates_ == 0) {
    if (++num_settled_ < patience_) return;
    choose_other();
    if (other_ == width_) return;
  }
  rates_[num_rates_++] = rate;
  trying_ = num_rates_ % 2 == 1;
  if (num_rates_ == kNumWindows) decide();
}

void Width::choose_other() {
  num_settled_ = 0;
  other_ = widen_ ? std::min(limit_, width_ * 2) : std::max(1u, width_ / 2);
  if (other_ == width_) {
    widen_ = !widen_;
    other_ = widen_ ? std::min(limit_, width_ * 2) : std::max(1u, width_ / 2);
  }
}

void Width::decide() {
  double now = (rates_[0] + rates_[2] + rates_[4]) / 3, other = (rates_[1] + rates_[3]) / 2;
  bool faster = other > now * kClearlyFaster && std::min(rates_[1], rates_[3]) > now;
  if (faster) {
    width_ = other_;
    patience_ = kFirstPatience;
  } else {
    widen_ = !widen_;
    patience_ = std::min(patience_ * 2, kMaxPatience);
  }
  trying_ = false;
  num_rates_ = 0;
}

}  // namespace unbounded::disk
