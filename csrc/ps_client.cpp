#include "ps_client.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "crc32c.h"

namespace argosy {
namespace {

std::vector<int> in_lanes(const PsClientConfig& config) {
  const std::size_t servers = config.pull_fds.size();
  if (servers == 0) throw std::invalid_argument("a client needs 1 server or more");
  if (config.push_fds.size() != servers || config.shared.size() != servers) {
    throw std::invalid_argument("pull_fds, push_fds and shared have " + std::to_string(servers) + ", " +
                                std::to_string(config.push_fds.size()) + " and " +
                                std::to_string(config.shared.size()) + " entries: each needs one for each server");
  }
  std::vector<int> fds;
  for (std::size_t server = 0; server < servers; ++server) {
    fds.push_back(config.pull_fds[server]);
    fds.push_back(config.push_fds[server]);
  }
  return fds;
}

}  // namespace

PsClient::PsClient(PsClientConfig config, std::function<void()> interrupted)
    : client_(config.client),
      servers_(config.pull_fds.size()),
      values_(config.values),
      timeout_seconds_(config.timeout_seconds),
      shared_(config.shared) {
  const std::vector<int> fds = in_lanes(config);
  const bool any = std::find(shared_.begin(), shared_.end(), true) != shared_.end();
  blocks_ = PsBlocks::make(any);
  post_ = std::make_unique<PsPost>(fds, std::move(config.names), std::move(interrupted));
  for (std::size_t server = 0; server < servers_; ++server) {
    if (shared_[server]) attach(server);
  }
}

// A pull and its requests hold each other until it is over: those that nobody has finished end here.
PsClient::~PsClient() {
  post_.reset();
  for (const auto& [ticket, pull] : pulls_) pull->requests.clear();
}

// Both connections of a server map the memory; if one cannot, all goes by the sockets.
void PsClient::attach(std::size_t server) {
  const Heap& heap = *blocks_->heap();
  const PsAttach told = {static_cast<std::uint64_t>(getpid()), static_cast<std::uint64_t>(heap.fd()), heap.bytes(),
                         heap.nonce()};
  for (const std::size_t lane : {2 * server, 2 * server + 1}) {
    const PsRequestPtr request = make_with(head(PsKind::attach), &told, sizeof told);
    send(lane, request);
    try {
      post_->wait(lane, request, after(timeout_seconds_));
    } catch (const PsError& error) {
      if (error.kind != name(PsWrong::unmapped)) throw;
      shared_[server] = false;
      return;
    }
  }
}

PsClient::Deadline PsClient::after(double seconds) {
  if (!(seconds >= 0)) throw std::invalid_argument("timeout_seconds is " + std::to_string(seconds));
  constexpr double kForever = 1e8;
  const std::chrono::duration<double> longest(std::min(seconds, kForever));
  return PsPost::Clock::now() + std::chrono::duration_cast<PsPost::Clock::duration>(longest);
}

PsHead PsClient::head(PsKind kind, std::uint32_t number) const {
  PsHead head;
  head.kind = kind;
  head.client = client_;
  head.number = number;
  return head;
}

PsRequestPtr PsClient::make(const PsHead& head) const {
  auto request = std::make_shared<PsRequest>();
  request->head = head;
  return request;
}

PsRequestPtr PsClient::make_with(const PsHead& head, const void* payload, std::size_t bytes) {
  const PsRequestPtr request = make(head);
  request->payload = PsBlocks::take(blocks_, bytes);
  std::memcpy(request->payload.data(), payload, bytes);
  request->head.length = bytes;
  return request;
}

void PsClient::send(std::size_t lane, const PsRequestPtr& request) {
  const std::byte* const payload = request->from != nullptr ? request->from : request->payload.data();
  seal(request->head, crc32c(0, payload, request->head.length));
  post_->submit(lane, request);
}

PsRequestPtr PsClient::ask(std::uint32_t server, const PsRequestPtr& request) {
  if (server >= servers_) {
    throw std::invalid_argument("server " + std::to_string(server) + " is not one of " + std::to_string(servers_));
  }
  const std::size_t lane = 2 * server + 1;
  send(lane, request);
  post_->wait(lane, request, after(timeout_seconds_));
  return request;
}

PsClient::TableState& PsClient::table(std::uint32_t number) {
  const auto found = tables_.find(number);
  if (found == tables_.end()) throw std::invalid_argument("table " + std::to_string(number) + " was not created here");
  return found->second;
}

PsClient::RangeState& PsClient::range(std::uint32_t number) {
  const auto found = ranges_.find(number);
  if (found == ranges_.end()) throw std::invalid_argument("range " + std::to_string(number) + " was not created here");
  return found->second;
}

void PsClient::create_table(std::uint32_t number, const TableConfig& config) {
  check(config);
  post_->throw_late_error();
  for (std::uint32_t server = 0; server < servers_; ++server) {
    ask(server, make_with(head(PsKind::create_table, number), &config, sizeof config));
  }
  tables_[number] = {config, std::vector<std::uint64_t>(servers_)};
}

void PsClient::create_range(std::uint32_t number, const TableConfig& config, std::size_t count, std::uint32_t server) {
  check(config);
  post_->throw_late_error();
  PsHead create = head(PsKind::create_range, number);
  create.count = count;
  ask(server, make_with(create, &config, sizeof config));
  ranges_[number] = {count, server, 0};
}

void PsClient::end_day(std::uint32_t number, float decay) {
  post_->throw_late_error();
  PsHead request = head(PsKind::end_day, number);
  request.decay_or_score = decay;
  for (std::uint32_t server = 0; server < servers_; ++server) ask(server, make(request));
}

std::uint64_t PsClient::shrink(std::uint32_t number, float score_below, std::uint32_t unseen_days, float click_weight) {
  post_->throw_late_error();
  PsHead request = head(PsKind::shrink, number);
  request.decay_or_score = score_below;
  request.unseen_days = unseen_days;
  request.click_weight = click_weight;
  std::uint64_t removed = 0;
  for (std::uint32_t server = 0; server < servers_; ++server) removed += ask(server, make(request))->reply.count;
  return removed;
}

PsClient::Scanned PsClient::scan(std::uint32_t number, std::uint32_t server, std::uint64_t cursor, std::size_t room) {
  post_->throw_late_error();
  PsHead request = head(PsKind::scan, number);
  request.cursor = cursor;
  request.count = room;
  const PsRequestPtr answered = ask(server, make(request));
  return {answered->reply.cursor, answered->reply.count, std::move(answered->answer)};
}

std::string PsClient::stats(std::uint32_t server) {
  const PsRequestPtr answered = ask(server, make(head(PsKind::stats)));
  return {reinterpret_cast<const char*>(answered->answer.data()), answered->answer.size()};
}

}  // namespace argosy
