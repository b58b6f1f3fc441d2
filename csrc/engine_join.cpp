// How an engine comes to its peers, and lets go of them: memory of those on this host, sockets to all others.
#include <unistd.h>

#include <stdexcept>
#include <utility>

#include "engine.h"
#include "local.h"
#include "shm_link.h"
#include "tcp_link.h"

namespace argosy {
namespace {

// Rings for collectives and for messages between two members of a crew: in each heap, a pair for each rank.
constexpr std::size_t kRingSlots = 4, kRingSlotBytes = 256 << 10;

std::size_t ring_bytes() { return (Ring::bytes(kRingSlots, kRingSlotBytes) + 4095) / 4096 * 4096; }

Ring* ring(std::byte* base, int to, bool messages) {
  return reinterpret_cast<Ring*>(base + Crew::kReservedBytes + (2 * to + (messages ? 1 : 0)) * ring_bytes());
}

}  // namespace

Engine::Engine(int rank, int size)
    : rank_(rank),
      size_(size),
      owner_(getpid()),
      heap_(Crew::kReservedBytes + 2 * static_cast<std::size_t>(size) * ring_bytes()),
      crew_(heap_),
      wide_(rank, size),
      post_(rank),
      keeper_(rank) {}

// Whoever drops a group without closing it does not wait for what it has started.
Engine::~Engine() {
  leave(false);
  for (const auto& [peer, fds] : sockets_) {
    for (const int fd : fds) ::close(fd);
  }
}

void Engine::forsake() {
  wide_.forsake();
  post_.forsake();
  keeper_.forsake();
  crew_.forsake();
  heap_.forsake();
}

bool Engine::owned() const { return getpid() == owner_; }

bool Engine::map_peer(int rank, pid_t pid, int fd, std::size_t bytes, const Nonce& nonce) {
  Mapping mapping = argosy::map_peer(pid, fd, bytes, nonce);
  if (mapping.base() == nullptr) return false;
  mapped_[rank] = {pid, std::move(mapping)};
  return true;
}

std::byte* Engine::heap_of(int rank) const {
  for (std::size_t member = 0; member < crew_.size(); ++member) {
    if (crew_.rank(member) == rank) return crew_.base(member);
  }
  throw std::invalid_argument("rank " + std::to_string(rank) + " is on another host");
}

void Engine::set_hosts(std::vector<int> host_of_rank) {
  if (host_of_rank.size() != static_cast<std::size_t>(size_))
    throw std::invalid_argument("give the host of every rank");
  host_of_rank_ = std::move(host_of_rank);
}

void Engine::add_sockets(int rank, std::vector<int> fds) {
  if (fds.size() < 3) throw std::invalid_argument("a peer on another host needs three sockets or more");
  sockets_[rank] = std::move(fds);
}

void Engine::start() {
  try {
    start_links();
  } catch (const Failure& why) {
    throw OperationFailed(why, 0, "joining the group");
  }
}

void Engine::start_links() {
  if (host_of_rank_.empty()) throw std::logic_error("set_hosts comes before start");
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) {
      crew_.add(rank, owner_, {});
    } else if (host_of_rank_[rank] == host_of_rank_[rank_]) {
      const auto found = mapped_.find(rank);
      if (found == mapped_.end()) throw std::invalid_argument("rank " + std::to_string(rank) + " is not mapped");
      std::byte* const base = found->second.second.base();
      crew_.add(rank, found->second.first, std::move(found->second.second));
      const auto link = [&](bool messages) {
        return std::make_unique<ShmLink>(rank, rank_, ring(heap_.base(), rank, messages), ring(base, rank_, messages),
                                         kRingSlots, kRingSlotBytes);
      };
      wide_.add(rank, link(false));
      post_.add(rank, link(true));
    } else {
      const auto found = sockets_.find(rank);
      if (found == sockets_.end()) throw std::invalid_argument("rank " + std::to_string(rank) + " has no sockets");
      const std::vector<int> fds = std::move(found->second);
      sockets_.erase(found);
      keeper_.add(rank, fds.front());
      wide_.add(rank, std::make_unique<TcpLink>(rank, rank_, std::vector<int>(fds.begin() + 1, fds.end() - 1)));
      post_.add(rank, std::make_unique<TcpLink>(rank, rank_, std::vector<int>{fds.back()}));
    }
  }
  mapped_.clear();  // of ranks that count as another host after all
  if (crew_.size() > Local::kMaxMembers) throw std::invalid_argument("more than 1024 ranks on a host");
  keeper_.start();
}

}  // namespace argosy
