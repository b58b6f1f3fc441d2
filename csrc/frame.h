// Frames on their way: sealed by the sender, checked by the receiver before anything in them is believed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "link.h"

namespace argosy {

// Fills in magic and CRCs, that of the payload as given.
void seal(Frame& frame, std::uint32_t payload_crc);

// Throws Failure(corrupt), naming the field, if this is not a head that rank `from` sent.
void check_head(const Frame& frame, int from);

// Throws Failure(corrupt) if the payload's CRC is not the one that the head tells.
void check_payload(const Frame& frame, std::uint32_t crc);

// The frame that tells a peer why this rank gives up, and whom it blames (a rank or -1). Its payload is `text`, of
// which kMaxAbortText bytes go.
Frame make_abort(int blamed, std::string_view text);

// What an abort frame means to its receiver: throws a Failure of the kind that `operation` tells.
[[noreturn]] void throw_abort(const Frame& frame, const std::byte* payload);

}  // namespace argosy
