// One connection of a worker, at the server: a thread reads requests, does them, and answers, one after the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "heap.h"
#include "ps_steps.h"
#include "ps_tables.h"
#include "ps_wire.h"

namespace argosy {

// What the connections of a server share.
struct PsCore {
  PsCore(std::uint32_t workers, std::uint32_t aggregate, bool reject_not_finite)
      : steps(workers, aggregate), reject_not_finite(reject_not_finite) {}

  std::string json() const;

  PsTables tables;
  PsSteps steps;
  const bool reject_not_finite;
  std::atomic<std::uint64_t> requests = 0, refused = 0, repeated = 0, dropped_connections = 0;
  std::atomic<std::uint64_t> bytes_in = 0, bytes_out = 0;  // of sockets
  std::atomic<std::uint64_t> shared_bytes = 0;             // of payloads and answers in shared memory
};

class PsSession {
 public:
  PsSession(PsCore& core, int fd, std::uint32_t client) : core_(core), fd_(fd), client_(client) {}

  // Until the connection ends, or says what cannot be read.
  void run();

 private:
  // Memory that grows to what is needed and is used again.
  class Room {
   public:
    std::byte* take(std::size_t bytes);
    void trim();  // gives back what only a rare request needs

   private:
    std::unique_ptr<std::byte[]> memory_;
    std::size_t bytes_ = 0;
  };

  bool serve(const PsHead& head);   // false: nobody reads the answer
  bool handle(const PsHead& head);  // does the request and answers it; throws PsRefusal
  const std::byte* receive_payload(const PsHead& head);
  std::byte* shared(std::uint64_t at, std::uint64_t bytes, const PsHead& head) const;
  bool pass_over(std::uint64_t bytes);
  bool answer(const PsHead& head, const std::byte* payload = nullptr, std::uint64_t bytes = 0, std::uint64_t count = 0,
              std::uint64_t cursor = 0);
  bool refuse(const PsHead& head, PsWrong wrong, const std::string& text);

  bool attach(const PsHead& head);
  bool create(const PsHead& head);
  bool mark_step(const PsHead& head);
  bool pull_rows(const PsHead& head);
  bool pull_range(const PsHead& head);
  bool push_rows(const PsHead& head);
  bool push_range(const PsHead& head);
  bool set_rows(const PsHead& head);
  bool scan(const PsHead& head);

  bool wait_for(const PsHead& head);
  bool was_pushed(const PsHead& head, bool range);
  const float* floats(PsValues values, const std::byte* encoded, std::size_t count, std::size_t width, Room& room);
  void check_finite(const PsHead& head, const float* gradients, std::size_t count, std::size_t width,
                    const std::int64_t* ids) const;
  PsTable& table_of(const PsHead& head) const;
  PsRange& range_of(const PsHead& head) const;

  PsCore& core_;
  const int fd_;
  const std::uint32_t client_;
  std::uint64_t unread_ = 0;  // of the payload in hand
  Mapping memory_;            // the client's, if it lies on this host
  Room payload_, ids_, gradients_, pulled_, rows_, encoded_;
};

}  // namespace argosy
