#include "pause.h"

#include <sched.h>

#include <algorithm>
#include <ctime>

namespace argosy {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// [Note: how to wait]
// Spinning is for the answer that is on its way from another core. It is short: with more ranks than cores, the one
// that is waited for may need this very core. Giving way costs less than a microsecond if nobody else wants the core,
// so it is as good as spinning then, and lets the other ranks work if they do; these soon give way in turn. Sleeping is
// for long waits. The kernel wakes a sleeper when a socket has something, so with sockets alone it may come early and
// last; a ring wakes nobody, so there it comes late and is short.
constexpr nanoseconds kSpin = microseconds(3);
constexpr nanoseconds kYieldForSockets = microseconds(100), kYieldForMemory = microseconds(1000);
constexpr nanoseconds kFirstNap = microseconds(50), kLastNapForSockets = milliseconds(50),
                      kLastNapForMemory = milliseconds(1);
constexpr nanoseconds kBetweenChecks = milliseconds(1);

constexpr std::size_t kLanes = 64;  // of one link, that are polled

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // "yield" is too short to be of use on most cores
#endif
}

}  // namespace

void Pause::idle(std::span<Link* const> links, int peer) {
  const Clock::time_point now = Clock::now();
  if (!idle_) {
    idle_ = true;
    since_ = now;
    nap_ = kFirstNap;
  }
  look(now, peer);
  const nanoseconds waited = now - since_;
  if (waited < kSpin) {
    relax();
    return;
  }
  const bool wakes = std::all_of(links.begin(), links.end(), [](const Link* link) { return link->wakes(); });
  if (waited < (wakes ? kYieldForSockets : kYieldForMemory)) {
    sched_yield();
    return;
  }
  sleep(links, wakes);
}

void Pause::look(Clock::time_point now, int peer) {
  if (checked_ == Clock::time_point()) checked_ = now;  // the first time
  if (now - checked_ < kBetweenChecks) return;
  watch_.check(peer);
  checked_ = now;
}

void Pause::sleep(std::span<Link* const> links, bool wakes) {
  descriptors_.clear();
  for (const Link* const link : links) {
    const std::size_t before = descriptors_.size();
    descriptors_.resize(before + kLanes);
    descriptors_.resize(before + link->descriptors(descriptors_.data() + before, kLanes));
  }
  const timespec limit = {.tv_sec = nap_.count() / 1'000'000'000, .tv_nsec = nap_.count() % 1'000'000'000};
  ppoll(descriptors_.data(), descriptors_.size(), &limit, nullptr);
  nap_ = std::min(2 * nap_, wakes ? kLastNapForSockets : kLastNapForMemory);
}

}  // namespace argosy
