// CRC32C (Castagnoli): what a frame carries so that bytes changed on their way are noticed.
//
// Every byte that crosses a wire is read for it twice, so it must be fast: products of polynomials in wide vectors
// where the CPU has them, else its CRC instruction, three streams at a time to hide the latency, else a table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace argosy {

// Of `size` bytes, going on from the value of the bytes before them: crc32c(crc32c(0, a), b) is that of a and b.
std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t size);

// The ways in which this CPU can compute it, best first, and one of them by name: for tests.
std::vector<std::string_view> crc32c_ways();
std::uint32_t crc32c_by(std::string_view name, std::uint32_t seed, const void* data, std::size_t size);

}  // namespace argosy
