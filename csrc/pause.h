// What the driver of links does while nothing moves: it spins a little, then gives way to others, then sleeps.
//
// How long each of these lasts decides the latency of small operations, both where every rank has a core and where
// eight ranks share two: see [Note: how to wait] in pause.cpp.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "link.h"
#include "watch.h"

namespace argosy {

class Pause {
 public:
  explicit Pause(Watch& watch) : watch_(watch) {}

  // Something moved; `peer` is the one waited for, as below.
  void reset(int peer) {
    idle_ = false;
    if (++moves_ % kMovesBetweenLooks == 0) look(Clock::now(), peer);
  }

  // Nothing moved on any of `links`. Calls the watch about once a millisecond, naming `peer` as the one waited for.
  void idle(std::span<Link* const> links, int peer);
  static void list(const Link& link, std::vector<pollfd>& into);
  // The same where links are shared with other threads: `collect` is called to list what to poll, before a sleep.
  // Sleeps are short, since another thread may have found something new to do.
  void idle(const std::function<void(std::vector<pollfd>&)>& collect, int peer);

 private:
  using Clock = std::chrono::steady_clock;
  // A peer that keeps sending trifles must not outlive the deadline. To look at the clock each time would cost more
  // than a small move does.
  static constexpr std::uint32_t kMovesBetweenLooks = 256;

  void look(Clock::time_point now, int peer);
  bool settle(bool wakes, int peer);
  void sleep(bool wakes);

  Watch& watch_;
  bool idle_ = false;
  std::uint32_t moves_ = 0;
  Clock::time_point since_, checked_;  // when idleness began, and when the watch was last asked
  std::chrono::nanoseconds nap_{};
  std::vector<pollfd> descriptors_;
};

}  // namespace argosy
