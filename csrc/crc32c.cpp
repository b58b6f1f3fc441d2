#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define ARGOSY_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define ARGOSY_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace argosy {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected: the lowest bit is the highest power

using Matrix = std::array<std::uint32_t, 32>;                 // over GF(2), by columns: what a single bit becomes
using Bytes = std::array<std::uint32_t, 256>;                 // what each value of one byte becomes
using Shift = std::array<std::array<std::uint32_t, 256>, 4>;  // and of each byte of a CRC

constexpr std::uint32_t times(const Matrix& matrix, std::uint32_t vector) {
  std::uint32_t result = 0;
  for (std::size_t bit = 0; vector != 0; ++bit, vector >>= 1) {
    if (vector & 1) result ^= matrix[bit];
  }
  return result;
}

constexpr Bytes make_table() {
  Bytes table{};
  for (std::uint32_t value = 0; value < 256; ++value) {
    std::uint32_t crc = value;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    table[value] = crc;
  }
  return table;
}
constexpr Bytes kTable = make_table();

// What a CRC becomes when 2^`log_bytes` zero bytes follow: one zero bit, squared often enough.
constexpr Shift make_shift(int log_bytes) {
  Matrix power{};
  power[0] = kPolynomial;
  for (std::size_t bit = 1; bit < 32; ++bit) power[bit] = std::uint32_t{1} << (bit - 1);
  for (int i = 0; i < log_bytes + 3; ++i) {
    Matrix square{};
    for (std::size_t bit = 0; bit < 32; ++bit) square[bit] = times(power, power[bit]);
    power = square;
  }
  Shift shift{};
  for (std::size_t byte = 0; byte < 4; ++byte) {
    for (std::uint32_t value = 0; value < 256; ++value) shift[byte][value] = times(power, value << (8 * byte));
  }
  return shift;
}

#if defined(ARGOSY_CRC_TARGET)

// Lengths of the three streams: long ones for speed, short ones for what is left. A power of two each.
constexpr int kLogLong = 12, kLogShort = 8;
constexpr Shift kShiftLong = make_shift(kLogLong), kShiftShort = make_shift(kLogShort);

std::uint64_t shifted(const Shift& shift, std::uint64_t crc) {
  return shift[0][crc & 0xff] ^ shift[1][crc >> 8 & 0xff] ^ shift[2][crc >> 16 & 0xff] ^ shift[3][crc >> 24 & 0xff];
}

ARGOSY_CRC_TARGET inline std::uint64_t step(std::uint64_t crc, const std::byte* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
#if defined(__x86_64__)
  return _mm_crc32_u64(crc, word);
#else
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
#endif
}

ARGOSY_CRC_TARGET inline std::uint64_t step_byte(std::uint64_t crc, std::byte value) {
#if defined(__x86_64__)
  return _mm_crc32_u8(static_cast<std::uint32_t>(crc), static_cast<unsigned char>(value));
#else
  return __crc32cb(static_cast<std::uint32_t>(crc), static_cast<unsigned char>(value));
#endif
}

// An instruction takes one cycle and its result three, so three streams run in the time of one. Each is the CRC of
// its own bytes; appending zeros to the first two brings them in line with the last.
ARGOSY_CRC_TARGET const std::byte* three_streams(std::uint64_t& crc, const std::byte* at, std::size_t& size,
                                                 int log_stream, const Shift& shift) {
  const std::size_t stream = std::size_t{1} << log_stream;
  for (; size >= 3 * stream; size -= 3 * stream, at += 2 * stream) {
    std::uint64_t second = 0, third = 0;
    for (const std::byte* const end = at + stream; at < end; at += 8) {
      crc = step(crc, at);
      second = step(second, at + stream);
      third = step(third, at + 2 * stream);
    }
    crc = shifted(shift, shifted(shift, crc) ^ second) ^ third;
  }
  return at;
}

ARGOSY_CRC_TARGET std::uint32_t crc32c_native(std::uint32_t seed, const void* data, std::size_t size) {
  const auto* at = static_cast<const std::byte*>(data);
  std::uint64_t crc = static_cast<std::uint32_t>(~seed);
  at = three_streams(crc, at, size, kLogLong, kShiftLong);
  at = three_streams(crc, at, size, kLogShort, kShiftShort);
  for (; size >= 8; size -= 8, at += 8) crc = step(crc, at);
  for (; size > 0; --size, ++at) crc = step_byte(crc, *at);
  return ~static_cast<std::uint32_t>(crc);
}

bool has_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#else
  constexpr unsigned long kCrc32 = 1 << 7;  // HWCAP_CRC32
  return (getauxval(AT_HWCAP) & kCrc32) != 0;
#endif
}

#endif

using Implementation = std::uint32_t (*)(std::uint32_t, const void*, std::size_t);

Implementation choose() {
#if defined(ARGOSY_CRC_TARGET)
  if (has_instruction()) return crc32c_native;
#endif
  return crc32c_portable;
}

}  // namespace

std::uint32_t crc32c_portable(std::uint32_t seed, const void* data, std::size_t size) {
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~seed;
  for (; size > 0; --size, ++at) crc = crc >> 8 ^ kTable[(crc ^ *at) & 0xff];
  return ~crc;
}

std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t size) {
  static const Implementation implementation = choose();  // once: in a virtual machine, asking takes microseconds
  return implementation(seed, data, size);
}

}  // namespace argosy
