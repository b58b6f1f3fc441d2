// Pushes of a client, and what else changes rows: handed over to the thread of ps_post.h, in order.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ps_client.h"
#include "updater.h"

namespace argosy {
namespace {

// Requests of a push lane that may be unanswered. Enough for the tables of a step and its end, and little enough that
// a slow server is felt by the worker.
constexpr std::size_t kWindow = 16;

}  // namespace

// One server's part of a push, while it is written.
struct PsClient::Part {
  PsRequestPtr request;
  std::uint64_t bytes = 0;
  PushLayout layout;
  PsBlocks::Block floats, pulled_floats;  // what is encoded when it is complete
  float *gradients = nullptr, *pulled = nullptr;

  template <class T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(request->payload.data() + offset);
  }
};

PsClient::Part PsClient::begin_part(const PsHead& head) {
  Part part;
  part.bytes = payload_bytes(head);
  part.layout = layout_of(head);
  part.request = make(head);
  part.request->payload = PsBlocks::take(blocks_, part.bytes);
  part.gradients = part.at<float>(part.layout.gradients);
  part.pulled = part.at<float>(part.layout.pulled);
  if (head.values == PsValues::fp32) return part;
  const std::size_t bytes = head.count * head.dim * sizeof(float);
  part.floats = PsBlocks::take(blocks_, bytes);
  part.gradients = reinterpret_cast<float*>(part.floats.data());
  if (!(head.flags & PsHead::kPulled)) return part;
  part.pulled_floats = PsBlocks::take(blocks_, bytes);
  part.pulled = reinterpret_cast<float*>(part.pulled_floats.data());
  return part;
}

void PsClient::end_part(std::size_t server, const Part& part) {
  const PsHead& head = part.request->head;
  const std::size_t count = head.count * head.dim;
  if (head.values != PsValues::fp32) {
    encode(head.values, part.gradients, count, head.dim, part.at<std::byte>(part.layout.gradients));
    if (head.flags & PsHead::kPulled) {
      encode(head.values, part.pulled, count, head.dim, part.at<std::byte>(part.layout.pulled));
    }
  }
  send_push(server, part.request, part.bytes);
}

// Copies `width` numbers of each id to their place in the part of their server.
template <class T, class Begin>
void PsClient::scatter(const T* from, std::size_t count, std::size_t width, Begin begin) const {
  if (servers_ == 1) {
    std::memcpy(begin(0), from, count * width * sizeof(T));
    return;
  }
  const Division& division = push_division_;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t server = division.server[i];
    std::memcpy(begin(server) + (division.order[i] - division.begin[server]) * width, from + i * width,
                width * sizeof(T));
  }
}

// Adds the gradients of each place up: of one server straight where they are sent from, of several in their order,
// which each then gets its part of.
void PsClient::add_rows(const PsPushRows& push, std::size_t dim, const std::vector<Part>& parts) {
  const RowKernels& kernels = row_kernels_of();
  const std::uint32_t last = kernels.largest(push.places, push.given);
  if (push.given > 0 && last >= push.count) {
    throw std::invalid_argument("place " + std::to_string(last) + " is not one of " + std::to_string(push.count) +
                                " ids");
  }
  const std::size_t row_bytes = dim * sizeof(float);
  if (servers_ == 1) {
    std::memset(parts[0].gradients, 0, push.count * row_bytes);
    return kernels.add_up(push.gradients, push.given, 0, push.places, push.given, dim, parts[0].gradients);
  }
  const Division& division = push_division_;
  push_places_.resize(push.given);
  for (std::size_t i = 0; i < push.given; ++i) push_places_[i] = division.order[push.places[i]];
  push_sums_.assign(push.count * dim, 0);
  kernels.add_up(push.gradients, push.given, 0, push_places_.data(), push.given, dim, push_sums_.data());
  for (std::size_t server = 0; server < servers_; ++server) {
    const std::size_t begin = division.begin[server], count = division.begin[server + 1] - begin;
    std::memcpy(parts[server].gradients, push_sums_.data() + begin * dim, count * row_bytes);
  }
}

void PsClient::push(const PsPushRows& push) {
  post_->throw_late_error();
  const TableState& state = table(push.table);
  const std::size_t dim = state.config.dim;
  push_division_.divide(push.ids, push.count, servers_);
  PsHead request = head(PsKind::push_rows, push.table);
  request.dim = state.config.dim;
  request.sequence = push.sequence;
  request.lr_factor = push.lr_factor;
  request.compensation = push.compensation;
  request.flags =
      (push.shows ? PsHead::kShows : 0) | (push.clicks ? PsHead::kClicks : 0) | (push.pulled ? PsHead::kPulled : 0);
  std::vector<Part> parts;
  for (std::size_t server = 0; server < servers_; ++server) {
    request.count = push_division_.begin[server + 1] - push_division_.begin[server];
    request.values = values_to(server);
    request.basis = state.basis[server];
    if (request.count > 0) post_->wait_for_window(2 * server + 1, kWindow, after(timeout_seconds_));
    parts.push_back(begin_part(request));
  }
  scatter(push.ids, push.count, 1, [&](std::size_t s) { return parts[s].at<std::int64_t>(parts[s].layout.ids); });
  if (push.shows != nullptr) {
    scatter(push.shows, push.count, 1,
            [&](std::size_t s) { return parts[s].at<std::uint32_t>(parts[s].layout.shows); });
  }
  if (push.clicks != nullptr) {
    scatter(push.clicks, push.count, 1, [&](std::size_t s) { return parts[s].at<float>(parts[s].layout.clicks); });
  }
  if (push.pulled != nullptr) scatter(push.pulled, push.count, dim, [&](std::size_t s) { return parts[s].pulled; });
  if (push.places != nullptr) {
    add_rows(push, dim, parts);
  } else {
    scatter(push.gradients, push.count, dim, [&](std::size_t s) { return parts[s].gradients; });
  }
  for (std::size_t server = 0; server < servers_; ++server) {
    if (parts[server].request->head.count > 0) end_part(server, parts[server]);
  }
}

