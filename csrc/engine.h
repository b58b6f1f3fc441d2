// The engine: one per group and process. It runs operations one after the other, in the caller or on a thread of its
// own.
//
// A synchronous operation runs in its caller. A started one waits in a queue; a thread of the engine takes it from
// there, unless somebody comes to wait for it first: then the waiting caller does the work itself. Whoever runs an
// operation holds the role of the runner, so that operations begin in the order in which they were called, on all ranks
// alike. Messages between two ranks have no part in this order.
//
// A failure breaks the group: every later operation fails with the same reason, and so do the peers', who are told.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "crew.h"
#include "heap.h"
#include "keeper.h"
#include "operation.h"
#include "post.h"
#include "wide.h"

namespace argosy {

struct Request {
  Operation operation;    // its algorithm is 0 inside one host: the crew's memory is all that is needed
  std::size_t count = 0;  // elements: of the tensor, or of each rank's part where the parts are equal
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::vector<std::size_t> in_bytes, out_bytes;  // all_to_all: what goes to each rank, and comes from each
  double timeout_seconds = 0;
  std::shared_ptr<const Plan> plan;  // of an algorithm other than 0; found when the request is made
  std::shared_ptr<void> keep;        // whatever must live until the operation is done
};

// A failure, and the operation in which it was noticed.
struct OperationFailed : Failure {
  OperationFailed(const Failure& why, std::uint64_t sequence, std::string operation)
      : Failure(why), sequence(sequence), operation(std::move(operation)) {}
  std::uint64_t sequence;
  std::string operation;
};

// An operation that was started.
struct Ticket {
  explicit Ticket(Request request) : request(std::move(request)) {}
  Request request;
  std::uint64_t sequence = 0;
  std::atomic<bool> done = false;
  std::exception_ptr error;
};

class Engine {
 public:
  Engine(int rank, int size);
  ~Engine();

  // Joining: map the peers of this host, say who shares a host with whom, give the sockets to all others, start.
  Heap& heap() { return heap_; }
  bool map_peer(int rank, pid_t pid, int fd, std::size_t bytes, const Nonce& nonce);
  // Where this process sees the heap of a rank of this host.
  std::byte* heap_of(int rank) const;
  void set_hosts(std::vector<int> host_of_rank);
  // Connected sockets to a peer on another host: the first is the keeper's, the last for messages. Takes them over.
  void add_sockets(int rank, std::vector<int> fds);
  void start();
  void set_plan(const Operation& operation, Plan plan) { wide_.set_plan(operation, std::move(plan)); }

  void run(Request request);
  std::shared_ptr<Ticket> submit(Request request);
  // Throws what the operation threw. Without a time limit, the operation's own holds.
  void wait(const std::shared_ptr<Ticket>& ticket, std::optional<double> timeout_seconds);

  std::shared_ptr<Delivery> post(Delivery delivery);
  void wait(const std::shared_ptr<Delivery>& delivery, std::optional<double> timeout_seconds);
  bool done(const Delivery& delivery) { return post_.done(delivery); }

  // What was kept for operations that are done, to be dropped by the caller.
  std::vector<std::shared_ptr<void>> take_finished();

  // Fails all operations, those that wait and those to come, here and at the peers.
  void abort(const std::string& reason);
  // Leaves the group: peers that wait for this rank fail. Operations that were started are finished first.
  void close();
  // The same at once: what was started fails.
  void drop() { leave(false); }
  bool broken() const { return broken_; }
  // Whether what others read is written around the caches, for tests: see [Note: near and far] in giver.h.
  void write_around(bool around) { crew_.giver().force(around); }

  // A forked child has a copy of this object and no part in the group: it uses nothing of it but `forsake`, which lets
  // go of descriptors, lest the parent's connections outlive it. It never destroys it: threads and their locks are not
  // there.
  bool owned() const;
  void forsake();

  // Called now and then by a caller who waits, so that a signal can end the wait by an exception.
  void set_idle_hook(std::function<void()> hook) { idle_hook_ = std::move(hook); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  class Patience;

  void start_links();

  void check();
  [[noreturn]] void throw_late(int peer, double timeout_seconds, bool in_collective);
  std::uint64_t next_sequence(const Operation& operation);
  void execute(const Request& request, std::uint64_t sequence, bool in_caller);
  void dispatch(const Request& request, const Notice& notice, Watch& watch);
  Failure known_reason(const Failure& failure);
  bool remember(const Failure& failure);
  void fail(const Failure& failure);
  void run_front(Lock& lock, bool in_caller);
  void work();
  void carry_messages();
  void leave(bool in_peace);

  const int rank_, size_;
  const pid_t owner_;
  Heap heap_;
  Crew crew_;
  Wide wide_;
  Post post_;
  Keeper keeper_;
  std::map<int, std::pair<pid_t, Mapping>> mapped_;
  std::map<int, std::vector<int>> sockets_;
  std::vector<int> host_of_rank_;

  std::mutex mutex_;
  std::condition_variable changed_, posted_;
  std::deque<std::shared_ptr<Ticket>> queue_;
  std::thread thread_, postman_;
  bool running_ = false, closing_ = false;
  std::atomic<int> waiters_{0};  // callers who wait for an operation
  std::vector<std::shared_ptr<void>> finished_;
  std::mutex leaving_mutex_;
  std::uint64_t sequence_ = 0;

  std::mutex failure_mutex_;
  std::atomic<bool> broken_ = false;
  std::optional<Failure> failure_;

  std::function<void()> idle_hook_;
};

}  // namespace argosy
