#include "giver.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace argosy {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kTimedBytes = 16 << 10;  // the least that is timed
// Around the caches a line costs some 6 ns, to write and to read. Through them 2 to 4, or 25 if it is far.
constexpr double kFarNanosecondsPerLine = 12;
constexpr int kSlowToBeFar = 2;                        // one may have been interrupted
constexpr int kTimedWhenNear = 8, kTimedWhenFar = 64;  // every so many copies; through the caches in any case

#if defined(__x86_64__)
__attribute__((target("avx2"))) void stream_wide(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(__m256i)) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), values);
  }
}

void stream_narrow(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += sizeof(__m128i)) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), values);
  }
}

void fence() { _mm_sfence(); }
#else
void fence() {}
#endif

}  // namespace

#if defined(__x86_64__)
void copy_around(std::byte* to, const std::byte* from, std::size_t bytes) {
  static const auto stream = __builtin_cpu_supports("avx2") ? stream_wide : stream_narrow;
  const std::size_t head = std::min(-reinterpret_cast<std::uintptr_t>(to) % kLine, bytes);
  const std::size_t lines = (bytes - head) / kLine * kLine, tail = head + lines;
  std::memcpy(to, from, head);
  stream(to + head, from + head, lines);
  std::memcpy(to + tail, from + tail, bytes - tail);
}
#else
void copy_around(std::byte* to, const std::byte* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
#endif

void Giver::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes >= kTimedBytes && ++since_ >= (far_ ? kTimedWhenFar : kTimedWhenNear)) {
    timed(to, from, bytes);
  } else if (far_) {
    copy_around(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

void Giver::settle() const {
  if (far_) fence();
}

void Giver::timed(std::byte* to, const std::byte* from, std::size_t bytes) {
  const auto begin = std::chrono::steady_clock::now();
  std::memcpy(to, from, bytes);
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
  slow_ = taken.count() > kFarNanosecondsPerLine * static_cast<double>(bytes / kLine) ? slow_ + 1 : 0;
  settle();
  far_ = slow_ >= kSlowToBeFar;
  since_ = 0;
}

}  // namespace argosy
