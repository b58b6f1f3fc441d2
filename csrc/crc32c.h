// CRC32C (Castagnoli): what a frame carries so that bytes changed on their way are noticed.
//
// The CPU's own instruction where there is one, three streams at a time to hide its latency; a table elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

namespace argosy {

// Of `size` bytes, going on from the value of the bytes before them: crc32c(crc32c(0, a), b) is that of a and b.
std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t size);

// The same without the CPU's help.
std::uint32_t crc32c_portable(std::uint32_t seed, const void* data, std::size_t size);

}  // namespace argosy
