// How values travel: as they are, as 16-bit floats, or as 8-bit integers with a scale for each row.
//
// int8 has a float for each `width` numbers (the last may have fewer), then a byte for each number. A number is the
// scale times its byte; the scale is the largest magnitude / 127, or NaN where something is not finite, so that what
// must not be learned from is still seen as such at the other end. fp16 keeps infinities and NaN; what is finite but
// too large for it becomes the largest that it has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace argosy {

enum class PsValues : std::uint8_t { fp32, fp16, int8, last = int8 };

PsValues parse_values(std::string_view name);  // throws std::invalid_argument

std::uint64_t encoded_bytes(PsValues values, std::uint64_t count, std::size_t width);

void encode(PsValues values, const float* from, std::size_t count, std::size_t width, std::byte* to);
void decode(PsValues values, const std::byte* from, std::size_t count, std::size_t width, float* to);

// The place of the first row of `width` numbers that are not all finite, or `count` / `width`, rounded up.
std::size_t first_not_finite(const float* numbers, std::size_t count, std::size_t width);

}  // namespace argosy
