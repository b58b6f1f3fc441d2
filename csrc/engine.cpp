#include "engine.h"

#include <unistd.h>

#include <stdexcept>

#include "reduce.h"

namespace argosy {

Engine::Engine(int rank, int size)
    : rank_(rank), size_(size), owner_(getpid()), heap_(Crew::kReservedBytes), crew_(heap_) {}

Engine::~Engine() {
  if (!owned()) {
    // The thread, if there is one, exists in the parent only: there is nothing to join.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  close();
}

bool Engine::owned() const { return getpid() == owner_; }

bool Engine::map_peer(int rank, pid_t pid, int fd, std::size_t bytes, const Nonce& nonce) {
  Mapping mapping = argosy::map_peer(pid, fd, bytes, nonce);
  if (mapping.base() == nullptr) return false;
  mapped_[rank] = {pid, std::move(mapping)};
  return true;
}

void Engine::set_hosts(std::vector<int> host_of_rank) {
  if (host_of_rank.size() != static_cast<std::size_t>(size_))
    throw std::invalid_argument("give the host of every rank");
  host_of_rank_ = std::move(host_of_rank);
}

void Engine::start() {
  if (host_of_rank_.empty()) throw std::logic_error("set_hosts comes before start");
  for (int rank = 0; rank < size_; ++rank) {
    if (host_of_rank_[rank] != host_of_rank_[rank_]) continue;
    if (rank == rank_) {
      crew_.add(rank, owner_, {});
    } else {
      const auto found = mapped_.find(rank);
      if (found == mapped_.end()) throw std::invalid_argument("rank " + std::to_string(rank) + " is not mapped");
      crew_.add(rank, found->second.first, std::move(found->second.second));
    }
  }
  mapped_.clear();
}

void Engine::run(Request request) {
  Lock lock(mutex_);
  if (running_ || !queue_.empty()) {
    lock.unlock();
    return wait(submit(std::move(request)), {});
  }
  running_ = true;
  const std::uint64_t sequence = ++sequence_;
  lock.unlock();
  const auto finish = [&] {
    lock.lock();
    running_ = false;
    if (!queue_.empty()) changed_.notify_all();
  };
  try {
    execute(request, sequence);
  } catch (...) {
    finish();
    throw;
  }
  finish();
}

std::shared_ptr<Ticket> Engine::submit(Request request) {
  auto ticket = std::make_shared<Ticket>(std::move(request));
  const Lock lock(mutex_);
  if (closing_) throw std::logic_error("the group is closed");
  ticket->sequence = ++sequence_;
  queue_.push_back(ticket);
  if (!thread_.joinable()) thread_ = std::thread(&Engine::work, this);
  changed_.notify_all();
  return ticket;
}

// Runs the oldest operation. The lock is held before and after, and not meanwhile.
void Engine::run_front(Lock& lock) {
  const std::shared_ptr<Ticket> ticket = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  lock.unlock();
  try {
    execute(ticket->request, ticket->sequence);
  } catch (...) {
    ticket->error = std::current_exception();
  }
  lock.lock();
  running_ = false;
  ticket->done.store(true, std::memory_order_release);
  changed_.notify_all();
}

void Engine::wait(const std::shared_ptr<Ticket>& ticket, std::optional<double> timeout_seconds) {
  const auto begin = std::chrono::steady_clock::now();
  Lock lock(mutex_);
  while (!ticket->done.load(std::memory_order_acquire)) {
    if (!running_ && !queue_.empty()) {
      run_front(lock);
      continue;
    }
    changed_.wait_for(lock, std::chrono::milliseconds(20));
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if (!ticket->done && timeout_seconds && waited.count() > *timeout_seconds) {
      throw OperationFailed(Failure(Failure::Kind::timeout, -1, "it is not done within the time given to wait()"),
                            ticket->sequence, describe(ticket->request.operation.packed(), ticket->request.count));
    }
    if (idle_hook_) {
      lock.unlock();
      idle_hook_();
      lock.lock();
    }
  }
  if (ticket->error) std::rethrow_exception(ticket->error);
}

void Engine::work() {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !running_ && (closing_ || !queue_.empty()); });
    if (queue_.empty()) return;
    run_front(lock);
  }
}

