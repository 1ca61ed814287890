#include "disk/width.h"

#include <algorithm>

namespace unbounded::disk {

namespace {
constexpr unsigned kStart = 4;  // close to the best on every disk measured, idle or with busy cores
constexpr double kClearlyFaster = 1.06;
}  // namespace

Width::Width(unsigned limit, std::uint64_t window_bytes)
    : limit_(std::max(1u, limit)), window_bytes_(window_bytes), width_(std::min(kStart, limit_)) {
  other_ = width_;
}

void Width::restart(std::uint64_t lane_bytes, std::uint64_t device_bytes, std::int64_t now_ns) {
  counting_ = true;
  start_lane_ = lane_bytes;
  start_device_ = device_bytes;
  start_ns_ = now_ns;
}

void Width::skip() {
  counting_ = false;
  num_skipped_ = 0;
}

// The caller, not the disk, sets the pace: the window starts again. A width that is never filled would never be
// measured again, so after a while it is given up.
void Width::starve() {
  skip();
  if (++num_starved_ < 2 * std::max(width_, other_)) return;
  num_starved_ = 0;
  num_rates_ = 0;
  if (!trying_ && width_ > kStart) width_ /= 2;
  trying_ = false;
}

void Width::completed(std::uint64_t lane_bytes, std::uint64_t device_bytes, std::int64_t now_ns, std::size_t num_left) {
  if (num_left == 0 || num_left * 4 < std::size_t{now()} * 3) return starve();
  if (!counting_) {
    // What was in flight under the earlier width belongs to no window.
    if (++num_skipped_ > std::max(width_, other_)) restart(lane_bytes, device_bytes, now_ns);
    return;
  }
  if (lane_bytes - start_lane_ < window_bytes_ || now_ns <= start_ns_) return;
  double rate = static_cast<double>(device_bytes - start_device_) / static_cast<double>(now_ns - start_ns_);
  unsigned before = now();
  window_ended(rate);
  if (now() != before) return skip();
  restart(lane_bytes, device_bytes, now_ns);
}

void Width::window_ended(double rate) {
  num_starved_ = 0;
  if (num_rates_ == 0) {
    if (limit_ == 1 || ++num_settled_ < patience_) return;
    choose_other();
  }
  rates_[num_rates_++] = rate;
  trying_ = num_rates_ % 2 == 1;
  if (num_rates_ == kNumWindows) decide();
}

// The next power of two in turn, from one up to the limit.
void Width::choose_other() {
  num_settled_ = 0;
  do {
    other_ = other_ * 2 <= limit_ ? other_ * 2 : 1;
  } while (other_ == width_);
}

void Width::decide() {
  double now = (rates_[0] + rates_[2] + rates_[4]) / 3, other = (rates_[1] + rates_[3]) / 2;
  bool faster = other > now * kClearlyFaster && std::min(rates_[1], rates_[3]) > now;
  if (faster) width_ = other_;
  // Trying costs time at a worse width, and noise looks like success now and then: trials soon become rare.
  patience_ = faster ? std::max(patience_ / 2, kFirstPatience) : std::min(patience_ * 2, kMaxPatience);
  trying_ = false;
  num_rates_ = 0;
}

}  // namespace unbounded::disk
