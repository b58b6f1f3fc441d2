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
// The least that is timed: of short copies much is still under way when they have ended. With more than 32 ranks on a
// host there is nothing as long; these go through the caches.
constexpr std::size_t kTimedBytes = 16 << 10;
// Through the caches a line takes 2 to 4 ns, or 25 if it is far. Around them it takes 6, to write and to read.
constexpr double kFarNanosecondsPerLine = 12;
constexpr int kSlowToTry = 2;  // one may have been interrupted
// So much is copied between times. A trial lasts longer than the window is long: lines come anew that went through the
// caches before. And of short copies alone, after which being far is forgotten.
constexpr std::size_t kBytesNear = 512 << 10, kBytesOnTrial = 4 << 20, kBytesFar = 16 << 20, kBytesUntimed = 64 << 20;
constexpr std::size_t kProbeBytes = 64 << 10;  // of a copy, where going through the caches takes long

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
  since_ += bytes;
  if (!forced_ && bytes >= kTimedBytes && since_ >= (on_trial_ ? kBytesOnTrial : far_ ? kBytesFar : kBytesNear)) {
    const std::size_t part = far_ ? std::min(bytes, kProbeBytes) : bytes;
    timed(to, from, part);
    to += part, from += part, bytes -= part;
  }
  if (!far_) {
    std::memcpy(to, from, bytes);
    return;
  }
  copy_around(to, from, bytes);
  if (!forced_ && since_ >= kBytesUntimed) forget();
}

void Giver::forget() {
  settle();
  far_ = on_trial_ = false;
}

void Giver::settle() const {
  if (far_) fence();
}

void Giver::timed(std::byte* to, const std::byte* from, std::size_t bytes) {
  settle();
  const auto begin = std::chrono::steady_clock::now();
  if (on_trial_) {
    copy_around(to, from, bytes);
    fence();
  } else {
    std::memcpy(to, from, bytes);
  }
  const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
  const double a_line = taken.count() / static_cast<double>(bytes / kLine);
  since_ = 0;
  if (on_trial_) {
    on_trial_ = false;
    far_ = 2 * a_line < through_;
    slow_ = 0;
    return;
  }
  through_ = a_line;
  slow_ = a_line > kFarNanosecondsPerLine ? slow_ + 1 : 0;
  on_trial_ = !far_ && slow_ >= kSlowToTry;
  far_ = on_trial_ || (far_ && slow_ > 0);
}

}  // namespace argosy
