#include "ps_steps.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "ps_wire.h"

namespace argosy {
namespace {

constexpr double kRounding = 1e-6;                              // three thirds are one
constexpr auto kBetweenLooks = std::chrono::milliseconds(100);  // at whether the one who waits is still there

template <class Numbers>
std::string json_list(const Numbers& numbers) {
  std::string text = "[";
  for (const auto number : numbers) text.append(text.size() > 1 ? "," : "").append(std::to_string(number));
  return text + "]";
}

}  // namespace

PsSteps::PsSteps(std::uint32_t workers, std::uint32_t aggregate) : aggregate_(aggregate), clients_(workers) {
  if (workers == 0) throw std::invalid_argument("a parameter server needs 1 worker or more");
  if (aggregate > workers) {
    throw std::invalid_argument("aggregate is " + std::to_string(aggregate) + ": there are only " +
                                std::to_string(workers) + " workers");
  }
}

std::uint64_t PsSteps::joined(std::uint32_t client) {
  const std::lock_guard lock(mutex_);
  Client& who = clients_.at(client);
  if (who.state != Client::State::here) ++who.visit;
  if (who.state == Client::State::left) ++who.lives;
  who.state = Client::State::here;
  return who.visit;
}

void PsSteps::ended(std::uint32_t client, std::uint64_t visit) {
  const std::lock_guard lock(mutex_);
  Client& who = clients_.at(client);
  if (who.visit != visit || who.state != Client::State::here) return;
  who.state = Client::State::lost;
  who.open.clear();
  changed_.notify_all();
}

void PsSteps::leave(std::uint32_t client) {
  const std::lock_guard lock(mutex_);
  clients_.at(client).state = Client::State::left;
  clients_.at(client).open.clear();
  changed_.notify_all();
}

void PsSteps::rest(std::uint32_t client) {
  const std::lock_guard lock(mutex_);
  clients_.at(client).rests = true;
  changed_.notify_all();
}

void PsSteps::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

bool PsSteps::open_to(const Client& client, std::uint64_t own, std::uint64_t all) const {
  if (client.clock < own) return false;
  if (gathers()) return version_ >= all;
  return std::all_of(clients_.begin(), clients_.end(),
                     [all](const Client& c) { return c.gone() || c.rests || c.clock >= all; });
}

// Whether the next step to be closed still can be: by those who have done it, and those who may yet.
bool PsSteps::can_close() const {
  if (applying_) return true;
  const auto found = pending_.find(closed_);
  std::size_t possible = found == pending_.end() ? 0 : found->second.size();
  for (const Client& client : clients_) possible += !client.gone() && client.clock <= closed_;
  return possible >= aggregate_;
}

std::string PsSteps::who_is_gone() const {
  std::string text;
  for (std::size_t client = 0; client < clients_.size(); ++client) {
    if (!clients_[client].gone()) continue;
    text += (text.empty() ? "client " : ", client ") + std::to_string(client) +
            (clients_[client].state == Client::State::lost ? " is lost" : " has left");
  }
  return text.empty() ? "nobody is lost, but clients went on to later steps" : text;
}

bool PsSteps::wait(std::uint32_t client, std::uint64_t own, std::uint64_t all, const std::function<bool()>& gone) {
  std::unique_lock lock(mutex_);
  Client& who = clients_.at(client);
  who.rests = false;
  while (!open_to(who, own, all)) {
    if (stopped_ || who.gone()) return false;
    if (gathers() && version_ < all && !can_close()) {
      throw PsRefusal(PsWrong::too_few, "step " + std::to_string(closed_) + " cannot end: it needs the gradients of " +
                                            std::to_string(aggregate_) + " clients, and " + who_is_gone());
    }
    if (changed_.wait_for(lock, kBetweenLooks) == std::cv_status::timeout) {
      lock.unlock();
      const bool left = gone();
      lock.lock();
      if (left) return false;
    }
  }
  return true;
}

bool PsSteps::repeated(std::uint32_t client, bool range, std::uint32_t number, std::uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  const auto& next = clients_.at(client).next_sequence;
  const auto found = next.find({range, number});
  return found != next.end() && sequence < found->second;
}

void PsSteps::mark(std::uint32_t client, bool range, std::uint32_t number, std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  clients_.at(client).next_sequence[{range, number}] = std::max(sequence + 1, sequence);  // the last one stays itself
}

void PsSteps::count_staleness_of(std::uint64_t now, std::uint64_t basis) {
  const std::uint64_t steps = now - std::min(now, basis);
  ++staleness_[std::min<std::uint64_t>(steps, kStaleness - 1)];
  stalest_ = std::max(stalest_, steps);
}

void PsSteps::count_staleness(std::uint32_t client, std::uint64_t basis) {
  const std::lock_guard lock(mutex_);
  count_staleness_of(basis_of(clients_.at(client)), basis);
}

void PsSteps::gather(std::uint32_t client, PsGathered push) {
  const std::lock_guard lock(mutex_);
  clients_.at(client).open.push_back(std::move(push));
}

void PsSteps::drop(const PsContribution& late) {
  ++late_steps_;
  ++clients_[late.client].late;
  late_pushes_ += late.pushes.size();
  for (const PsGathered& push : late.pushes) {
    if (push.table != nullptr) late_rows_ += push.count;
  }
}

bool PsSteps::done(std::uint32_t client, std::uint64_t step, double weight, std::uint64_t batches, bool late) {
  std::unique_lock lock(mutex_);
  Client& who = clients_.at(client);
  if (who.gone()) return false;
  if (step < who.clock) return true;     // told again
  who.clock = std::max(step + 1, step);  // the last number has no next
  who.rests = false;
  ++who.dones;
  ++dones_;
  const auto there = std::count_if(clients_.begin(), clients_.end(), [](const Client& c) { return !c.gone(); });
  progress_ += static_cast<double>(batches) / static_cast<double>(there);
  if (gathers()) {
    PsContribution part = {client, weight, std::exchange(who.open, {})};
    late = late || step < closed_ || (pending_.contains(step) && pending_[step].size() >= aggregate_);
    if (late) {
      drop(part);
    } else {
      pending_[step].push_back(std::move(part));
      apply_complete(lock);
    }
  }
  changed_.notify_all();
  return !late;
}

void PsSteps::apply_complete(std::unique_lock<std::mutex>& lock) {
  if (applying_) return;  // the thread that does looks again when it is through
  while (!pending_.empty() && pending_.begin()->first == closed_ && pending_.begin()->second.size() >= aggregate_) {
    std::vector<PsContribution> parts = std::move(pending_.begin()->second);
    pending_.erase(pending_.begin());
    ++closed_;
    for (const PsContribution& part : parts) {
      for (const PsGathered& push : part.pushes) count_staleness_of(version_, push.basis);
    }
    applying_ = true;
    lock.unlock();
    try {
      merge_and_apply(parts);
    } catch (...) {  // out of memory: the step is over all the same, and whoever was last is told
      lock.lock();
      applying_ = false;
      ++version_;
      changed_.notify_all();
      throw;
    }
    lock.lock();
    applying_ = false;
    ++version_;
    changed_.notify_all();
  }
}

std::uint64_t PsSteps::step_of_all() const {
  return gathers() ? version_ : static_cast<std::uint64_t>(progress_ + kRounding);
}

std::uint64_t PsSteps::global_step() const {
  const std::lock_guard lock(mutex_);
  return step_of_all();
}

std::uint64_t PsSteps::basis_of(const Client& client) const { return gathers() ? version_ : dones_ - client.dones; }

std::uint64_t PsSteps::basis(std::uint32_t client, std::uint64_t& global_step) const {
  const std::lock_guard lock(mutex_);
  global_step = step_of_all();
  return basis_of(clients_.at(client));
}

std::vector<std::uint32_t> PsSteps::lost() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> who;
  for (std::uint32_t client = 0; client < clients_.size(); ++client) {
    if (clients_[client].state == Client::State::lost) who.push_back(client);
  }
  return who;
}

std::string PsSteps::json() const {
  const std::vector<std::uint32_t> gone = lost();
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> clocks, late, lives;
  for (const Client& client : clients_) {
    clocks.push_back(client.clock);
    lives.push_back(client.lives);
    late.push_back(client.late);
  }
  return "\"clocks\":" + json_list(clocks) + ",\"lives\":" + json_list(lives) +
         ",\"version\":" + std::to_string(version_) + ",\"global_step\":" + std::to_string(step_of_all()) +
         ",\"lost\":" + json_list(gone) + ",\"late_dropped\":" + std::to_string(late_steps_) +
         ",\"late_pushes\":" + std::to_string(late_pushes_) + ",\"late_rows\":" + std::to_string(late_rows_) +
         ",\"late_by_client\":" + json_list(late) + ",\"staleness\":" + json_list(staleness_) +
         ",\"stalest\":" + std::to_string(stalest_);
}

}  // namespace argosy
