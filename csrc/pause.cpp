#include "pause.h"

#include "futex.h"

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

}  // namespace

void Pause::idle(std::span<Link* const> links, int peer) {
  const bool wakes = std::all_of(links.begin(), links.end(), [](const Link* link) { return link->wakes(); });
  if (!settle(wakes, peer)) return;
  descriptors_.clear();
  for (const Link* const link : links) list(*link, descriptors_);
  sleep(wakes);
}

void Pause::idle(const std::function<void(std::vector<pollfd>&)>& collect, int peer) {
  if (!settle(false, peer)) return;
  descriptors_.clear();
  collect(descriptors_);
  sleep(false);
}

// Spins or gives way; true if it is time to sleep.
bool Pause::settle(bool wakes, int peer) {
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
    return false;
  }
  if (waited < (wakes ? kYieldForSockets : kYieldForMemory)) {
    sched_yield();
    return false;
  }
  return true;
}

void Pause::look(Clock::time_point now, int peer) {
  if (checked_ == Clock::time_point()) checked_ = now;  // the first time
  if (now - checked_ < kBetweenChecks) return;
  watch_.check(peer);
  checked_ = now;
}

void Pause::list(const Link& link, std::vector<pollfd>& into) {
  const std::size_t before = into.size();
  into.resize(before + kLanes);
  into.resize(before + link.descriptors(into.data() + before, kLanes));
}

void Pause::sleep(bool wakes) {
  const timespec limit = {.tv_sec = nap_.count() / 1'000'000'000, .tv_nsec = nap_.count() % 1'000'000'000};
  ppoll(descriptors_.data(), descriptors_.size(), &limit, nullptr);
  nap_ = std::min(2 * nap_, wakes ? kLastNapForSockets : kLastNapForMemory);
}

}  // namespace argosy
