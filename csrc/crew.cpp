#include "crew.h"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <system_error>

#include "futex.h"
#include "operation.h"

namespace argosy {
namespace {

constexpr auto kNap = std::chrono::milliseconds(20);  // a sleeper looks around this often

// [Note: how to wait for a member]
// A wait spins, then gives way, then sleeps. To wake a sleeper whose core has gone idle takes a hundred microseconds
// and more on a virtual machine, in which the one that woke it may fall asleep itself, waiting for it: then each waits
// for the other to wake up, in every operation, and what takes 70 microseconds takes 700. So a sleep that was short
// shows that the wait was given up too early, and the next ones give way longer before they sleep; a long sleep, that
// less would do.
//
// Giving way is measured in time and not in turns: where others compute, one turn takes as long as they like.
//
// While nobody waits for an operation, its rank computes, mostly on the core that a wait would take from it: then a
// wait sleeps at once.
using Clock = std::chrono::steady_clock;
constexpr int kFewSpins = 20;
constexpr auto kShortSleep = std::chrono::milliseconds(1);
constexpr Clock::duration kLeastPatience = std::chrono::microseconds(100),
                          kMostPatience = std::chrono::microseconds(1600);

static_assert(sizeof(Board) <= Crew::kBoardBytes);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// The letter that the kernel shows for a process's state: T is stopped, Z and X are dead.
char process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t end = text.rfind(')');
  return end != std::string::npos && end + 2 < text.size() ? text[end + 2] : '?';
}

}  // namespace

Crew::Crew(Heap& own) : own_(own) {}

Crew::~Crew() {
  for (const Member& member : members_) {
    if (member.pidfd >= 0) close(member.pidfd);
  }
}

void Crew::add(int rank, pid_t pid, Mapping mapping) {
  int pidfd = -1;
  std::byte* base = mapping.base();
  if (base == nullptr) {
    base = own_.base();
    me_ = members_.size();
  } else {
    pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (pidfd < 0 && errno == ESRCH) {
      throw Failure(Failure::Kind::lost, rank, "rank " + std::to_string(rank) + " has died while the group was joined");
    }
    if (pidfd < 0)
      throw std::system_error(errno, std::generic_category(), "pidfd_open of rank " + std::to_string(rank));
  }
  members_.push_back({rank, pid, pidfd, base, std::move(mapping)});
  // With a core for each, a peer comes within microseconds, or is far away. With fewer, it may need this very core.
  const bool crowded = static_cast<int>(members_.size()) > usable_cores();
  spins_ = crowded ? kFewSpins : 400;
  least_patience_ = crowded ? kMostPatience : kLeastPatience;
  patience_ = least_patience_;
  chunk_bytes_ = std::size_t{512} << 10;
}

