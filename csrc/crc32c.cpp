#include "crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
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

// What a CRC becomes when `bytes` zero bytes, a power of two, follow: one zero bit, squared often enough.
constexpr Shift make_shift(std::size_t bytes) {
  Matrix power{};
  power[0] = kPolynomial;
  for (std::size_t bit = 1; bit < 32; ++bit) power[bit] = std::uint32_t{1} << (bit - 1);
  for (std::size_t bits = 1; bits < 8 * bytes; bits *= 2) {
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
constexpr std::size_t kLong = 4096, kShort = 256;
constexpr Shift kShiftLong = make_shift(kLong), kShiftShort = make_shift(kShort);

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
ARGOSY_CRC_TARGET std::uint64_t three_streams(std::uint64_t crc, const std::byte* at, std::size_t stream,
                                              const Shift& shift) {
  std::uint64_t second = 0, third = 0;
  for (const std::byte* const end = at + stream; at < end; at += 8) {
    crc = step(crc, at);
    second = step(second, at + stream);
    third = step(third, at + 2 * stream);
  }
  return shifted(shift, shifted(shift, crc) ^ second) ^ third;
}

ARGOSY_CRC_TARGET std::uint32_t crc32c_native(std::uint32_t seed, const void* data, std::size_t size) {
  const auto* at = static_cast<const std::byte*>(data);
  std::uint64_t crc = static_cast<std::uint32_t>(~seed);
  for (; size >= 3 * kLong; size -= 3 * kLong, at += 3 * kLong) crc = three_streams(crc, at, kLong, kShiftLong);
  for (; size >= 3 * kShort; size -= 3 * kShort, at += 3 * kShort) crc = three_streams(crc, at, kShort, kShiftShort);
  for (; size >= 8; size -= 8, at += 8) crc = step(crc, at);
  for (; size > 0; --size, ++at) crc = step_byte(crc, *at);
  return ~static_cast<std::uint32_t>(crc);
}

#if defined(__x86_64__)

// [Note: folding]
// A vector of 128 bits stands for a polynomial, its first bit for the highest power. To move its CRC forward by
// `distance` bits, each half is multiplied by the power of x that it moves by, modulo the CRC's polynomial (32 bits,
// so the product has 96 and fits), and the two are added to the data that stands there. Products of reflected
// polynomials come out one bit low, and constants stand in the lower half of their 64 bits: hence 31 and 33.
// Four vectors of 512 bits at a time; in the end all are folded into one of 128, whose CRC is computed as any other.
#define ARGOSY_FOLD_TARGET __attribute__((target("sse4.2,pclmul,avx512f,avx512dq,vpclmulqdq")))

constexpr long long power_of_x(int exponent) {
  std::uint32_t value = 0x80000000;
  for (int i = 0; i < exponent; ++i) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
  return value;
}

template <int distance>
ARGOSY_FOLD_TARGET inline __m512i fold(__m512i value, __m512i next) {
  constexpr long long low = power_of_x(distance + 31), high = power_of_x(distance - 33);
  const __m512i powers = _mm512_set4_epi64(high, low, high, low);
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, powers, 0x00),
                                   _mm512_clmulepi64_epi128(value, powers, 0x11), next, 0x96);  // the sum of three
}

ARGOSY_FOLD_TARGET inline __m128i fold_lane(__m128i value, __m128i next) {
  constexpr long long low = power_of_x(128 + 31), high = power_of_x(128 - 33);
  const __m128i powers = _mm_set_epi64x(high, low);
  return _mm_xor_si128(
      next, _mm_xor_si128(_mm_clmulepi64_si128(value, powers, 0x00), _mm_clmulepi64_si128(value, powers, 0x11)));
}

ARGOSY_FOLD_TARGET std::uint32_t crc32c_folded(std::uint32_t seed, const void* data, std::size_t size) {
  if (size < 256) return crc32c_native(seed, data, size);
  const auto* at = static_cast<const std::byte*>(data);
  __m512i part[4];
  for (int i = 0; i < 4; ++i) part[i] = _mm512_loadu_si512(at + 64 * i);
  part[0] = _mm512_xor_si512(part[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~seed))));
  for (at += 256, size -= 256; size >= 256; at += 256, size -= 256) {
    for (int i = 0; i < 4; ++i) part[i] = fold<2048>(part[i], _mm512_loadu_si512(at + 64 * i));
  }
  __m512i all = part[0];
  for (int i = 1; i < 4; ++i) all = fold<512>(all, part[i]);
  __m128i last = _mm512_extracti64x2_epi64(all, 0);
  last = fold_lane(last, _mm512_extracti64x2_epi64(all, 1));
  last = fold_lane(last, _mm512_extracti64x2_epi64(all, 2));
  last = fold_lane(last, _mm512_extracti64x2_epi64(all, 3));
  std::uint64_t crc = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_extract_epi64(last, 0)));
  crc = _mm_crc32_u64(crc, static_cast<std::uint64_t>(_mm_extract_epi64(last, 1)));
  return crc32c_native(~static_cast<std::uint32_t>(crc), at, size);
}

bool can_fold() {
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq");
}

#endif

bool has_instruction() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#else
  constexpr unsigned long kCrc32 = 1 << 7;  // HWCAP_CRC32
  return (getauxval(AT_HWCAP) & kCrc32) != 0;
#endif
}

#endif

std::uint32_t crc32c_table(std::uint32_t seed, const void* data, std::size_t size) {
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint32_t crc = ~seed;
  for (; size > 0; --size, ++at) crc = crc >> 8 ^ kTable[(crc ^ *at) & 0xff];
  return ~crc;
}

struct Way {
  std::string_view name;
  bool (*supported)();
  std::uint32_t (*compute)(std::uint32_t seed, const void* data, std::size_t size);
};

// Best first.
constexpr Way kWays[] = {
#if defined(__x86_64__)
    {"folding", can_fold, crc32c_folded},
#endif
#if defined(ARGOSY_CRC_TARGET)
    {"instruction", has_instruction, crc32c_native},
#endif
    {"table", [] { return true; }, crc32c_table},
};

}  // namespace

std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t size) {
  // Found out once: in a virtual machine, asking the CPU takes microseconds.
  static const Way& best =
      *std::find_if(std::begin(kWays), std::end(kWays), [](const Way& w) { return w.supported(); });
  return best.compute(seed, data, size);
}

std::vector<std::string_view> crc32c_ways() {
  std::vector<std::string_view> names;
  for (const Way& way : kWays) {
    if (way.supported()) names.push_back(way.name);
  }
  return names;
}

std::uint32_t crc32c_by(std::string_view name, std::uint32_t seed, const void* data, std::size_t size) {
  for (const Way& way : kWays) {
    if (way.name == name && way.supported()) return way.compute(seed, data, size);
  }
  throw std::invalid_argument("this CPU cannot compute CRC32C by '" + std::string(name) + "'");
}

}  // namespace argosy
