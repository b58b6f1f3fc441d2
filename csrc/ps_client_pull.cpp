// Pulls of a client: what is asked of which server, and how the answers become the caller's rows.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ps_client.h"

namespace argosy {

void PsClient::Division::divide(const std::int64_t* ids, std::size_t count, std::size_t servers) {
  begin.assign(servers + 1, 0);
  if (servers == 1) {
    begin[1] = count;
    return;
  }
  server.resize(count);
  order.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    server[i] = static_cast<std::uint32_t>(mix(static_cast<std::uint64_t>(ids[i])) % servers);
    ++begin[server[i] + 1];
  }
  for (std::size_t s = 0; s < servers; ++s) begin[s + 1] += begin[s];
  std::vector<std::size_t> next(begin.begin(), begin.end() - 1);
  for (std::size_t i = 0; i < count; ++i) order[i] = static_cast<std::uint32_t>(next[server[i]]++);
}

std::shared_ptr<PsClient::Pull> PsClient::fresh_pull() {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return std::make_shared<Pull>();
  std::shared_ptr<Pull> pull = std::move(spare_.back());
  spare_.pop_back();
  return pull;
}

// A pull that was given up may still be written to by a server: only one that is over is used again.
void PsClient::recycle(std::shared_ptr<Pull> pull) {
  pull->requests.clear();
  pull->ids.reset(), pull->rows.reset(), pull->ordered.reset();
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(pull));
}

// What one server is asked for. Its rows come to their place; where they are encoded, first to a place beside it.
void PsClient::request_rows(const std::shared_ptr<Pull>& pull, std::size_t server, PsHead head) {
  const std::size_t first = pull->range ? 0 : pull->division.begin[server];
  head.values = values_to(server);
  const PsRequestPtr request = make(head);
  if (shared_[server]) {
    request->head.flags |= PsHead::kShared;
    if (!pull->range) request->head.at = pull->ids.offset() + first * sizeof(std::int64_t);
    request->head.answer_at = pull->rows.offset() + first * pull->dim * sizeof(float);
  } else {
    if (!pull->range) {
      request->from = pull->ids.data() + first * sizeof(std::int64_t);
      request->head.length = head.count * sizeof(std::int64_t);
    }
    request->into_bytes = answer_bytes(head);
    if (head.values == PsValues::fp32) {
      request->into = pull->rows.data() + first * pull->dim * sizeof(float);
    } else {
      request->payload = PsBlocks::take(blocks_, request->into_bytes);
      request->into = request->payload.data();
    }
  }
  request->keeps = pull;
  pull->requests[server] = request;
  send(2 * server, request);
}

std::uint64_t PsClient::remember(const std::shared_ptr<Pull>& pull) {
  const std::lock_guard lock(mutex_);
  pulls_[next_ticket_] = pull;
  return next_ticket_++;
}

std::uint64_t PsClient::start_pull(std::uint32_t number, const std::int64_t* ids, std::size_t count, std::uint64_t own,
                                   std::uint64_t all, bool distinct) {
  post_->throw_late_error();
  const std::shared_ptr<Pull> pull = fresh_pull();
  pull->range = false;
  pull->distinct = distinct;
  pull->number = number;
  pull->given = count;
  pull->dim = table(number).config.dim;
  const std::size_t found = distinct ? count : pull->finder.find(ids, count);
  const std::int64_t* const wanted = distinct ? ids : pull->finder.ids();
  Division& division = pull->division;
  division.divide(wanted, found, servers_);
  pull->ids = PsBlocks::take(blocks_, found * sizeof(std::int64_t));
  pull->rows = PsBlocks::take(blocks_, found * pull->dim * sizeof(float));
  auto* const sent = reinterpret_cast<std::int64_t*>(pull->ids.data());
  if (servers_ == 1) {
    std::copy_n(wanted, found, sent);
  } else {
    for (std::size_t i = 0; i < found; ++i) sent[division.order[i]] = wanted[i];
  }
  pull->requests.assign(servers_, nullptr);
  PsHead request = head(PsKind::pull_rows, number);
  request.own = own;
  request.all = all;
  request.dim = static_cast<std::uint32_t>(pull->dim);
  for (std::size_t server = 0; server < servers_; ++server) {
    request.count = division.begin[server + 1] - division.begin[server];
    request_rows(pull, server, request);
  }
  if (!distinct && servers_ > 1) {  // while servers work
    pull->places.resize(count);
    const std::uint32_t* const places = pull->finder.places();
    for (std::size_t i = 0; i < count; ++i) pull->places[i] = division.order[places[i]];
  }
  return remember(pull);
}

