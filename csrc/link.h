// A link: frames to and from one peer, in order within a lane. TCP between hosts, a ring in shared memory inside one.
//
// Links never wait. Whoever drives one calls `send` while it returns true, and `receive` to have what has arrived
// handed to a sink; when neither gets on, the driver waits in its own way (see `Pause`). A link throws Failure when its
// peer is gone or sends what no peer would.
//
// A frame goes by any lane that is free, so frames of one message, and of one operation and the next, overtake each
// other between lanes. What holds: within a lane frames arrive in the order in which they were sent.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>

namespace argosy {

// The head of a frame as it stands on the wire: little-endian, 64 bytes, no padding.
struct Frame {
  static constexpr std::uint32_t kMagic = 0x59475241;  // "ARGY"
  static constexpr std::uint32_t kMaxPayload = 1 << 20;
  static constexpr std::uint32_t kMaxAbortText = 4096;

  enum class Type : std::uint32_t { data = 1, beat = 2, abort = 3 };

  std::uint32_t magic = kMagic;
  Type type = Type::data;
  std::uint64_t sequence = 0;     // of the operation in its group; for a message between two ranks, its tag
  std::uint64_t operation = 0;    // what the sender thinks is being done: kind, dtype, op, algorithm, root, packed
  std::uint64_t count = 0;        // and on how many elements (a message's bytes, between two ranks)
  std::uint64_t offset = 0;       // where in its message the payload belongs, in bytes
  std::uint32_t message = 0;      // the number of the message from this sender to this receiver in the operation; in
                                  // an abort frame, whose payload is the reason, the rank to blame (or -1)
  std::uint32_t length = 0;       // of the payload, in bytes
  std::uint32_t reserved = 0;     // zero
  std::uint32_t from = 0;         // the sender's rank
  std::uint32_t payload_crc = 0;  // CRC32C; zero in shared memory
  std::uint32_t head_crc = 0;     // CRC32C of all that stands before it
};
static_assert(sizeof(Frame) == 64);

// Takes what arrives.
class Sink {
 public:
  virtual ~Sink() = default;

  struct Place {
    bool ready;       // false: not now, offer it again later; the lane holds the frame back
    std::byte* into;  // where the payload goes, or null to have it shown in the link's own memory
  };
  // A checked head of a data frame has arrived. Throws Failure if it is not what the peer should send.
  virtual Place offer(const Frame& frame) = 0;
  // Its payload is there and its CRC holds. `payload` is `into`, or the link's memory, valid during the call.
  virtual void arrived(const Frame& frame, const std::byte* payload) = 0;
};

class Link {
 public:
  virtual ~Link() = default;

  // Takes over a frame (magic, sender and CRCs are filled in here) if there is room for it. The payload must stay as it
  // is until `*sent` has grown by its length, which happens in this call or in a later one of `send` or `flush`.
  virtual bool send(const Frame& frame, const std::byte* payload, std::uint64_t* sent) = 0;

  // Goes on with frames taken over before. Returns whether anything moved.
  virtual bool flush() = 0;

  // Hands what has arrived to the sink, at most a frame of each lane. Returns whether anything moved. Frames that were
  // held back are offered again: a call in which `lanes` frames are held back has seen the next one of every lane.
  virtual bool receive(Sink& sink) = 0;

  // For a driver that gives up: what is not wholly sent is copied, and what is not wholly received will be passed over,
  // so that payloads, counters and places may go away. After it, an abort frame can still be sent.
  virtual void adopt() = 0;

  // Those that the peer has not closed.
  virtual std::size_t lanes() const = 0;

  // The largest payload that a frame can have here. Both ends give the same answer.
  virtual std::size_t room() const = 0;

  // Whether `descriptors` tell when there is more to do. A ring in shared memory must be looked at.
  virtual bool wakes() const = 0;

  // What to poll while nothing moves: writes at most `room` entries and returns how many.
  virtual std::size_t descriptors(pollfd* into, std::size_t room) const = 0;

  // In a forked child: lets go of descriptors, which would keep connections open that the parent's death must end.
  virtual void forsake() = 0;

  // Nothing more will be sent: the peer comes to an end after what it has been sent.
  virtual void shut() = 0;
};

}  // namespace argosy
