// A link over several connections to one peer. One connection is one lane; see link.h for what that means.
//
// Several lanes carry more than one where a single connection is limited, by a shaper, by loss or by one core that
// serves its interrupts. A payload goes straight from the sender's buffer into the place that the sink gives.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "link.h"

namespace argosy {

class TcpLink final : public Link {
 public:
  // Takes over connected stream sockets, at least one. The peer must have given the same connections to its end; their
  // order does not matter.
  TcpLink(int peer, int rank, const std::vector<int>& fds);
  ~TcpLink() override;
  TcpLink(const TcpLink&) = delete;
  TcpLink& operator=(const TcpLink&) = delete;

  bool send(const Frame& frame, const std::byte* payload, std::uint64_t* sent) override;
  bool flush() override;
  bool receive(Sink& sink) override;
  void adopt() override;
  void shut() override;
  void forsake() override;
  // Ends the connections when what was sent is not acknowledged for some seconds.
  void notice_cuts();
  std::size_t lanes() const override;
  std::size_t room() const override { return Frame::kMaxPayload; }
  bool wakes() const override { return true; }
  std::size_t descriptors(pollfd* into, std::size_t room) const override;

 private:
  // What is read beyond the payload in hand: the next head, and a small payload whole. One call to the kernel brings
  // what is left of a frame and what follows.
  static constexpr std::size_t kAhead = 8192;

  struct Outgoing {
    bool busy = false;
    Frame frame;
    const std::byte* payload = nullptr;
    std::size_t done = 0;  // of head and payload together
    std::uint64_t* sent = nullptr;
    unsigned full = 0;  // how often the connection took no more
    std::unique_ptr<std::byte[]> adopted;
  };

  struct Incoming {
    enum class Stage { head, offering, payload } stage = Stage::head;
    Frame frame;
    std::byte* into = nullptr;
    std::size_t done = 0;  // of the payload
    std::uint32_t crc = 0;
    bool pass_over = false;               // nobody waits for this frame any more
    std::unique_ptr<std::byte[]> buffer;  // for payloads that the sink wants to be shown
    std::size_t buffer_bytes = 0;
    std::size_t ahead_begin = 0, ahead_end = 0;
    std::array<std::byte, kAhead> ahead;
  };

  struct Lane {
    int fd;
    bool ended = false;  // by the peer, between two frames
    Outgoing out;
    Incoming in;
  };

  bool push(Lane& lane);
  bool receive_on(Lane& lane, Sink& sink);
  bool read(Lane& lane, std::byte* into, std::size_t bytes, std::size_t& got);
  bool start_frame(Lane& lane, Sink& sink);
  bool fill_payload(Lane& lane, bool& moved);
  void finish_frame(Lane& lane, Sink& sink, const std::byte* payload);
  [[noreturn]] void lose(const std::string& what) const;

  const int peer_, rank_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::size_t turn_ = 0;  // the lane that gets the next frame, if it is free
  std::string broken_;    // why nothing more can be sent: told when all that the peer had sent is read
};

}  // namespace argosy
