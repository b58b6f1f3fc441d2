#include "ps_wire.h"

#include <bit>

#include "crc32c.h"
#include "table_types.h"

namespace argosy {
namespace {

static_assert(std::endian::native == std::endian::little, "heads go as they stand in memory");

std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

bool of_rows(PsKind kind) { return kind == PsKind::pull_rows || kind == PsKind::push_rows || kind == PsKind::set_rows; }

bool of_range(PsKind kind) {
  return kind == PsKind::create_range || kind == PsKind::pull_range || kind == PsKind::push_range ||
         kind == PsKind::set_range;
}

std::uint64_t numbers(const PsHead& head) { return of_rows(head.kind) ? head.count * head.dim : head.count; }

std::size_t width(const PsHead& head) { return of_rows(head.kind) ? head.dim : kPsRangeWidth; }

[[noreturn]] void refuse(PsWrong wrong, const PsHead& head, const std::string& what) {
  throw PsRefusal(wrong, describe(head) + ": " + what);
}

void check_fields(const PsHead& head) {
  if (head.kind < PsKind::attach || head.kind > PsKind::last) {
    throw PsRefusal(PsWrong::malformed, "request kind " + std::to_string(static_cast<int>(head.kind)) + " is unknown");
  }
  if (head.values > PsValues::last) refuse(PsWrong::malformed, head, "its values are of no known type");
  if (head.reserved != 0) refuse(PsWrong::malformed, head, "reserved is not 0");
  if (head.count > kPsMostCount) {
    refuse(PsWrong::too_large, head,
           "count is " + std::to_string(head.count) + ", more than " + std::to_string(kPsMostCount));
  }
  if (of_rows(head.kind) && (head.dim == 0 || head.dim > kMostDim)) {
    refuse(PsWrong::malformed, head,
           "dim is " + std::to_string(head.dim) + ", not in 1 to " + std::to_string(kMostDim));
  }
  if (of_range(head.kind) && head.count == 0) refuse(PsWrong::malformed, head, "count is 0");
}

void check_size(const PsHead& head, std::uint64_t bytes) {
  if (bytes > kPsMostPayload) {
    refuse(PsWrong::too_large, head,
           std::to_string(bytes) + " bytes are more than " + std::to_string(kPsMostPayload) + ": send it in parts");
  }
}

template <class Head>
std::uint32_t head_crc(const Head& head) {
  return crc32c(0, &head, offsetof(Head, head_crc));
}

template <class Head>
void seal_head(Head& head, std::uint32_t payload_crc) {
  head.payload_crc = payload_crc;
  head.head_crc = head_crc(head);
}

}  // namespace

const char* name(PsKind kind) {
  constexpr const char* kNames[] = {"?",        "attach",     "create_table", "create_range", "pull_rows", "push_rows",
                                    "set_rows", "pull_range", "push_range",   "set_range",    "done",      "leave",
                                    "stats",    "end_day",    "shrink",       "scan",         "rest"};
  return kNames[kind <= PsKind::last ? static_cast<int>(kind) : 0];
}

const char* name(PsWrong wrong) {
  constexpr const char* kNames[] = {"none",     "malformed",  "too_large", "version",  "unknown_table",
                                    "mismatch", "not_finite", "too_few",   "unmapped", "internal"};
  return kNames[static_cast<int>(wrong <= PsWrong::last ? wrong : PsWrong::internal)];
}

PushLayout layout_of(const PsHead& head) {
  const std::uint64_t gradients = padded(encoded_bytes(head.values, numbers(head), width(head)));
  PushLayout layout;
  layout.gradients = head.kind == PsKind::push_rows ? head.count * sizeof(std::int64_t) : 0;
  layout.shows = layout.gradients + gradients;
  layout.clicks = layout.shows + (head.flags & PsHead::kShows ? padded(head.count * sizeof(std::uint32_t)) : 0);
  layout.pulled = layout.clicks + (head.flags & PsHead::kClicks ? padded(head.count * sizeof(float)) : 0);
  layout.total = layout.pulled + (head.flags & PsHead::kPulled ? gradients : 0);
  return layout;
}

void seal(PsHead& head, std::uint32_t payload_crc) { seal_head(head, payload_crc); }

void seal(PsReply& reply, std::uint32_t payload_crc) { seal_head(reply, payload_crc); }

bool is_sealed(const PsHead& head) { return head.magic == PsHead::kMagic && head.head_crc == head_crc(head); }

bool is_sealed(const PsReply& reply) { return reply.magic == PsHead::kMagic && reply.head_crc == head_crc(reply); }

std::uint64_t payload_bytes(const PsHead& head) {
  check_fields(head);
  std::uint64_t bytes = 0;
  switch (head.kind) {
    case PsKind::attach:
      bytes = sizeof(PsAttach);
      break;
    case PsKind::create_table:
    case PsKind::create_range:
      bytes = sizeof(TableConfig);
      break;
    case PsKind::pull_rows:
      bytes = head.count * sizeof(std::int64_t);
      break;
    case PsKind::push_rows:
    case PsKind::push_range:
      bytes = layout_of(head).total;
      break;
    case PsKind::set_rows:
      bytes = head.count * (sizeof(std::int64_t) + head.dim * sizeof(float));
      break;
    case PsKind::set_range:
      bytes = head.count * sizeof(float);
      break;
    default:
      break;
  }
  check_size(head, bytes);
  return bytes;
}

std::uint64_t answer_bytes(const PsHead& head) {
  const std::uint64_t bytes = encoded_bytes(head.values, numbers(head), width(head));
  check_size(head, bytes);
  return bytes;
}

std::string describe(const PsHead& head) {
  std::string text = name(head.kind);
  if (of_range(head.kind)) {
    text += " of range " + std::to_string(head.number);
  } else if (head.kind != PsKind::attach && head.kind != PsKind::done && head.kind != PsKind::leave &&
             head.kind != PsKind::stats && head.kind != PsKind::rest) {
    text += " of table " + std::to_string(head.number);
  }
  text += " by client " + std::to_string(head.client);
  const bool pushes = head.kind == PsKind::push_rows || head.kind == PsKind::push_range;
  if (pushes) text += ", sequence " + std::to_string(head.sequence);
  if (head.kind == PsKind::done) text += ", step " + std::to_string(head.sequence);
  return text;
}

}  // namespace argosy
