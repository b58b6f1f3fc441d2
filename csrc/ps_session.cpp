#include "ps_session.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>

#include "crc32c.h"
#include "ps_socket.h"

namespace argosy {
namespace {

constexpr std::size_t kKeptBytes = std::size_t{64} << 20;
constexpr std::size_t kPassedOver = 64 << 10;  // at a time

}  // namespace

std::string PsCore::json() const {
  const auto field = [](const char* name, std::uint64_t value) {
    return std::string(",\"").append(name).append("\":").append(std::to_string(value));
  };
  return std::string("{").append(steps.json()) + "," + tables.json() + field("requests", requests) +
         field("refused", refused) + field("repeated", repeated) + field("dropped_connections", dropped_connections) +
         field("bytes_in", bytes_in) + field("bytes_out", bytes_out) + field("shared_bytes", shared_bytes) + "}";
}

// Never null, also of no bytes: functions of the C library must not be given a null pointer.
std::byte* PsSession::Room::take(std::size_t bytes) {
  if (bytes > bytes_ || memory_ == nullptr) {
    memory_.reset();
    bytes_ = 0;
    memory_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    bytes_ = bytes;
  }
  return memory_.get();
}

void PsSession::Room::trim() {
  if (bytes_ <= kKeptBytes) return;
  memory_.reset();
  bytes_ = 0;
}

void PsSession::run() {
  PsHead head;
  while (receive_all(fd_, reinterpret_cast<std::byte*>(&head), sizeof head)) {
    core_.bytes_in += sizeof head;
    if (!is_sealed(head)) {
      ++core_.dropped_connections;
      return;
    }
    ++core_.requests;
    if (!serve(head)) return;
    for (Room* room : {&payload_, &ids_, &gradients_, &pulled_, &rows_, &encoded_}) room->trim();
  }
}

bool PsSession::serve(const PsHead& head) {
  if (head.version != PsHead::kVersion) {
    ++core_.dropped_connections;
    refuse(head, PsWrong::version,
           "the client speaks version " + std::to_string(head.version) + " and the server " +
               std::to_string(PsHead::kVersion) + ": install the same release everywhere");
    return false;
  }
  if (head.length > kPsMostPayload) {
    ++core_.dropped_connections;
    refuse(head, PsWrong::too_large,
           "a payload of " + std::to_string(head.length) + " bytes is more than " + std::to_string(kPsMostPayload));
    return false;
  }
  unread_ = head.length;
  PsWrong wrong = PsWrong::internal;
  std::string text;
  try {
    return handle(head);
  } catch (const PsRefusal& refusal) {
    wrong = refusal.wrong;
    text = refusal.what();
  } catch (const std::bad_alloc&) {
    text = describe(head) + ": the server is out of memory";
  } catch (const std::exception& error) {
    text = describe(head) + ": " + error.what();
  }
  return pass_over(unread_) && refuse(head, wrong, text);
}

bool PsSession::handle(const PsHead& head) {
  const std::uint64_t expected = payload_bytes(head);
  if (head.client != client_) {
    throw PsRefusal(PsWrong::mismatch,
                    describe(head) + ": this is the connection of client " + std::to_string(client_));
  }
  const bool is_shared = head.flags & PsHead::kShared;
  if (head.length != (is_shared ? 0 : expected)) {
    throw PsRefusal(PsWrong::malformed, describe(head) + ": a payload of " + std::to_string(head.length) +
                                            " bytes does not fit its count, which needs " + std::to_string(expected));
  }
  switch (head.kind) {
    case PsKind::attach:
      return attach(head);
    case PsKind::create_table:
    case PsKind::create_range:
      return create(head);
    case PsKind::pull_rows:
      return pull_rows(head);
    case PsKind::push_rows:
      return push_rows(head);
    case PsKind::set_rows:
      return set_rows(head);
    case PsKind::pull_range:
      return pull_range(head);
    case PsKind::push_range:
      return push_range(head);
    case PsKind::set_range: {
      PsRange& range = range_of(head);
      range.range.set(reinterpret_cast<const float*>(receive_payload(head)));
      return answer(head);
    }
    case PsKind::done:
    case PsKind::leave:
    case PsKind::rest:
      return mark_step(head);
    case PsKind::stats: {
      const std::string text = core_.json();
      return answer(head, reinterpret_cast<const std::byte*>(text.data()), text.size());
    }
    case PsKind::end_day:
      table_of(head).table.end_day(head.decay_or_score);
      return answer(head);
    case PsKind::shrink: {
      const auto removed = table_of(head).table.shrink(head.decay_or_score, head.unseen_days, head.click_weight);
      return answer(head, nullptr, 0, removed);
    }
    case PsKind::scan:
      return scan(head);
  }
  return false;  // payload_bytes lets no other kind pass
}

bool PsSession::create(const PsHead& head) {
  TableConfig config;
  std::memcpy(&config, receive_payload(head), sizeof config);
  if (head.kind == PsKind::create_table) {
    core_.tables.create_table(head.number, config);
  } else {
    answer_bytes(head);
    core_.tables.create_range(head.number, config, head.count);
  }
  return answer(head);
}

// Where the client is: it has done a step, rests, or has left.
bool PsSession::mark_step(const PsHead& head) {
  if (head.kind == PsKind::leave) {
    core_.steps.leave(client_);
  } else if (head.kind == PsKind::rest) {
    core_.steps.rest(client_);
  } else {
    if (!(head.weight >= 0) || std::isinf(head.weight)) {
      throw PsRefusal(PsWrong::malformed, describe(head) + ": its weight is " + std::to_string(head.weight));
    }
    const bool late = head.flags & PsHead::kLate;
    return answer(head, nullptr, 0, core_.steps.done(client_, head.sequence, head.weight, head.count, late));
  }
  return answer(head);
}

// The place that a head names in the client's memory. It may be changed by the client at any time, also while it is
// read here: what a wrong number could do harm with is copied first, and then checked.
std::byte* PsSession::shared(std::uint64_t at, std::uint64_t bytes, const PsHead& head) const {
  if (memory_.base() == nullptr) throw PsRefusal(PsWrong::unmapped, describe(head) + ": no memory was attached");
  if (at % sizeof(float) != 0 || at > memory_.bytes() || bytes > memory_.bytes() - at) {
    throw PsRefusal(PsWrong::malformed, describe(head) + ": " + std::to_string(bytes) + " bytes at " +
                                            std::to_string(at) + " are not in the attached memory");
  }
  core_.shared_bytes += bytes;
  return memory_.base() + at;
}

const std::byte* PsSession::receive_payload(const PsHead& head) {
  if (head.flags & PsHead::kShared) return shared(head.at, payload_bytes(head), head);
  std::byte* const into = payload_.take(head.length);
  if (!receive_all(fd_, into, head.length)) throw PsRefusal(PsWrong::internal, "the connection ended");
  unread_ = 0;
  core_.bytes_in += head.length;
  if (crc32c(0, into, head.length) != head.payload_crc) {
    throw PsRefusal(PsWrong::malformed, describe(head) + ": the CRC of its payload does not hold");
  }
  return into;
}

bool PsSession::pass_over(std::uint64_t bytes) {
  while (bytes > 0) {
    const std::size_t part = std::min<std::uint64_t>(bytes, kPassedOver);
    if (!receive_all(fd_, payload_.take(part), part)) return false;
    core_.bytes_in += part;
    bytes -= part;
  }
  return true;
}

bool PsSession::answer(const PsHead& head, const std::byte* payload, std::uint64_t bytes, std::uint64_t count,
                       std::uint64_t cursor) {
  PsReply reply;
  reply.sequence = head.sequence;
  reply.count = count;
  reply.cursor = cursor;
  reply.basis = core_.steps.basis(client_, reply.global_step);
  reply.length = bytes;
  seal(reply, crc32c(0, payload, bytes));
  core_.bytes_out += sizeof reply + bytes;
  return send_all(fd_, reinterpret_cast<const std::byte*>(&reply), sizeof reply, payload, bytes);
}

bool PsSession::refuse(const PsHead& head, PsWrong wrong, const std::string& text) {
  ++core_.refused;
  PsReply reply;
  reply.sequence = head.sequence;
  reply.wrong = wrong;
  reply.global_step = core_.steps.global_step();
  reply.length = std::min(text.size(), kPsMostText);
  const auto* const payload = reinterpret_cast<const std::byte*>(text.data());
  seal(reply, crc32c(0, payload, reply.length));
  core_.bytes_out += sizeof reply + reply.length;
  return send_all(fd_, reinterpret_cast<const std::byte*>(&reply), sizeof reply, payload, reply.length);
}

PsTable& PsSession::table_of(const PsHead& head) const {
  PsTable& table = core_.tables.table(head.number);
  const bool rows = head.kind == PsKind::pull_rows || head.kind == PsKind::push_rows || head.kind == PsKind::set_rows;
  if (rows && table.table.config().dim != head.dim) {
    throw PsRefusal(PsWrong::mismatch, describe(head) + ": rows of " + std::to_string(head.dim) +
                                           " numbers, and the table's have " +
                                           std::to_string(table.table.config().dim));
  }
  return table;
}

PsRange& PsSession::range_of(const PsHead& head) const {
  PsRange& range = core_.tables.range(head.number);
  if (range.range.count() != head.count) {
    throw PsRefusal(PsWrong::mismatch, describe(head) + ": " + std::to_string(head.count) +
                                           " numbers, and the range has " + std::to_string(range.range.count()));
  }
  return range;
}

bool PsSession::attach(const PsHead& head) {
  PsAttach told;
  std::memcpy(&told, receive_payload(head), sizeof told);
  Mapping mapping;
  try {
    mapping = map_peer(static_cast<pid_t>(told.pid), static_cast<int>(told.fd), told.bytes, told.nonce);
  } catch (const std::exception& error) {
    throw PsRefusal(PsWrong::unmapped, describe(head) + ": " + error.what());
  }
  if (mapping.base() == nullptr) {
    throw PsRefusal(PsWrong::unmapped, describe(head) + ": the client's memory is not to be had here");
  }
  memory_ = std::move(mapping);
  return answer(head);
}

}  // namespace argosy
