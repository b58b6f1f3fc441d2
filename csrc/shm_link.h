// A link over two rings in memory that both processes map, one for each direction. It has one lane.
//
// The sender copies a payload into a slot, and the sink sees it there: what is to be reduced is read where it lies, so
// a byte is copied once. Heads are checked as on the wire; payloads carry no CRC, as memory does not lose bits that a
// wire might.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "link.h"

namespace argosy {

// One direction: a single producer, a single consumer. Zeroed memory is an empty ring. Counters only grow; each has a
// cache line of its own, since two cores write them.
struct Ring {
  struct Slot {
    Frame frame;
    std::byte payload[];  // NOLINT: as long as the link says
  };

  alignas(64) std::atomic<std::uint64_t> written;  // frames, by the producer
  alignas(64) std::atomic<std::uint64_t> read;     // frames, by the consumer
  alignas(64) std::byte slots[];

  // The memory for `slots` frames of up to `slot_bytes`, a multiple of 64.
  static std::size_t bytes(std::size_t slots, std::size_t slot_bytes) {
    return sizeof(Ring) + slots * (sizeof(Frame) + slot_bytes);
  }
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

class ShmLink final : public Link {
 public:
  // Rings as `Ring::bytes` sizes them, aligned to 64 bytes, alive and mapped as long as the link. The peer's `out` is
  // our `in`.
  ShmLink(int peer, int rank, Ring* out, Ring* in, std::size_t slots, std::size_t slot_bytes);

  bool send(const Frame& frame, const std::byte* payload, std::uint64_t* sent) override;
  bool flush() override { return false; }
  bool receive(Sink& sink) override;
  void forsake() override {}
  void shut() override {}   // the owner of the memory tells
  void adopt() override {}  // what was sent is in the ring; what is received is copied within a call
  std::size_t lanes() const override { return 1; }
  std::size_t room() const override { return slot_bytes_; }
  bool wakes() const override { return false; }
  std::size_t descriptors(pollfd*, std::size_t) const override { return 0; }

 private:
  Ring::Slot& slot(Ring& ring, std::uint64_t number) const;
  [[noreturn]] void refuse(const char* what) const;

  const int peer_, rank_;
  Ring* const out_;
  Ring* const in_;
  const std::size_t slots_, slot_bytes_;
  std::uint64_t written_ = 0, taken_ = 0;  // of `out`: ours, and what we last saw the peer to have read
  std::uint64_t read_ = 0, there_ = 0;     // of `in`: ours, and what we last saw the peer to have written
};

}  // namespace argosy
