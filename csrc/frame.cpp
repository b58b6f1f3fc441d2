#include "frame.h"

#include <algorithm>
#include <bit>
#include <string>

#include "crc32c.h"
#include "failure.h"

namespace argosy {
namespace {

static_assert(std::endian::native == std::endian::little, "frames go as they stand in memory");

constexpr std::size_t kSealed = offsetof(Frame, head_crc);

[[noreturn]] void refuse(int peer, const std::string& what) {
  throw Failure(Failure::Kind::corrupt, peer, "a frame from rank " + std::to_string(peer) + " is corrupt: " + what);
}

}  // namespace

void seal(Frame& frame, std::uint32_t payload_crc) {
  frame.magic = Frame::kMagic;
  frame.payload_crc = payload_crc;
  frame.head_crc = crc32c(0, &frame, kSealed);
}

void check_head(const Frame& frame, int from) {
  const auto number = [](std::uint64_t value) { return std::to_string(value); };
  if (frame.magic != Frame::kMagic) refuse(from, "magic is " + number(frame.magic) + ", not " + number(Frame::kMagic));
  if (frame.head_crc != crc32c(0, &frame, kSealed)) refuse(from, "head_crc does not hold");
  const auto type = static_cast<std::uint32_t>(frame.type);
  if (type < static_cast<std::uint32_t>(Frame::Type::data) || type > static_cast<std::uint32_t>(Frame::Type::abort)) {
    refuse(from, "type " + number(type) + " is unknown");
  }
  if (frame.reserved != 0) refuse(from, "reserved is " + number(frame.reserved) + ", not 0");
  if (frame.length > Frame::kMaxPayload) {
    refuse(from, "length is " + number(frame.length) + ", more than " + number(Frame::kMaxPayload));
  }
  if (frame.type == Frame::Type::abort && frame.length > Frame::kMaxAbortText) {
    refuse(from, "length of an abort is " + number(frame.length) + ", more than " + number(Frame::kMaxAbortText));
  }
  if (frame.from != static_cast<std::uint32_t>(from)) refuse(from, "from is " + number(frame.from));
}

void check_payload(const Frame& frame, std::uint32_t crc) {
  if (frame.payload_crc != crc) refuse(static_cast<int>(frame.from), "payload_crc does not hold");
}

Frame make_abort(int blamed, std::string_view text) {
  Frame frame;
  frame.type = Frame::Type::abort;
  frame.operation = static_cast<std::uint64_t>(Failure::Kind::aborted);
  frame.message = static_cast<std::uint32_t>(blamed);
  frame.length = static_cast<std::uint32_t>(std::min<std::size_t>(text.size(), Frame::kMaxAbortText));
  return frame;
}

void throw_abort(const Frame& frame, const std::byte* payload) {
  const std::string text(reinterpret_cast<const char*>(payload), frame.length);
  const bool known = frame.operation <= static_cast<std::uint64_t>(Failure::Kind::corrupt);
  const auto kind = known ? static_cast<Failure::Kind>(frame.operation) : Failure::Kind::aborted;
  throw Failure(kind, static_cast<std::int32_t>(frame.message), text);
}

}  // namespace argosy
