// What the driver of links does while nothing moves: it spins a little, then gives way to others, then sleeps.
//
// How long each of these lasts decides the latency of small operations, both where every rank has a core and where
// eight ranks share two: see [Note: how to wait] in pause.cpp.
#pragma once

#include <poll.h>

#include <chrono>
#include <span>
#include <vector>

#include "link.h"
#include "watch.h"

namespace argosy {

class Pause {
 public:
  explicit Pause(Watch& watch) : watch_(watch) {}

  // Something moved.
  void reset() { idle_ = false; }

  // Nothing moved on any of `links`. Calls the watch about once a millisecond, naming `peer` as the one waited for.
  void idle(std::span<Link* const> links, int peer);

 private:
  using Clock = std::chrono::steady_clock;
  void sleep(std::span<Link* const> links, bool wakes);

  Watch& watch_;
  bool idle_ = false;
  Clock::time_point since_, checked_;
  std::chrono::nanoseconds nap_{};
  std::vector<pollfd> descriptors_;
};

}  // namespace argosy
