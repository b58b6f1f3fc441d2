// Which steps the clients of a server have done: what makes a pull wait, and a gathered step apply.
//
// [Note: clocks and gates]
// A client's clock is the number of steps that it has done. A pull names two numbers and waits for both: `own`, which
// this client's clock must have reached, and `all`, which every client's clock must have reached, or, where pushes are
// gathered, the number of steps that were applied (the version). A client that has left or is lost counts as infinitely
// far ahead; so does one that rests, which has no samples to train on, until it goes on. All consistencies are made of
// this: see docs/design/0008-parameter-server.md.
//
// [Note: gathered steps]
// With `aggregate` > 0 a client's pushes are kept until it has done the step. As soon as so many clients have done it,
// the step is closed: their pushes are merged and applied, by the thread that brought the last of them, and the version
// goes up. Those who are done with a closed step are late: their pushes are dropped and counted. Of several servers,
// the first one decides who is late, and clients tell the others: a gradient is in a step everywhere or nowhere.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ps_merge.h"

namespace argosy {

class PsSteps {
 public:
  static constexpr std::size_t kStaleness = 65;  // the last one counts 64 and more

  PsSteps(std::uint32_t workers, std::uint32_t aggregate);

  bool gathers() const { return aggregate_ > 0; }
  std::uint32_t workers() const { return static_cast<std::uint32_t>(clients_.size()); }

  // A connection of the client begins: one that was lost is back, with its clock. Returns a number for `ended`.
  std::uint64_t joined(std::uint32_t client);
  // A connection ends: the client is lost, if it has not left before, and not joined anew since.
  void ended(std::uint32_t client, std::uint64_t visit);
  void leave(std::uint32_t client);
  // Until it waits at the gate again, or has done another step.
  void rest(std::uint32_t client);
  void stop();  // all waits end

  // Waits at the gate. Throws PsRefusal(too_few) if it cannot open any more; returns false if `gone` says, or `stop`
  // was called, that nobody waits for the answer.
  bool wait(std::uint32_t client, std::uint64_t own, std::uint64_t all, const std::function<bool()>& gone);

  // Whether this push was seen before. `mark` remembers it, once it is applied or gathered.
  bool repeated(std::uint32_t client, bool range, std::uint32_t number, std::uint64_t sequence) const;
  void mark(std::uint32_t client, bool range, std::uint32_t number, std::uint64_t sequence);

  // Of a push that was applied at once, whose pull was answered with `basis`.
  void count_staleness(std::uint32_t client, std::uint64_t basis);
  void gather(std::uint32_t client, PsGathered push);
  // The client has done the step, which stands for `batches` of them in learning-rate schedules. Applies what is
  // complete by it. False if it is late, or was found to be so elsewhere.
  bool done(std::uint32_t client, std::uint64_t step, double weight, std::uint64_t batches = 1, bool late = false);

  std::uint64_t global_step() const;
  // How many steps of others were applied: the difference between two looks is the staleness of what lies between.
  std::uint64_t basis(std::uint32_t client, std::uint64_t& global_step) const;

  std::vector<std::uint32_t> lost() const;
  std::string json() const;  // the fields of stats, without braces

 private:
  struct Client {
    enum class State { awaited, here, left, lost } state = State::awaited;
    std::uint64_t clock = 0, dones = 0, visit = 0, late = 0;
    std::uint64_t lives = 0;  // how often it has joined anew after it had left
    bool rests = false;
    std::map<std::pair<bool, std::uint32_t>, std::uint64_t> next_sequence;
    std::vector<PsGathered> open;  // pushes of the step that it has not done yet

    bool gone() const { return state == State::left || state == State::lost; }
  };

  bool open_to(const Client& client, std::uint64_t own, std::uint64_t all) const;
  bool can_close() const;
  std::string who_is_gone() const;
  std::uint64_t basis_of(const Client& client) const;
  std::uint64_t step_of_all() const;
  void drop(const PsContribution& late);
  void apply_complete(std::unique_lock<std::mutex>& lock);
  void count_staleness_of(std::uint64_t now, std::uint64_t basis);

  const std::uint32_t aggregate_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::vector<Client> clients_;
  std::uint64_t dones_ = 0;
  double progress_ = 0;                     // batches, each divided by the number of clients that were there
  std::uint64_t version_ = 0, closed_ = 0;  // a step that is being applied is closed, and no version yet
  bool applying_ = false;
  std::map<std::uint64_t, std::vector<PsContribution>> pending_;  // by step, in order of arrival
  std::uint64_t late_steps_ = 0, late_pushes_ = 0, late_rows_ = 0, stalest_ = 0;
  std::vector<std::uint64_t> staleness_ = std::vector<std::uint64_t>(kStaleness);
};

}  // namespace argosy