std::uint64_t PsClient::start_pull_range(std::uint32_t number, std::uint64_t own, std::uint64_t all) {
  post_->throw_late_error();
  const RangeState& state = range(number);
  const std::shared_ptr<Pull> pull = fresh_pull();
  pull->range = pull->distinct = true;
  pull->number = number;
  pull->given = state.count;
  pull->dim = 1;
  pull->rows = PsBlocks::take(blocks_, state.count * sizeof(float));
  pull->requests.assign(servers_, nullptr);
  PsHead request = head(PsKind::pull_range, number);
  request.own = own;
  request.all = all;
  request.count = state.count;
  request_rows(pull, state.server, request);
  return remember(pull);
}

// Waits for all servers. A pull that failed is forgotten, but its memory stays for what servers may still write.
std::shared_ptr<PsClient::Pull> PsClient::wait_pull(std::uint64_t ticket, double timeout_seconds) {
  std::shared_ptr<Pull> pull;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pulls_.find(ticket);
    if (found == pulls_.end()) throw std::invalid_argument("there is no pull " + std::to_string(ticket) + " under way");
    pull = std::move(found->second);
    pulls_.erase(found);
  }
  const Deadline deadline = after(timeout_seconds);
  try {
    for (std::size_t server = 0; server < servers_; ++server) {
      if (pull->requests[server] != nullptr) post_->wait(2 * server, pull->requests[server], deadline);
    }
  } catch (...) {
    pull->requests.clear();
    throw;
  }
  for (std::size_t server = 0; server < servers_; ++server) {
    const PsRequestPtr& request = pull->requests[server];
    if (request == nullptr) continue;
    (pull->range ? range(pull->number).basis : table(pull->number).basis[server]) = request->reply.basis;
    if (request->head.values == PsValues::fp32) continue;
    const std::size_t first = pull->range ? 0 : pull->division.begin[server];
    decode(request->head.values, request->into, request->head.count * pull->dim,
           pull->range ? kPsRangeWidth : pull->dim, reinterpret_cast<float*>(pull->rows.data()) + first * pull->dim);
  }
  return pull;
}

void PsClient::finish_pull(std::uint64_t ticket, float* out, double timeout_seconds) {
  const std::shared_ptr<Pull> pull = wait_pull(ticket, timeout_seconds);
  const auto* const rows = reinterpret_cast<const float*>(pull->rows.data());
  const auto dim = static_cast<std::uint32_t>(pull->dim);
  if (pull->range || (pull->distinct && servers_ == 1)) {
    std::memcpy(out, rows, pull->given * dim * sizeof(float));
  } else if (pull->distinct) {
    expand(rows, pull->division.order.data(), pull->given, dim, out);
  } else {
    expand(rows, servers_ == 1 ? pull->finder.places() : pull->places.data(), pull->given, dim, out);
  }
  recycle(pull);
}

const float* PsClient::take_pull(std::uint64_t ticket, double timeout_seconds) {
  const std::shared_ptr<Pull> pull = wait_pull(ticket, timeout_seconds);
  if (!pull->range && servers_ > 1) {
    const std::size_t count = pull->division.begin.back();
    pull->ordered = PsBlocks::take(blocks_, count * pull->dim * sizeof(float));
    expand(reinterpret_cast<const float*>(pull->rows.data()), pull->division.order.data(), count,
           static_cast<std::uint32_t>(pull->dim), reinterpret_cast<float*>(pull->ordered.data()));
  }
  pull->requests.clear();
  const std::lock_guard lock(mutex_);
  taken_[ticket] = pull;
  return reinterpret_cast<const float*>((pull->ordered.data() != nullptr ? pull->ordered : pull->rows).data());
}

void PsClient::release_pull(std::uint64_t ticket) {
  std::shared_ptr<Pull> pull;
  {
    const std::lock_guard lock(mutex_);
    const auto found = taken_.find(ticket);
    if (found == taken_.end()) throw std::invalid_argument("pull " + std::to_string(ticket) + " was not taken");
    pull = std::move(found->second);
    taken_.erase(found);
  }
  recycle(std::move(pull));
}

}  // namespace argosy
