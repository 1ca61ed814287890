// CRC32C (Castagnoli): the processor's instruction if there is one, tables otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unbounded::disk {

// The checksum of `data` appended to bytes whose checksum is `seed` (0 for none).
std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t seed);
// The table kernel, which is the specification of the others.
std::uint32_t crc32c_portable(const void* data, std::size_t length, std::uint32_t seed);
// The checksum of two joined runs of bytes, from their own checksums.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_length);
const char* crc32c_kernel();

}  // namespace unbounded::disk
