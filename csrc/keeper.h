// The keeper: keeps in touch with the ranks on other hosts while they compute, over a connection that carries nothing
// else.
//
// Twice a second it tells each of them that this process runs, and hears the same from them. So a rank that waits knows
// of each peer whether it runs, has left the group, has failed and why, is gone, or has fallen silent: a process that
// is stopped keeps its connections, and nothing else would tell it from one that computes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "failure.h"
#include "operation.h"
#include "tcp_link.h"

namespace argosy {

class Keeper {
 public:
  explicit Keeper(int rank) : rank_(rank) {}
  ~Keeper();

  void add(int peer, int fd);
  void start();

  // What this rank does now, for the others to know: ranks that only wait for each other would not find out otherwise
  // that they are not in the same operation.
  void tell_operation(const Notice& notice);

  // Throws Failure if a peer is gone or has failed, or is in another operation. That one has left is nothing yet: what
  // it has sent may still be on its way.
  void check();
  // What `peer` has told before its connections ended, if anything: a failure, or that it leaves.
  std::optional<Failure> told_by(int peer);
  // Those who have been silent for seconds, with how long; `first` becomes one of them.
  std::string silent(int* first);

  // Tell all peers, who look at it when they wait.
  void tell_failure(const Failure& failure);
  void tell_leaving();
  void forsake();

 private:
  using Clock = std::chrono::steady_clock;
  struct Contact final : Sink {
    explicit Contact(std::unique_ptr<TcpLink> link) : link(std::move(link)) {}
    Place offer(const Frame&) override { return {true, nullptr}; }
    void arrived(const Frame& frame, const std::byte*) override {
      heard = Clock::now();
      left = left || frame.message == kLeaving;
      notice = {frame.sequence, frame.operation, frame.count};
    }

    std::unique_ptr<TcpLink> link;
    Clock::time_point heard = Clock::now();
    bool left = false;
    Notice notice;  // what it does, or did last
    std::optional<Failure> failure;
    std::uint64_t sent = 0;
  };
  static constexpr std::uint32_t kRunning = 0, kLeaving = 1;

  void watch();
  void beat(Contact& contact, std::uint32_t message);
  void listen(Contact& contact);
  void stop();

  const int rank_;
  std::mutex mutex_;
  std::map<int, Contact> contacts_;
  Notice notice_;
  std::thread thread_;
  int wake_[2] = {-1, -1};
  std::atomic<bool> stopping_ = false;
};

}  // namespace argosy
