// How many blocks of one direction to keep in flight on a device.
//
// Disks and machines disagree: a virtual disk may read 3.9 GB/s with one block of 8 MiB in flight and less with
// eight; an array of NVMe drives needs many, and so does any disk while the cores are busy, since a completion then
// waits to be seen. So the width is found while working. A window is a stretch of completed bytes during which
// the caller kept the width filled; its rate counts both directions of the device, since a direction must not widen at
// the cost of the other. Now and then another power of two is tried in alternating windows (now, other, now, other,
// now) and is kept when it is clearly faster; one that the caller never fills is given up. Pure: time is passed in.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace unbounded::disk {

class Width {
 public:
  Width(unsigned limit, std::uint64_t window_bytes);

  unsigned now() const { return trying_ ? other_ : width_; }
  unsigned settled() const { return width_; }
  // After every block: bytes moved so far in this direction and on the whole device, and the number of blocks
  // left, in flight or waiting.
  void completed(std::uint64_t lane_bytes, std::uint64_t device_bytes, std::int64_t now_ns, std::size_t num_left);

 private:
  void restart(std::uint64_t lane_bytes, std::uint64_t device_bytes, std::int64_t now_ns);
  void skip();
  void starve();
  void window_ended(double rate);
  void choose_other();
  void decide();

  static constexpr std::size_t kNumWindows = 5;
  static constexpr unsigned kFirstPatience = 2, kMaxPatience = 64;

  const unsigned limit_;
  const std::uint64_t window_bytes_;
  unsigned width_;
  unsigned other_ = 0;         // the one tried last
  bool trying_ = false;        // the window in progress runs at other_
  std::size_t num_rates_ = 0;  // 0: settled
  std::array<double, kNumWindows> rates_{};
  unsigned patience_ = kFirstPatience, num_settled_ = 0;  // in windows

  bool counting_ = false;
  unsigned num_skipped_ = 0, num_starved_ = 0;
  std::uint64_t start_lane_ = 0, start_device_ = 0;
  std::int64_t start_ns_ = 0;
};

}  // namespace unbounded::disk
