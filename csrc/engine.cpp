#include "engine.h"

#include <unistd.h>

#include <stdexcept>

#include "local.h"
#include "reduce.h"

namespace argosy {
namespace {

std::string seconds_text(double seconds) {
  char text[32];
  snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

// Somebody who waits, while this is there.
class Waiter {
 public:
  explicit Waiter(std::atomic<int>& count) : count_(count) { count_.fetch_add(1, std::memory_order_relaxed); }
  ~Waiter() { count_.fetch_sub(1, std::memory_order_relaxed); }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace

// The watch of one wait: sees the group's health, the caller's signals and the deadline.
class Engine::Patience final : public Watch {
 public:
  Patience(Engine& engine, std::optional<double> timeout_seconds, bool in_caller, bool in_collective)
      : engine_(engine), timeout_seconds_(timeout_seconds), in_caller_(in_caller), in_collective_(in_collective) {}

  void check(int peer) override {
    engine_.check();
    if (engine_.crew_.has_left(peer)) {
      // It may have done its part and left since the wait last looked: only the second look counts.
      if (seen_leaving_ == peer) {
        throw Failure(Failure::Kind::lost, peer, "rank " + std::to_string(peer) + " has left the group");
      }
      seen_leaving_ = peer;
    }
    if (in_caller_ && engine_.idle_hook_) engine_.idle_hook_();
    if (!timeout_seconds_) return;
    const auto now = std::chrono::steady_clock::now();
    // The first look comes soon after the wait began: a clock is not read before it is needed.
    if (!begin_) begin_ = now;
    if (std::chrono::duration<double>(now - *begin_).count() > *timeout_seconds_) {
      engine_.throw_late(peer, *timeout_seconds_, in_collective_);
    }
  }

  bool hurried() const override { return in_caller_ || engine_.waiters_.load(std::memory_order_relaxed) > 0; }

 private:
  Engine& engine_;
  std::optional<double> timeout_seconds_;
  bool in_caller_, in_collective_;
  int seen_leaving_ = -1;
  std::optional<std::chrono::steady_clock::time_point> begin_;
};

// An all_to_all between hosts has two numbers: for the sizes, and for the data.
std::uint64_t Engine::next_sequence(const Operation& operation) {
  const bool two = operation.collective == Collective::all_to_all && operation.algorithm != 0;
  return sequence_ += two ? 2 : 1;
}

void Engine::run(Request request) {
  request.plan = wide_.plan(request.operation);
  Lock lock(mutex_);
  if (running_ || !queue_.empty()) {
    lock.unlock();
    return wait(submit(std::move(request)), {});
  }
  running_ = true;
  const std::uint64_t sequence = next_sequence(request.operation);
  lock.unlock();
  const auto finish = [&] {
    lock.lock();
    running_ = false;
    if (!queue_.empty() || closing_) changed_.notify_all();
  };
  try {
    execute(request, sequence, true);
  } catch (...) {
    finish();
    throw;
  }
  finish();
}

std::shared_ptr<Ticket> Engine::submit(Request request) {
  request.plan = wide_.plan(request.operation);
  auto ticket = std::make_shared<Ticket>(std::move(request));
  const Lock lock(mutex_);
  ticket->sequence = next_sequence(ticket->request.operation);
  if (closing_) {
    const Failure why(Failure::Kind::aborted, rank_, "the group is closed");
    throw OperationFailed(why, ticket->sequence, describe(ticket->request.operation.packed(), ticket->request.count));
  }
  queue_.push_back(ticket);
  if (!thread_.joinable()) thread_ = std::thread(&Engine::work, this);
  changed_.notify_all();
  return ticket;
}

// Runs the oldest operation. The lock is held before and after, and not meanwhile.
void Engine::run_front(Lock& lock, bool in_caller) {
  const std::shared_ptr<Ticket> ticket = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  lock.unlock();
  std::exception_ptr interrupted;
  try {
    execute(ticket->request, ticket->sequence, in_caller);
  } catch (const OperationFailed&) {
    ticket->error = std::current_exception();
  } catch (...) {  // a signal: it is for whoever waits here, and the operation may be another's
    interrupted = std::current_exception();
    const Failure why(Failure::Kind::aborted, rank_, "rank " + std::to_string(rank_) + " was interrupted");
    const std::string what = describe(ticket->request.operation.packed(), ticket->request.count);
    ticket->error = std::make_exception_ptr(OperationFailed(why, ticket->sequence, what));
  }
  lock.lock();
  running_ = false;
  if (ticket->request.keep) finished_.push_back(std::move(ticket->request.keep));
  ticket->done.store(true, std::memory_order_release);
  changed_.notify_all();
  if (interrupted && in_caller) std::rethrow_exception(interrupted);
}

std::vector<std::shared_ptr<void>> Engine::take_finished() {
  std::vector<std::shared_ptr<void>> finished = post_.take_finished();
  const Lock lock(mutex_);
  finished.insert(finished.end(), std::make_move_iterator(finished_.begin()), std::make_move_iterator(finished_.end()));
  finished_.clear();
  return finished;
}

void Engine::wait(const std::shared_ptr<Ticket>& ticket, std::optional<double> timeout_seconds) {
  const auto begin = std::chrono::steady_clock::now();
  const Waiter waiter(waiters_);
  Lock lock(mutex_);
  while (!ticket->done.load(std::memory_order_acquire)) {
    // An operation runs up to its own deadline: a caller who waits less long leaves it to the engine's thread.
    if (!timeout_seconds && !running_ && !queue_.empty()) {
      run_front(lock, true);
      continue;
    }
    changed_.wait_for(lock, std::chrono::milliseconds(20));
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if (!ticket->done && timeout_seconds && waited.count() > *timeout_seconds) {
      throw OperationFailed(Failure(Failure::Kind::timeout, -1, "it is not done within the time given to wait"),
                            ticket->sequence, describe(ticket->request.operation.packed(), ticket->request.count));
    }
    if (idle_hook_ && !ticket->done) {
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
    run_front(lock, false);
  }
}

std::shared_ptr<Delivery> Engine::post(Delivery delivery) {
  const char* const what = delivery.sending ? "send" : "receive";
  const std::uint64_t tag = delivery.tag;
  if (broken_) {
    const std::lock_guard lock(failure_mutex_);
    throw OperationFailed(*failure_, tag, what);
  }
  std::shared_ptr<Delivery> posted;
  try {
    posted = post_.post(std::move(delivery));
  } catch (const Failure& why) {
    fail(why);
    throw OperationFailed(why, tag, what);
  }
  const Lock lock(mutex_);
  if (!postman_.joinable() && !closing_) postman_ = std::thread(&Engine::carry_messages, this);
  posted_.notify_all();
  return posted;
}

void Engine::wait(const std::shared_ptr<Delivery>& delivery, std::optional<double> timeout_seconds) {
  Patience patience(*this, timeout_seconds.value_or(delivery->timeout_seconds), true, false);
  try {
    post_.wait(delivery, patience);
  } catch (const Failure& why) {
    const Failure reason = known_reason(why);
    fail(reason);
    throw OperationFailed(reason, delivery->tag, delivery->sending ? "send" : "receive");
  } catch (...) {
    fail(Failure(Failure::Kind::aborted, rank_, "rank " + std::to_string(rank_) + " was interrupted"));
    throw;
  }
}

void Engine::carry_messages() {
  Patience patience(*this, {}, false, false);
  while (true) {
    {
      Lock lock(mutex_);
      posted_.wait(lock, [&] { return closing_ || post_.pending(); });
      if (closing_) return;
    }
    try {
      post_.drain(patience);
    } catch (const Failure& why) {
      fail(known_reason(why));
      return;
    } catch (const std::exception& error) {
      fail(Failure(Failure::Kind::aborted, rank_, error.what()));
      return;
    }
  }
}

void Engine::abort(const std::string& reason) { fail(Failure(Failure::Kind::aborted, rank_, reason)); }

void Engine::close() { leave(true); }

// In peace: after the operations and messages that were started. Otherwise they fail.
void Engine::leave(bool in_peace) {
  const std::lock_guard once(leaving_mutex_);
  const Failure closed(Failure::Kind::aborted, rank_, "the group is closed");
  if (in_peace) {
    while (!broken_ && post_.sending()) std::this_thread::sleep_for(std::chrono::microseconds(200));
  } else {
    remember(closed);
  }
  {
    const Lock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    posted_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  if (crew_.size() > 0) crew_.tell_leaving();
  keeper_.tell_leaving();
  remember(closed);
  if (postman_.joinable()) postman_.join();
  wide_.shut();
  post_.shut();
}

// Whether this is the first.
bool Engine::remember(const Failure& failure) {
  const std::lock_guard lock(failure_mutex_);
  if (failure_) return false;
  failure_ = failure;
  broken_ = true;
  return true;
}

void Engine::fail(const Failure& failure) {
  if (!remember(failure)) return;
  heap_.detach();
  if (crew_.size() > 0) crew_.tell_failure(failure);
  keeper_.tell_failure(failure);
}

void Engine::check() {
  if (broken_) {
    const std::lock_guard lock(failure_mutex_);
    throw Failure(*failure_);
  }
  crew_.check();
  keeper_.check();
}

// A connection that ends is often the echo of another failure, which its peer has told before it went.
Failure Engine::known_reason(const Failure& failure) {
  if (failure.kind != Failure::Kind::lost) return failure;
  return keeper_.told_by(failure.peer).value_or(failure);
}

// In a collective, who has merely not come or does not send may wait for another: to blame is one that is stopped, or
// else silent. A message is its peer's.
void Engine::throw_late(int peer, double timeout_seconds, bool in_collective) {
  int late = -1, mute = -1;
  std::string who;
  const auto add = [&](const std::string& more) {
    if (!more.empty()) who += (who.empty() ? "" : ", ") + more;
  };
  if (in_collective) {
    add(crew_.absent(&late));
  } else if (peer >= 0) {
    add("rank " + std::to_string(peer));
  }
  const int stopped = crew_.stopped();
  if (stopped >= 0 && who.find("stopped") == std::string::npos) {
    add("rank " + std::to_string(stopped) + " (which is stopped)");
  }
  add(keeper_.silent(&mute));
  if (who.empty()) who = peer >= 0 ? "rank " + std::to_string(peer) : "its peers";
  int named = stopped >= 0 ? stopped : mute >= 0 ? mute : late >= 0 ? late : peer;
  if (!in_collective && peer >= 0) named = peer;
  throw Failure(Failure::Kind::timeout, named, "waited " + seconds_text(timeout_seconds) + " for " + who);
}

void Engine::execute(const Request& request, std::uint64_t sequence, bool in_caller) {
  const auto failed = [&](const Failure& why) {
    return OperationFailed(why, sequence, describe(request.operation.packed(), request.count));
  };
  if (broken_) {
    const std::lock_guard lock(failure_mutex_);
    throw failed(*failure_);
  }
  Patience patience(*this, request.timeout_seconds, in_caller, true);
  const Notice notice{sequence, request.operation.packed(), request.count};
  keeper_.tell_operation(notice);
  try {
    dispatch(request, notice, patience);
  } catch (const Failure& why) {
    const Failure reason = known_reason(why);
    fail(reason);
    throw failed(reason);
  } catch (...) {
    fail(Failure(Failure::Kind::aborted, rank_, "rank " + std::to_string(rank_) + " was interrupted"));
    throw;
  }
}

void Engine::dispatch(const Request& request, const Notice& notice, Watch& watch) {
  const Operation& what = request.operation;
  const std::size_t element = element_bytes(what.dtype), members = crew_.size();
  Local local(crew_, heap_, watch);
  if (what.algorithm != 0) return wide_.run(request, notice, local, watch);
  if (members != static_cast<std::size_t>(size_)) throw std::invalid_argument("several hosts need an algorithm");
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
  throw std::logic_error("messages are posted, not run");
}

}  // namespace argosy
