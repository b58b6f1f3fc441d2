// The client's connections to its servers: requests go out in order, a thread of their own brings the answers.
//
// A caller hands a request over and goes on, or waits for its answer. What the socket takes at once is sent by the
// caller itself; the rest, and all answers, are the thread's business, so that a pull of the next batch is under way
// while the caller computes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ps_blocks.h"
#include "ps_wire.h"

namespace argosy {

// Why a request was not done. `kind` is "lost", "timeout", "corrupt", or one of PsWrong.
struct PsError : std::runtime_error {
  PsError(std::string kind, int server, const std::string& text)
      : std::runtime_error(text), kind(std::move(kind)), server(server) {}
  std::string kind;
  int server;
};

struct PsRequest {
  PsHead head;
  PsBlocks::Block payload;          // of which head.length bytes are sent
  const std::byte* from = nullptr;  // where they begin, if not at the block's beginning
  std::byte* into = nullptr;        // place for an answer of exactly `into_bytes`; else it goes to `answer`
  std::uint64_t into_bytes = 0;
  std::shared_ptr<void> keeps;  // what `from` and `into` lie in
  bool quiet = false;           // nobody waits: an error is told at the next call

  // Set by the thread, before `finished`.
  PsReply reply;
  std::vector<std::byte> answer;
  std::string error, error_kind;
  bool finished = false;
};
using PsRequestPtr = std::shared_ptr<PsRequest>;

class PsPost {
 public:
  using Clock = std::chrono::steady_clock;

  // Takes the sockets over: lane 2 * server for pulls, 2 * server + 1 for pushes. `interrupted` is called now and then
  // while a caller waits, and may throw.
  PsPost(const std::vector<int>& fds, std::vector<std::string> names, std::function<void()> interrupted);
  ~PsPost();
  PsPost(const PsPost&) = delete;
  PsPost& operator=(const PsPost&) = delete;

  // Whoever waits, and whoever comes later, is told that the client was closed.
  void stop();
  void submit(std::size_t lane, const PsRequestPtr& request);
  // Throw PsError: what the server answered, or that it is lost, or that the time is over.
  void wait(std::size_t lane, const PsRequestPtr& request, Clock::time_point deadline);
  bool is_quiet() const;  // no quiet request is unanswered
  // Until less than `most` quiet requests of the lane are unanswered.
  void wait_for_window(std::size_t lane, std::size_t most, Clock::time_point deadline);
  // Throws what a quiet request came to, once.
  void throw_late_error();

  std::uint64_t global_step() const;  // the furthest server's
  std::uint64_t steps_over() const;   // the last server's: of so many steps none waits for anybody
  std::uint64_t bytes_sent() const { return bytes_sent_; }
  std::uint64_t bytes_received() const { return bytes_received_; }
  std::size_t lanes() const { return lanes_.size(); }
  std::string called(std::size_t lane) const;  // "server 1 (10.0.0.7:4000)"

 private:
  struct Lane {
    int fd = -1;
    std::mutex sending;              // whoever sends; the queue has the common lock
    std::deque<PsRequestPtr> queue;  // unanswered, in order; the first `sent` of them are sent
    std::size_t sent = 0;
    std::size_t out_done = 0;  // bytes of the one after these
    std::size_t quiet = 0;
    std::string lost;  // why nothing can be sent any more
    // What is received: first the head, then the payload of the first in the queue.
    PsReply reply;
    std::atomic<std::uint64_t> global_step = 0;  // what it last told
    std::size_t in_done = 0;
    std::uint32_t in_crc = 0;
    std::byte* in_place = nullptr;
    PsRequestPtr receiving;
  };

  void run();
  void wake();
  void send_some(Lane& lane);
  void receive_some(std::size_t number);
  bool begin_answer(std::size_t number);
  void end_answer(std::size_t number);
  void lose(std::size_t number, const std::string& kind, const std::string& why);
  void finish(std::size_t number, const PsRequestPtr& request);
  template <class Ready>
  void wait_until(std::unique_lock<std::mutex>& lock, std::size_t lane, const std::string& what,
                  Clock::time_point deadline, Ready ready);
  std::string told(std::size_t lane, const PsRequest& request) const;

  const std::vector<std::string> names_;
  const std::function<void()> interrupted_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::unique_ptr<PsError> late_error_;
  std::atomic<std::uint64_t> bytes_sent_ = 0, bytes_received_ = 0;
  std::atomic<bool> stopping_ = false;
  int wake_fd_ = -1;
  std::thread thread_;
};

}  // namespace argosy