void Engine::abort(const std::string& reason) { fail(Failure(Failure::Kind::aborted, rank_, reason)); }

void Engine::close() {
  {
    Lock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  if (crew_.size() > 0) crew_.tell_leaving();
  fail(Failure(Failure::Kind::aborted, rank_, "the group is closed"));
}

bool Engine::broken() { return broken_; }

void Engine::fail(const Failure& failure) {
  const std::lock_guard lock(failure_mutex_);
  if (failure_) return;
  failure_ = failure;
  broken_ = true;
  if (crew_.size() > 0) crew_.tell_failure(failure);
}

void Engine::check(int peer) {
  if (broken_) {
    const std::lock_guard lock(failure_mutex_);
    throw Failure(*failure_);
  }
  crew_.check(peer);
  if (idle_hook_) idle_hook_();
  check_deadline(peer);
}

void Engine::check_deadline(int peer) {
  const auto now = std::chrono::steady_clock::now();
  if (!deadline_) {
    // The first look comes soon after the wait began: a clock is not read before it is needed.
    deadline_ = now + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                          std::chrono::duration<double>(timeout_seconds_));
  }
  if (now < *deadline_) return;
  int first = -1;
  const std::string absent = crew_.absent(&first);
  char seconds[32];
  snprintf(seconds, sizeof seconds, "%g", timeout_seconds_);
  throw Failure(
      Failure::Kind::timeout, first >= 0 ? first : peer,
      "waited " + std::string(seconds) + " s for " + (absent.empty() ? "rank " + std::to_string(peer) : absent));
}

void Engine::execute(const Request& request, std::uint64_t sequence) {
  const auto failed = [&](const Failure& why) {
    return OperationFailed(why, sequence, describe(request.operation.packed(), request.count));
  };
  if (broken_) {
    const std::lock_guard lock(failure_mutex_);
    throw failed(*failure_);
  }
  timeout_seconds_ = request.timeout_seconds;
  deadline_.reset();
  try {
    dispatch(request, {sequence, request.operation.packed(), request.count, Notice::kElsewhere});
  } catch (const Failure& why) {
    fail(why);
    throw failed(why);
  } catch (...) {
    fail(Failure(Failure::Kind::aborted, rank_, "rank " + std::to_string(rank_) + " was interrupted"));
    throw;
  }
}

void Engine::dispatch(const Request& request, const Notice& notice) {
  const Operation& what = request.operation;
  const std::size_t element = element_bytes(what.dtype), members = crew_.size();
  Local local(crew_, heap_, *this);
  const auto reduction = [&] { return Local::Reduction{find_reduce_kernel(what.op, what.dtype), element}; };
  switch (what.collective) {
    case Collective::all_reduce:
      return local.all_reduce(notice, reduction(), request.out, request.count);
    case Collective::reduce:
      return local.reduce(notice, reduction(), request.out, request.count, what.root);
    case Collective::reduce_scatter:
      return local.reduce_parts(notice, reduction(), request.in, {request.count * members, members}, request.out);
    case Collective::all_gather:
      return local.gather_parts(notice, element, request.in, {request.count * members, members}, request.out);
    case Collective::broadcast:
      return local.broadcast(notice, request.out, request.count * element, what.root);
    case Collective::gather:
      return local.gather(notice, request.in, request.out, request.count * element, what.root);
    case Collective::scatter:
      return local.scatter(notice, request.in, request.out, request.count * element, what.root);
    case Collective::all_to_all:
      return local.all_to_all(notice, request.in, request.in_bytes, request.out, request.out_bytes);
    case Collective::barrier:
      return local.barrier(notice);
    case Collective::message:
      break;
  }
  throw std::logic_error("this operation is not run here");
}

}  // namespace argosy
