// A crew: the ranks of one host. They go through their operations in lockstep, over memory that all of them map.
//
// [Note: meetings]
// All synchronisation is one primitive. Before a meeting a rank writes what the others may read into its slot; `meet`
// returns when all members have come to the meeting; then it may read their slots. Slots follow each other around a
// window, so that the next one never overlaps the last. To write the slot of meeting m + 2 a rank has been at meeting
// m + 1, where all others came after they had read what was shown at meeting m: so one meeting for each exchange is
// enough, and nobody waits for a slot. Members know where each other's slots are as they all move by the same bytes.
//
// The window is longer than two slots need to be. Bytes that a peer has just read are still in its cache, and writing
// them takes as long as fetching them back; a little later they are in the cache that both share. In a window of the
// right length, 256 KiB took half as long as in two slots used in turn, and in one too long 16 MiB took twice as long.
//
// At the first meeting of an operation each member also shows a notice that says which operation it is in. If these
// differ, all members see it at the same time, before any data is used.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "failure.h"
#include "giver.h"
#include "heap.h"
#include "operation.h"
#include "watch.h"

namespace argosy {

// The beginning of every heap: what its owner tells the others.
struct Board {
  enum State : std::uint32_t { working = 0, failed = 1, left = 2 };
  static constexpr std::size_t kMaxText = 1024;

  Nonce nonce;
  alignas(128) std::atomic<std::uint32_t> stage;  // meetings that the owner has come to; it wraps around
  Notice notices[2];
  alignas(128) std::atomic<std::uint32_t> sleepers;  // who sleep on `stage`
  alignas(128) std::atomic<std::uint32_t> state;
  std::uint32_t failure_kind;
  std::int32_t failure_peer;
  std::uint32_t text_bytes;
  char text[kMaxText];
};

class Crew {
 public:
  static constexpr std::size_t kBoardBytes = 4096;
  static constexpr std::size_t kWindowBytes = std::size_t{3} << 20;
  static constexpr std::size_t kMaxSlotBytes = kWindowBytes / 3;
  static constexpr std::size_t kReservedBytes = kBoardBytes + kWindowBytes;

  explicit Crew(Heap& own);
  ~Crew();

  // Members are added once each, by rank in rising order, this rank itself (with an empty mapping) among them.
  void add(int rank, pid_t pid, Mapping mapping);

  std::size_t size() const { return members_.size(); }
  std::size_t me() const { return me_; }
  int rank(std::size_t member) const { return members_[member].rank; }
  std::byte* base(std::size_t member) const { return members_[member].base; }
  std::size_t heap_bytes(std::size_t member) const {
    return member == me_ ? own_.bytes() : members_[member].mapping.bytes();
  }

  // Where this rank writes the `bytes` (kMaxSlotBytes or less) that it will show at the next meeting. All members ask
  // for the same, once before each meeting, also those that have nothing to show; or none does.
  std::byte* slot(std::size_t bytes);
  // Copies into a slot.
  Giver& giver() { return giver_; }
  // What a member has shown at the last meeting.
  const std::byte* shown(std::size_t member) const { return window(member) + shown_; }

  void meet(Watch& watch);
  // The first meeting of an operation: throws Failure(mismatch) if not all members are in the same one.
  void meet(const Notice& mine, Watch& watch);
  const Notice& notice(std::size_t member) const { return board(member).notices[stage_ & 1]; }

  // How many bytes each rank should bring to a meeting of a long operation: few enough to stay in the cache, enough to
  // make the meeting worth its cost.
  std::size_t chunk_bytes() const { return chunk_bytes_; }

  // Throws Failure if a member has died, or has failed and says why.
  void check() const;
  bool has_left(int rank) const;
  // Those who have not come to the meeting that this rank waits in, with what is known of each.
  std::string absent(int* first) const;

  int stopped() const;  // a member whose process is stopped, or -1
  // In a forked child: lets go of descriptors.
  void forsake();

  // Tell the others, who find it when they wait.
  void tell_failure(const Failure& failure);
  void tell_leaving();

 private:
  struct Member {
    int rank;
    pid_t pid;
    int pidfd;
    std::byte* base;
    Mapping mapping;
  };

  Board& board(std::size_t member) const { return *reinterpret_cast<Board*>(members_[member].base); }
  std::byte* window(std::size_t member) const { return members_[member].base + kBoardBytes; }
  bool has_come(std::size_t member, std::memory_order order) const {
    return static_cast<std::int32_t>(board(member).stage.load(order) - stage_) >= 0;
  }
  void advance();
  void await(std::size_t member, Watch& watch);
  void sleep_until_come(std::size_t member, Watch& watch);
  void set_state(Board::State state);

  Heap& own_;
  std::vector<Member> members_;
  std::size_t me_ = 0;
  std::uint32_t stage_ = 0;
  std::size_t shown_ = 0, next_ = 0, end_ = 0;  // places in the window: the last slot, the next one, and its end
  int spins_ = 0;
  std::chrono::steady_clock::duration least_patience_{}, patience_{};  // of giving way before a sleep
  Giver giver_;
  std::size_t chunk_bytes_ = 0;
};

}  // namespace argosy
