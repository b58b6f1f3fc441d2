// The sparse codecs' work on one tensor: what is large in a share of a gradient is taken out of it, and sent.
//
// [Note: exactly k]
// Of n elements the k largest by magnitude are sent, or fewer only where fewer are not zero. A threshold estimated from
// a strided sample of 1 % lets a little more than k through; among those few, the k-th largest is found exactly, and of
// equals the first are taken. So all workers know the size of all messages before they see one, and no room is wasted.
//
// [Note: gaps]
// An index is sent as its distance from the one before, in 16 bits: 6 bytes for each number instead of 8. Where a
// distance is longer, a zero is sent on the way; there are at most (n - 1) / 65535 of those, and with k they make up
// the entries of a tensor. Entries that are not needed repeat the last index, with a zero to add.
#pragma once

#include <optional>
#include <string_view>

#include "codec_sparse_types.h"

namespace argosy {

// How many entries a tensor of `count` elements takes, of which `k` are sent.
std::size_t sparse_entries(std::size_t count, std::size_t k);

// Updates velocity and kept, zeroes the gradient, and takes the k largest of kept out of it into the entries; velocity
// is zeroed there too. Returns how many there were. If something is not finite, a single NaN is sent in its place.
std::size_t sparse_compress(const Share& share, std::size_t k, float* values, std::uint16_t* gaps,
                            std::optional<std::string_view> isa);

// Updates, and moves all of kept into the gradient.
void sparse_drain(const Share& share, std::optional<std::string_view> isa);

// Adds entries to a tensor. Throws std::invalid_argument if they lead beyond its end.
void sparse_add(float* out, std::size_t count, const float* values, const std::uint16_t* gaps, std::size_t entries);

// parameter -= rate * gradient, where entries of some messages lead: the gaps of each lie behind those of the one
// before. If the gradient seems to have something elsewhere too (every kLookEvery-th number is looked at), does nothing
// and returns false.
bool sparse_descend(float* parameter, const float* gradient, std::size_t count, float rate, const std::uint16_t* gaps,
                    std::size_t entries, std::size_t messages);

}  // namespace argosy
