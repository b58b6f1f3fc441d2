// Collectives over links: each rank runs its part of a schedule, whatever connects it to its peers.
//
// A hierarchical plan has steps between hosts only. Inside the host the crew's memory does the rest: members reduce to
// the owners of the parts before, and take the result from them afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "link.h"
#include "local.h"
#include "operation.h"
#include "program.h"
#include "watch.h"

namespace argosy {

// One rank's steps of a schedule, in slots: the buffer is cut into so many equal ones.
struct Plan {
  struct Part {
    Step::Kind kind;
    int peer;
    std::size_t begin, width;
  };
  std::size_t slots = 1;
  std::size_t owners = 0;  // of a hierarchical plan: so many members of each host own a part; otherwise 0
  std::vector<Part> parts;
};

struct Request;

class Wide {
 public:
  Wide(int rank, int size) : rank_(rank), size_(size) {}

  void add(int peer, std::unique_ptr<Link> link) { links_[peer] = std::move(link); }

  void shut() {
    for (const auto& [peer, link] : links_) link->shut();
  }

  void forsake() {
    for (const auto& [peer, link] : links_) link->forsake();
  }

  // A plan is for a collective, an algorithm and a root. Threads may set plans while others look for them.
  void set_plan(const Operation& operation, Plan plan) {
    const std::lock_guard lock(mutex_);
    plans_[key(operation)] = std::make_shared<const Plan>(std::move(plan));
  }
  // Null if the operation needs none.
  std::shared_ptr<const Plan> plan(const Operation& operation) const {
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(key(operation));
    return found != plans_.end() ? found->second : nullptr;
  }

  void run(const Request& request, const Notice& notice, Local& local, Watch& watch);

 private:
  struct Context;  // of one operation: what all steps of it need

  static std::uint64_t key(const Operation& operation) {
    return Operation{operation.collective, DType{}, Op{}, operation.algorithm, operation.root}.packed();
  }
  std::vector<Step> steps(const Plan& plan, std::byte* data, std::size_t count, std::size_t element) const;
  void go(const std::vector<Step>& steps, const Context& context, std::uint64_t earlier = 0);
  void compare_splits(const Context& context);

  void all_reduce(const Context& context);
  void hierarchical(const Context& context, const Plan& plan, const Request& request);
  void reduce(const Context& context);
  void reduce_scatter(const Context& context);
  void all_gather(const Context& context);
  void all_to_all(const Context& context);
  void gather(const Context& context);
  void scatter(const Context& context);

  const int rank_, size_;
  std::map<int, std::unique_ptr<Link>> links_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<const Plan>> plans_;
};

}  // namespace argosy
