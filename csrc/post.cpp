#include "post.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "failure.h"
#include "operation.h"
#include "pause.h"

namespace argosy {
namespace {

// Half of the machine's memory: a message that nobody asks for yet may be in the way of one that somebody does.
std::uint64_t max_kept_bytes() {
  static const std::uint64_t bytes =
      static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGE_SIZE)) / 2;
  return bytes;
}

std::uint64_t packed(std::uint64_t dtype) {
  return Operation{Collective::message, static_cast<DType>(dtype), Op::sum, 0, 0}.packed();
}

// A receive takes a message of exactly its size and type.
void check_fits(const Delivery& receive, int from, std::uint64_t dtype, std::uint64_t bytes) {
  if (receive.bytes == bytes && receive.dtype == dtype) return;
  throw Failure(Failure::Kind::mismatch, from,
                "rank " + std::to_string(from) + " sends a " + describe(packed(dtype), bytes) + " with tag " +
                    std::to_string(receive.tag) + ", and the receive expects a " +
                    describe(packed(receive.dtype), receive.bytes) + ": sizes and types must agree");
}

}  // namespace

void Post::finish(Delivery& delivery, int source) {
  delivery.source = source;
  delivery.done = true;
  if (delivery.keep) finished_.push_back(std::move(delivery.keep));
}

std::vector<std::shared_ptr<void>> Post::take_finished() {
  const std::lock_guard lock(mutex_);
  return std::exchange(finished_, {});
}

bool Post::sending() {
  const std::lock_guard lock(mutex_);
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) { return !entry.second->outgoing.empty(); });
}

void Post::add(int peer, std::unique_ptr<Link> link) {
  peers_[peer] = std::make_unique<Correspondent>(*this, peer, std::move(link));
}

std::shared_ptr<Delivery> Post::post(Delivery delivery) {
  auto posted = std::make_shared<Delivery>(std::move(delivery));
  const std::lock_guard lock(mutex_);
  if (posted->peer != Delivery::kAnyone && !peers_.contains(posted->peer)) {
    throw std::invalid_argument("rank " + std::to_string(posted->peer) +
                                " is no peer: messages go to other ranks of the group");
  }
  if (posted->sending) {
    peers_[posted->peer]->outgoing.push_back(posted);
  } else if (!take_kept(posted)) {
    receives_.push_back(posted);
  }
  return posted;
}

// Whether a message that has come already is the one that is asked for.
bool Post::take_kept(const std::shared_ptr<Delivery>& receive) {
  for (auto& [rank, with] : peers_) {
    if (receive->peer != Delivery::kAnyone && receive->peer != rank) continue;
    for (auto kept = with->kept.begin(); kept != with->kept.end(); ++kept) {
      if (kept->tag != receive->tag || kept->wanted_by) continue;
      check_fits(*receive, rank, kept->dtype, kept->bytes.size());
      if (kept->whole) {
        if (!kept->bytes.empty()) std::memcpy(receive->address, kept->bytes.data(), kept->bytes.size());
        kept_bytes_ -= kept->bytes.size();
        with->kept.erase(kept);
        finish(*receive, rank);
      } else {
        kept->wanted_by = receive;
      }
      return true;
    }
  }
  return false;
}

std::shared_ptr<Delivery> Post::take_receive(int from, std::uint64_t tag) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const auto& receive) {
    return receive->tag == tag && (receive->peer == from || receive->peer == Delivery::kAnyone);
  });
  if (found == receives_.end()) return nullptr;
  auto receive = *found;
  receives_.erase(found);
  return receive;
}

Sink::Place Post::Correspondent::offer(const Frame& frame) {
  if (frame.offset == 0 && !receiving && keeping == nullptr) {
    const std::uint64_t dtype = frame.operation >> 8 & 0xff;
    receiving = post.take_receive(peer, frame.sequence);
    if (receiving) {
      check_fits(*receiving, peer, dtype, frame.count);
    } else {
      if (frame.count > max_kept_bytes() - std::min(max_kept_bytes(), post.kept_bytes_)) return {false, nullptr};
      kept.push_back({frame.sequence, dtype, std::vector<std::byte>(frame.count), 0, false, nullptr});
      keeping = &kept.back();
      post.kept_bytes_ += frame.count;
    }
  }
  const std::uint64_t arrived = receiving ? receiving->handed : keeping != nullptr ? keeping->arrived : 0;
  const std::uint64_t bytes = receiving ? receiving->bytes : keeping != nullptr ? keeping->bytes.size() : 0;
  if ((!receiving && keeping == nullptr) || frame.offset != arrived || frame.length > bytes - arrived) {
    throw Failure(Failure::Kind::corrupt, peer,
                  "rank " + std::to_string(peer) + " sends a part of a message that is not the next one");
  }
  std::byte* const begin = receiving ? receiving->address : keeping->bytes.data();
  return {true, begin + frame.offset};
}