void Crew::advance() {
  giver_.settle();
  Board& mine = board(me_);
  mine.stage.store(++stage_, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(mine.stage);
}

std::byte* Crew::slot(std::size_t bytes) {
  const std::size_t lines = (bytes + 63) / 64 * 64;
  // A slot is a third of the window at most: if it does not fit behind the last one, there is room for it before that.
  next_ = end_ + lines <= kWindowBytes ? end_ : 0;
  end_ = next_ + lines;
  return window(me_) + next_;
}

void Crew::meet(Watch& watch) {
  advance();
  shown_ = next_;
  for (std::size_t member = 0; member < members_.size(); ++member) {
    if (!has_come(member, std::memory_order_acquire)) await(member, watch);
  }
}

void Crew::meet(const Notice& mine, Watch& watch) {
  board(me_).notices[(stage_ + 1) & 1] = mine;
  meet(watch);
  for (std::size_t member = 0; member < members_.size(); ++member) {
    const Notice& other = notice(member);
    if (other.sequence == mine.sequence && other.operation == mine.operation && other.count == mine.count) continue;
    throw differ(rank(me_), mine, rank(member), other);
  }
}

void Crew::await(std::size_t member, Watch& watch) {
  const bool hurried = watch.hurried();
  for (int turn = 0; turn < (hurried ? spins_ : kFewSpins); ++turn) {
    relax();
    if (has_come(member, std::memory_order_acquire)) return;
  }
  if (!hurried) return sleep_until_come(member, watch);
  const auto begin = Clock::now();
  auto now = begin;
  for (; now - begin < patience_; now = Clock::now()) {
    sched_yield();
    if (has_come(member, std::memory_order_acquire)) return;
  }
  sleep_until_come(member, watch);
  const bool brief = Clock::now() - now < kShortSleep;
  patience_ = brief ? std::min(2 * patience_, kMostPatience) : std::max(patience_ / 2, least_patience_);
}

void Crew::sleep_until_come(std::size_t member, Watch& watch) {
  Board& theirs = board(member);
  while (true) {
    theirs.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = theirs.stage.load(std::memory_order_seq_cst);
    const bool come = static_cast<std::int32_t>(seen - stage_) >= 0;
    if (!come) futex_wait(theirs.stage, seen, kNap);
    theirs.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (come || has_come(member, std::memory_order_acquire)) return;
    watch.check(rank(member));
  }
}

bool Crew::has_left(int rank) const {
  const auto found =
      std::find_if(members_.begin(), members_.end(), [&](const Member& member) { return member.rank == rank; });
  if (found == members_.end()) return false;
  return reinterpret_cast<const Board*>(found->base)->state.load(std::memory_order_acquire) == Board::left;
}

void Crew::check() const {
  for (std::size_t member = 0; member < members_.size(); ++member) {
    if (member == me_) continue;
    const Board& theirs = board(member);
    const std::uint32_t state = theirs.state.load(std::memory_order_acquire);
    if (state == Board::failed) {
      const std::size_t bytes = std::min<std::size_t>(theirs.text_bytes, Board::kMaxText);
      // What blames this rank reads oddly here, unless it is said who does.
      const std::string who =
          theirs.failure_peer == rank(me_) ? "rank " + std::to_string(rank(member)) + " says: " : "";
      const bool known = theirs.failure_kind <= static_cast<std::uint32_t>(Failure::Kind::corrupt);
      throw Failure(known ? static_cast<Failure::Kind>(theirs.failure_kind) : Failure::Kind::aborted,
                    theirs.failure_peer, who + std::string(theirs.text, bytes));
    }
    if (state == Board::left) continue;
    pollfd life{members_[member].pidfd, POLLIN, 0};
    if (poll(&life, 1, 0) > 0 && theirs.state.load(std::memory_order_acquire) == Board::working) {
      throw Failure(
          Failure::Kind::lost, rank(member),
          "rank " + std::to_string(rank(member)) + " (process " + std::to_string(members_[member].pid) + ") has died");
    }
  }
}

int Crew::stopped() const {
  const auto found = std::find_if(members_.begin(), members_.end(),
                                  [](const Member& member) { return process_state(member.pid) == 'T'; });
  return found == members_.end() ? -1 : found->rank;
}

void Crew::forsake() {
  for (const Member& member : members_) {
    if (member.pidfd >= 0) close(member.pidfd);
  }
}

std::string Crew::absent(int* first) const {
  std::string text;
  for (std::size_t member = 0; member < members_.size(); ++member) {
    if (member == me_ || has_come(member, std::memory_order_acquire)) continue;
    const bool stopped = process_state(members_[member].pid) == 'T';
    if (*first < 0) *first = rank(member);
    if (!text.empty()) text += ", ";
    text += "rank " + std::to_string(rank(member)) + " (process " + std::to_string(members_[member].pid) +
            (stopped ? ", which is stopped)" : ")");
  }
  return text;
}

void Crew::set_state(Board::State state) {
  Board& mine = board(me_);
  mine.state.store(state, std::memory_order_release);
  futex_wake_all(mine.stage);
}

void Crew::tell_failure(const Failure& failure) {
  Board& mine = board(me_);
  if (mine.state.load(std::memory_order_relaxed) != Board::working) return;
  const std::string text = failure.what();
  mine.failure_kind = static_cast<std::uint32_t>(failure.kind);
  mine.failure_peer = failure.peer;
  mine.text_bytes = static_cast<std::uint32_t>(std::min(text.size(), Board::kMaxText));
  std::memcpy(mine.text, text.data(), mine.text_bytes);
  set_state(Board::failed);
}

void Crew::tell_leaving() {
  if (board(me_).state.load(std::memory_order_relaxed) == Board::working) set_state(Board::left);
}

}  // namespace argosy