void PsClient::send_push(std::size_t server, const PsRequestPtr& request, std::uint64_t bytes) {
  request->quiet = true;
  if (shared_[server]) {
    request->head.flags |= PsHead::kShared;
    request->head.at = request->payload.offset();
  } else {
    request->head.length = bytes;
  }
  send(2 * server + 1, request);
}

void PsClient::push_range(std::uint32_t number, const float* gradients, const float* pulled, float compensation,
                          float lr_factor, std::uint64_t sequence) {
  post_->throw_late_error();
  const RangeState& state = range(number);
  PsHead request = head(PsKind::push_range, number);
  request.count = state.count;
  request.sequence = sequence;
  request.lr_factor = lr_factor;
  request.compensation = compensation;
  request.flags = pulled ? PsHead::kPulled : 0;
  request.values = values_to(state.server);
  request.basis = state.basis;
  const std::uint64_t bytes = payload_bytes(request);
  post_->wait_for_window(2 * state.server + 1, kWindow, after(timeout_seconds_));
  const PsRequestPtr made = make(request);
  made->payload = PsBlocks::take(blocks_, bytes);
  const PushLayout layout = layout_of(request);
  encode(request.values, gradients, state.count, kPsRangeWidth, made->payload.data() + layout.gradients);
  if (pulled) encode(request.values, pulled, state.count, kPsRangeWidth, made->payload.data() + layout.pulled);
  send_push(state.server, made, bytes);
}

void PsClient::done(std::uint64_t step, double weight, std::uint64_t batches, bool may_be_late) {
  post_->throw_late_error();
  PsHead request = head(PsKind::done);
  request.sequence = step;
  request.weight = weight;
  request.count = batches;
  std::size_t first = 0;
  if (may_be_late && servers_ > 1) {  // see [Note: gathered steps]
    if (ask(0, make(request))->reply.count == 0) request.flags |= PsHead::kLate;
    first = 1;
  }
  for (std::size_t server = first; server < servers_; ++server) {
    const PsRequestPtr made = make(request);
    made->quiet = true;
    send(2 * server + 1, made);
  }
}

void PsClient::flush(double timeout_seconds) {
  const Deadline deadline = after(timeout_seconds);
  for (std::size_t server = 0; server < servers_; ++server) post_->wait_for_window(2 * server + 1, 1, deadline);
  post_->throw_late_error();
}

void PsClient::leave(double timeout_seconds) { tell_all(PsKind::leave, timeout_seconds); }

void PsClient::rest(double timeout_seconds) { tell_all(PsKind::rest, timeout_seconds); }

void PsClient::tell_all(PsKind kind, double timeout_seconds) {
  const Deadline deadline = after(timeout_seconds);
  for (std::size_t server = 0; server < servers_; ++server) {
    const PsRequestPtr request = make(head(kind));
    send(2 * server + 1, request);
    post_->wait(2 * server + 1, request, deadline);
  }
  post_->throw_late_error();
}

void PsClient::set_rows(std::uint32_t number, const std::int64_t* ids, std::size_t count, const float* values) {
  post_->throw_late_error();
  const std::size_t dim = table(number).config.dim;
  push_division_.divide(ids, count, servers_);
  PsHead request = head(PsKind::set_rows, number);
  request.dim = static_cast<std::uint32_t>(dim);
  for (std::uint32_t server = 0; server < servers_; ++server) {
    const std::size_t first = push_division_.begin[server];
    request.count = push_division_.begin[server + 1] - first;
    const PsRequestPtr made = make(request);
    made->head.length = payload_bytes(request);
    made->payload = PsBlocks::take(blocks_, made->head.length);
    auto* const sent = reinterpret_cast<std::int64_t*>(made->payload.data());
    auto* const rows = reinterpret_cast<float*>(made->payload.data() + request.count * sizeof(std::int64_t));
    for (std::size_t i = 0; i < count; ++i) {
      if (servers_ > 1 && push_division_.server[i] != server) continue;
      const std::size_t place = servers_ > 1 ? push_division_.order[i] - first : i;
      sent[place] = ids[i];
      std::memcpy(rows + place * dim, values + i * dim, dim * sizeof(float));
    }
    ask(server, made);
  }
}

void PsClient::set_range(std::uint32_t number, const float* values) {
  post_->throw_late_error();
  const RangeState& state = range(number);
  PsHead request = head(PsKind::set_range, number);
  request.count = state.count;
  ask(state.server, make_with(request, values, state.count * sizeof(float)));
}

}  // namespace argosy
