#include "program.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <vector>

#include "failure.h"
#include "hazards.h"
#include "loop_link.h"
#include "operation.h"
#include "pause.h"

namespace argosy {
namespace {

// [Note: early or wrong]
// Every frame tells the number of its operation. A rank's operation ends when it has received all that it should and
// handed over all that it sends. So for a frame that arrives while the receiver is in operation s:
//
//  - number s: kind of operation and count must be the receiver's own, or the two disagree;
//  - below s: the receiver has had all that it expected of that operation, so this is something else. They disagree;
//  - above s: its sender is done with s. The frame waits in its lane until the receiver gets there. What the sender
//    sent for s is still to come, on other lanes. If every lane has come to a later operation while something of s is
//    expected, it will never come: they disagree. Should some lane be empty, the deadline finds out.

// [Note: chunks]
// The default must be long enough for the cost of a frame (a call to the kernel on either side, some 5 us) to vanish,
// short enough to lie in the cache between CRC, reduction and copy, and a message should have several, for sending,
// receiving and reducing to overlap. Chunks of 16 KiB took half as long again as those of 64 KiB and more, between
// which there was little to choose. Both ends of a message compute the same.
constexpr std::size_t kLongChunk = 256 << 10, kShortChunk = 64 << 10, kChunksInMessage = 16;

constexpr std::size_t kWindow = 64;   // chunks of a message that may arrive before an earlier one
constexpr std::size_t kFlights = 16;  // frames that a link has taken over and not sent wholly; a lane has one
constexpr int kBurst = 4;             // frames sent to one peer before turning to the others

struct Move {  // a step under way
  std::size_t chunk = 0;
  std::size_t done = 0;                   // bytes from the step's beginning on, handed over or received
  std::size_t next = 0;                   // of a send: where its next chunk begins
  std::uint64_t placed = 0, arrived = 0;  // of a receive: chunks from `done` on, one bit for each
};

class Run {
 public:
  Run(const Program& program, Watch& watch);
  void operator()();

 private:
  struct Peer final : Sink {
    Peer(Run& run, int rank, Link& link) : run(run), rank(rank), link(&link) {}
    Place offer(const Frame& frame) override { return run.offer(*this, frame); }
    void arrived(const Frame& frame, const std::byte* payload) override { run.arrived(*this, frame, payload); }

    struct Flight {
      std::uint32_t step;
      std::uint64_t bytes, sent;
    };

    Run& run;
    int rank;
    Link* link;
    std::vector<std::uint32_t> sends, receives;  // the steps, in order
    std::size_t sending = 0;                     // which of `sends` has chunks to go
    std::size_t unsent = 0, unreceived = 0;      // steps not done
    std::array<Flight, kFlights> flights;        // a queue
    std::size_t first_flight = 0, flight_count = 0;
    std::size_t early = 0;  // frames of later operations seen in one call
    Frame early_frame;
  };

  Peer& peer_of(int rank);
  std::size_t chunk_of(std::size_t bytes, const Link& link) const;
  bool turn(Peer& peer);
  bool push(Peer& peer);
  bool its_turn(const Peer& peer, std::uint32_t number);
  std::uint32_t next_send();
  void settle(Peer& peer);
  bool clear(std::uint32_t number, const std::byte* begin, const std::byte* end);
  void finish(std::uint32_t number, std::size_t& left);
  Sink::Place offer(Peer& peer, const Frame& frame);
  void arrived(Peer& peer, const Frame& frame, const std::byte* payload);
  int waited_for();
  void wait();
  [[noreturn]] void disagree(const Peer& peer, const Frame& frame) const;
  [[noreturn]] void refuse(const Peer& peer, const Frame& frame, const char* what) const;