void Post::Correspondent::arrived(const Frame& frame, const std::byte*) {
  if (receiving) {
    receiving->handed += frame.length;
    if (receiving->handed == receiving->bytes) {
      post.finish(*receiving, peer);
      receiving.reset();
    }
    return;
  }
  keeping->arrived += frame.length;
  if (keeping->arrived < keeping->bytes.size()) return;
  keeping->whole = true;
  if (keeping->wanted_by) {
    const std::shared_ptr<Delivery> receive = std::exchange(keeping->wanted_by, nullptr);
    post.take_kept(receive);
  }
  keeping = nullptr;
}

bool Post::send_some(Correspondent& with) {
  bool moved = with.link->flush();
  while (!with.outgoing.empty()) {
    Delivery& message = *with.outgoing.front();
    const std::size_t length = std::min<std::size_t>(message.bytes - message.started, with.link->room());
    if (!message.announced || length > 0) {
      Frame frame;
      frame.sequence = message.tag;
      frame.operation = packed(message.dtype);
      frame.count = message.bytes;
      frame.offset = message.started;
      frame.length = static_cast<std::uint32_t>(length);
      frame.message = with.sent_messages;
      frame.from = static_cast<std::uint32_t>(rank_);
      if (!with.link->send(frame, message.address + message.started, &message.handed)) return moved;
      message.announced = true;
      message.started += length;
      moved = true;
    } else if (message.handed < message.bytes) {
      return moved;
    } else {
      ++with.sent_messages;
      finish(message, rank_);
      with.outgoing.pop_front();
      moved = true;
    }
  }
  return moved;
}

// Links that nobody waits for are left alone: their peers may have gone, and rightly so.
bool Post::concerns(const Correspondent& with) const {
  if (!with.outgoing.empty() || with.receiving) return true;
  if (with.keeping != nullptr && with.keeping->wanted_by) return true;
  return std::any_of(receives_.begin(), receives_.end(), [&](const auto& receive) {
    return receive->peer == with.peer || receive->peer == Delivery::kAnyone;
  });
}

bool Post::progress(Correspondent& with) {
  bool moved = send_some(with);
  while (concerns(with) && with.link->receive(with)) moved = true;
  return moved;
}

bool Post::progress() {
  bool moved = false;
  for (auto& [rank, with] : peers_) {
    if (concerns(*with)) moved |= progress(*with);
  }
  return moved;
}

void Post::collect(std::vector<pollfd>& into) {
  const std::lock_guard lock(mutex_);
  for (const auto& [rank, with] : peers_) {
    if (concerns(*with)) Pause::list(*with->link, into);
  }
}

void Post::wait(const std::shared_ptr<Delivery>& delivery, Watch& watch) {
  Pause pause(watch);
  const auto look = [this](std::vector<pollfd>& into) { collect(into); };
  try {
    while (true) {
      bool moved = false;
      {
        const std::lock_guard lock(mutex_);
        if (delivery->done) break;
        moved = progress();
        if (delivery->done) break;
      }
      moved ? pause.reset(delivery->peer) : pause.idle(look, delivery->peer);
    }
  } catch (const Failure&) {
    fail_all(std::current_exception());
  } catch (...) {  // a signal ends this wait; the other deliveries end with it, each with an exception of its own
    fail_all(std::make_exception_ptr(Failure(Failure::Kind::aborted, rank_, "a wait for a message was interrupted")));
    throw;
  }
  if (delivery->error) std::rethrow_exception(delivery->error);
}

void Post::drain(Watch& watch) {
  Pause pause(watch);
  const auto look = [this](std::vector<pollfd>& into) { collect(into); };
  try {
    while (pending()) {
      bool moved = false;
      {
        const std::lock_guard lock(mutex_);
        moved = progress();
      }
      moved ? pause.reset(-1) : pause.idle(look, -1);
    }
  } catch (...) {
    fail_all(std::current_exception());
    throw;
  }
}

bool Post::done(const Delivery& delivery) {
  const std::lock_guard lock(mutex_);
  return delivery.done;
}

bool Post::pending() {
  const std::lock_guard lock(mutex_);
  return std::any_of(peers_.begin(), peers_.end(), [&](const auto& entry) { return concerns(*entry.second); });
}

void Post::forsake() {
  for (const auto& [rank, with] : peers_) with->link->forsake();
}

void Post::shut() {
  const std::lock_guard lock(mutex_);
  for (const auto& [rank, with] : peers_) with->link->shut();
}

void Post::fail_all(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  const auto fail = [&](const std::shared_ptr<Delivery>& delivery) {
    if (!delivery || delivery->done) return;
    delivery->error = error;
    finish(*delivery, Delivery::kAnyone);
  };
  for (auto& [rank, with] : peers_) {
    with->link->adopt();
    for (const auto& send : with->outgoing) fail(send);
    with->outgoing.clear();
    fail(std::exchange(with->receiving, nullptr));
    with->keeping = nullptr;
    for (Kept& kept : with->kept) fail(kept.wanted_by);
    with->kept.clear();
  }
  for (const auto& receive : receives_) fail(receive);
  receives_.clear();
}

}  // namespace argosy
