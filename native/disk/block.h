// A transfer is carried out in blocks. Splitting is pure; a block is a small state machine that a lane drives: prepare,
// then request/advance until it is moved, then finish.
//
// Checksums are no part of moving it. They come in slices that any thread may take: what is written is summed while it is
// on its way, and what was read while the next blocks are. So the disk never waits for a checksum, and several threads
// share the last block of a transfer.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "disk/transfer.h"

namespace unbounded::disk {

enum class Mode {
  direct,    // O_DIRECT between the file and the caller's memory; a padded tail's last page through a buffer
  bounced,   // O_DIRECT through an aligned buffer: the caller's memory is not aligned
  buffered,  // through the page cache: unaligned ends of a named file, or no O_DIRECT there
};

struct Piece {
  Mode mode;
  std::uint64_t start;      // within the run
  std::uint64_t length;     // bytes of the caller
  std::uint64_t io_length;  // bytes moved; more than `length` only for a padded tail
};

// Covers [offset, offset + length) once, in order. If `offset` is aligned, every piece but the last starts and ends
// on a multiple of `block_bytes` from it, so that checksums whose grain divides that never straddle pieces.
std::vector<Piece> split(const Run& run, bool direct, std::size_t block_bytes);

// An aligned buffer of up to one block, made when first needed and reused.
class Bounce {
 public:
  Bounce() = default;
  ~Bounce();
  Bounce(Bounce&& other) noexcept;
  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;
  // Null when there is no memory.
  char* reserve(std::size_t bytes);

 private:
  char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// One system call: consecutive bytes of the file, in the caller's memory, in the bounce buffer, or first one and then the
// other.
struct Request {
  int fd;
  std::array<iovec, 2> parts;
  int num_parts;
  std::uint64_t offset;
};

// Bytes of one run. `carry_out` records their checksums (a write) or compares them (a read), and completes the part.
struct Slice {
  std::shared_ptr<Transfer> transfer;
  std::size_t run;
  std::uint64_t start, end;  // within the run

  void carry_out() const;

 private:
  std::uint32_t checksum(std::uint64_t at) const;
};

// The slices of one block.
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

class Block {
 public:
  Block(std::shared_ptr<Transfer> transfer, std::size_t run, const Piece& piece);

  Operation operation() const { return transfer_->operation(); }
  std::size_t length() const { return piece_.length; }
  // How many parts of the transfer it is: itself, and its slices of checksums.
  std::size_t num_parts() const;
  // Its checksums, if it has any, until they are taken out: a write's at any time, a read's once it `is_moved`.
  std::list<Check>& check() { return check_; }

  // Fills the bounce buffer of a write. False: failed, go to finish().
  bool prepare(Bounce& bounce);
  Request request();
  // Takes the result of the request (bytes, or -errno). True: request() again; false: it is moved, or has failed.
  bool advance(std::int64_t result);
  bool is_moved() const { return code_ == 0; }
  // Empties the bounce buffer of a read.
  void land();
  // Completes it, and the checksums that were not taken out.
  void finish();
  // Ends a block that was never begun.
  void abandon(int code);

 private:
  bool fail(int code);
  bool retry(int code);
  const Run& run() const { return transfer_->runs()[run_]; }
  char* memory() const { return run().data + piece_.start; }
  // The bytes that need no buffer.
  std::uint64_t num_straight() const;

  std::shared_ptr<Transfer> transfer_;
  std::size_t run_;
  Piece piece_;
  std::list<Check> check_;  // one or none: a list's element changes hands without being allocated again
  char* bounce_ = nullptr;
  bool is_direct_ = false;  // the last request; the file may have given up O_DIRECT since, for another block
  std::uint64_t moved_ = 0;
  int code_ = 0;
  std::uint64_t failed_at_ = 0;  // within the piece
  int num_retries_ = 0;
};

}  // namespace unbounded::disk