  const Program& program_;
  const std::span<const Step> steps_;
  const int rank_;
  LoopLink loop_;
  Hazards hazards_;
  std::vector<Move> moves_;
  std::vector<std::uint32_t> peer_index_;  // by rank
  std::vector<Peer> peers_;
  std::vector<Link*> links_;       // for the pause
  std::size_t left_ = 0;           // steps not done
  std::size_t sending_ = 0;        // no send before this step has chunks to go
  const Peer* sent_to_ = nullptr;  // whom the last frame went to
  std::size_t oldest_ = 0;         // no step before this one is left
  Pause pause_;
};

Run::Run(const Program& program, Watch& watch)
    : program_(program),
      steps_(program.steps),
      rank_(static_cast<int>(program.operation.from)),
      hazards_(steps_),
      moves_(steps_.size()),
      pause_(watch) {
  constexpr std::uint32_t kNobody = UINT32_MAX;
  int last = -1;
  for (const Step& step : steps_) last = std::max(last, step.peer);
  peer_index_.assign(static_cast<std::size_t>(last + 1), kNobody);
  std::uint32_t count = 0;
  for (const Step& step : steps_) {
    std::uint32_t& index = peer_index_[static_cast<std::size_t>(step.peer)];
    if (index == kNobody) index = count++;
  }
  peers_.reserve(count);  // links point into them
  for (std::uint32_t number = 0; number < steps_.size(); ++number) {
    const Step& step = steps_[number];
    Peer& peer = peer_of(step.peer);
    const bool sends = step.kind == Step::Kind::send;
    (sends ? peer.sends : peer.receives).push_back(number);
    moves_[number].chunk = chunk_of(step.bytes, *peer.link);
    if (step.bytes == 0) continue;
    ++(sends ? peer.unsent : peer.unreceived);
    ++left_;
  }
}

Run::Peer& Run::peer_of(int rank) {
  const std::uint32_t index = peer_index_[static_cast<std::size_t>(rank)];
  if (index == peers_.size()) {
    peers_.emplace_back(*this, rank, rank == rank_ ? static_cast<Link&>(loop_) : program_.link(rank));
  }
  return peers_[index];
}

std::size_t Run::chunk_of(std::size_t bytes, const Link& link) const {
  const std::size_t wanted =
      program_.chunk_bytes != 0 ? program_.chunk_bytes : std::clamp(bytes / kChunksInMessage, kShortChunk, kLongChunk);
  const std::size_t chunk = std::min(wanted, link.room());
  return std::max(chunk - chunk % program_.element_bytes, program_.element_bytes);
}

void Run::operator()() {
  try {
    while (left_ > 0) {
      bool moved = false;
      for (Peer& peer : peers_) {
        if (peer.unsent + peer.unreceived > 0) moved |= turn(peer);
      }
      if (moved) {
        pause_.reset(waited_for());
      } else {
        wait();
      }
    }
  } catch (...) {
    for (const Peer& peer : peers_) peer.link->adopt();
    throw;
  }
}

bool Run::turn(Peer& peer) {
  bool moved = peer.flight_count > 0 && peer.link->flush();
  settle(peer);
  if (peer.sending < peer.sends.size()) moved |= push(peer);
  // A peer from which nothing is expected is listened to if it does not take what it is sent: it may tell why.
  if (peer.unreceived > 0 || (peer.unsent > 0 && !moved)) {
    peer.early = 0;
    moved |= peer.link->receive(peer);
    if (peer.early > 0 && peer.early == peer.link->lanes() && peer.unreceived > 0) disagree(peer, peer.early_frame);
    if (peer.rank == rank_) settle(peer);
  }
  return moved;
}

bool Run::push(Peer& peer) {
  bool moved = false;
  for (int burst = 0; burst < kBurst && peer.sending < peer.sends.size(); ++burst) {
    const std::uint32_t number = peer.sends[peer.sending];
    const Step& step = steps_[number];
    Move& move = moves_[number];
    if (step.bytes > 0) {
      const std::size_t length = std::min(move.chunk, step.bytes - move.next);
      const std::byte* const payload = step.address + move.next;
      if (!its_turn(peer, number) || peer.flight_count == kFlights || !clear(number, payload, payload + length)) break;
      Frame frame = program_.operation;
      frame.type = Frame::Type::data;
      frame.message = static_cast<std::uint32_t>(peer.sending);
      frame.offset = move.next;
      frame.length = static_cast<std::uint32_t>(length);
      Peer::Flight& flight = peer.flights[(peer.first_flight + peer.flight_count) % kFlights];
      flight = {.step = number, .bytes = length, .sent = 0};
      if (!peer.link->send(frame, payload, &flight.sent)) break;
      sent_to_ = &peer;
      ++peer.flight_count;
      move.next += length;
      moved = true;
    }
    if (move.next == step.bytes) ++peer.sending;
  }
  settle(peer);
  return moved;
}

// Sends leave in order, and to another peer when the link to the last one has taken all: see [Note: order on the wire].
bool Run::its_turn(const Peer& peer, std::uint32_t number) {
  return number == next_send() && (sent_to_ == nullptr || sent_to_ == &peer || sent_to_->flight_count == 0);
}

// The first step that sends and has chunks to go.
std::uint32_t Run::next_send() {
  const auto gone = [&](std::size_t number) {
    return steps_[number].kind != Step::Kind::send || moves_[number].next == steps_[number].bytes;
  };
  while (sending_ < steps_.size() && gone(sending_)) ++sending_;
  return static_cast<std::uint32_t>(sending_);
}

// Frames can leave by several lanes in any order; a step's `done` grows from its beginning on.
void Run::settle(Peer& peer) {
  for (; peer.flight_count > 0; --peer.flight_count, ++peer.first_flight) {
    const Peer::Flight& flight = peer.flights[peer.first_flight % kFlights];
    if (flight.sent < flight.bytes) return;
    moves_[flight.step].done += flight.bytes;
    finish(flight.step, peer.unsent);
  }
}

void Run::finish(std::uint32_t number, std::size_t& left) {
  if (moves_[number].done < steps_[number].bytes) return;
  --left;
  --left_;
}

// Whether all that a step waits for has happened to the bytes from `begin` to `end`.
bool Run::clear(std::uint32_t number, const std::byte* begin, const std::byte* end) {
  for (std::size_t i = 0; i < hazards_.of(number).size();) {
    const std::uint32_t earlier = hazards_.of(number)[i];
    const Step& step = steps_[earlier];
    const std::size_t done = moves_[earlier].done;
    if (done == step.bytes) {
      hazards_.drop(number, i);
      continue;
    }
    const std::byte* const step_end = step.address + step.bytes;
    if (begin < step_end && step.address < end && step.address + done < std::min(end, step_end)) return false;
    ++i;
  }
  return true;
}

Sink::Place Run::offer(Peer& peer, const Frame& frame) {
  constexpr Sink::Place kLater = {.ready = false, .into = nullptr};
  const Frame& own = program_.operation;
  if (frame.sequence > own.sequence) {
    ++peer.early;
    peer.early_frame = frame;
    return kLater;
  }
  if (frame.sequence != own.sequence || frame.operation != own.operation || frame.count != own.count) {
    disagree(peer, frame);
  }
  if (frame.message >= peer.receives.size()) refuse(peer, frame, "is one too many");
  const std::uint32_t number = peer.receives[frame.message];
  const Step& step = steps_[number];
  Move& move = moves_[number];
  if (frame.offset >= step.bytes || frame.offset % move.chunk != 0 ||
      frame.length != std::min(move.chunk, step.bytes - frame.offset)) {
    refuse(peer, frame, "is cut into other chunks than here");
  }
  if (frame.offset < move.done) refuse(peer, frame, "has a chunk that was there already");
  const std::size_t ahead = (frame.offset - move.done) / move.chunk;
  if (ahead >= kWindow) return kLater;
  const std::uint64_t bit = std::uint64_t{1} << ahead;
  if (move.placed & bit) refuse(peer, frame, "has a chunk that was there already");
  std::byte* const address = step.address + frame.offset;
  if (!clear(number, address, address + frame.length)) return kLater;
  move.placed |= bit;
  return {.ready = true, .into = step.kind == Step::Kind::copy ? address : nullptr};
}

void Run::arrived(Peer& peer, const Frame& frame, const std::byte* payload) {
  const std::uint32_t number = peer.receives[frame.message];
  const Step& step = steps_[number];
  Move& move = moves_[number];
  if (step.kind == Step::Kind::reduce) {
    std::byte* const address = step.address + frame.offset;
    const std::byte* const sources[] = {address, payload};
    program_.kernel(address, sources, 2, frame.length / program_.element_bytes);
  }
  move.arrived |= std::uint64_t{1} << (frame.offset - move.done) / move.chunk;
  const int whole = std::countr_one(move.arrived);
  if (whole == 0) return;
  move.arrived = whole == kWindow ? 0 : move.arrived >> whole;
  move.placed = whole == kWindow ? 0 : move.placed >> whole;
  move.done = std::min(move.done + static_cast<std::size_t>(whole) * move.chunk, step.bytes);
  finish(number, peer.unreceived);
}

// The peer of the first step that is not done: all that it needs on this side is there.
int Run::waited_for() {
  while (oldest_ < steps_.size() && moves_[oldest_].done == steps_[oldest_].bytes) ++oldest_;
  return oldest_ < steps_.size() ? steps_[oldest_].peer : -1;
}

void Run::wait() {
  links_.clear();
  for (const Peer& peer : peers_) {
    if (peer.unsent + peer.unreceived > 0) links_.push_back(peer.link);
  }
  try {
    pause_.idle(links_, waited_for());
  } catch (const Failure& failure) {
    if (failure.kind != Failure::Kind::timeout) throw;
    for (const Peer& peer : peers_) {
      if (peer.early > 0 && peer.unreceived > 0) disagree(peer, peer.early_frame);
    }
    throw;
  }
}

void Run::disagree(const Peer& peer, const Frame& frame) const {
  const auto notice = [](const Frame& frame) { return Notice{frame.sequence, frame.operation, frame.count}; };
  throw differ(rank_, notice(program_.operation), peer.rank, notice(frame));
}

void Run::refuse(const Peer& peer, const Frame& frame, const char* what) const {
  throw Failure(Failure::Kind::corrupt, peer.rank,
                "message " + std::to_string(frame.message) + " of rank " + std::to_string(peer.rank) + " in " +
                    describe(frame.operation, frame.count) + " #" + std::to_string(frame.sequence) + " " + what);
}

}  // namespace

void run(const Program& program, Watch& watch) { Run(program, watch)(); }

}  // namespace argosy
