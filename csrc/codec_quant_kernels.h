// Blockwise quantisation with error feedback, written once and built for each instruction set. See [Note: records].
//
// A format says how a block is written and read:
//   add: adds the block's values to its residual, and returns the block's magnitude, which is not finite if a number in
//        it is not;
//   write: writes the codes, leaves in the residual what they do not say, and returns the scale;
//   read: gives the block's numbers, a vector at a time.
//
// [Note: words]
// Codes of less than 32 bits are collected in words of 32, and a word gets those of numbers that are eight apart: the
// first word of a block those of numbers 0, 8, 16 and so on, the second those of 1, 9, 17. So codes are shifted within
// their lane and never move to another, on any instruction set, and vectors of four lanes and of eight write the same.
#pragma once

#include <cstdint>

#include "codec_quant_types.h"
#include "lanes.h"

namespace argosy::ARGOSY_ISA {
namespace {

using Floats = Vector<float>;
using Signed = Vector<std::int32_t>;
using Words = Vector<std::uint32_t>;

constexpr std::size_t kLanes = kVectorBytes / sizeof(float);
constexpr std::size_t kApart = 8;  // see [Note: words]; kLanes divides it
constexpr std::uint32_t kWordBits = 32, kSign = 0x80000000;
constexpr std::int32_t kMagnitude = 0x7fffffff;  // all bits of a float but its sign
constexpr float kLargest = __FLT_MAX__;

ARGOSY_INLINE Floats load_floats(const float* from) {
  return load_vector<float>(reinterpret_cast<const std::byte*>(from));
}
ARGOSY_INLINE void store_floats(float* to, Floats value) {
  store_vector<float>(reinterpret_cast<std::byte*>(to), value);
}
ARGOSY_INLINE Floats spread(float value) { return Floats{} + value; }

// The sum of value and residual, which becomes the residual.
ARGOSY_INLINE Floats add_vector(const float* values, float* residual) {
  const Floats sum = load_floats(values) + load_floats(residual);
  store_floats(residual, sum);
  return sum;
}

// Codes of -kMost to kMost, as a fraction of the block's largest magnitude.
template <std::uint32_t kBits, std::size_t kNumbers>
struct Integers {
  static constexpr std::size_t kBlock = kNumbers, kCodeBytes = kBlock * kBits / 8;
  static constexpr float kMost = (1 << (kBits - 1)) - 1;
  static constexpr std::uint32_t kMask = (1 << kBits) - 1;
  static constexpr std::size_t kGroup = kApart * kWordBits / kBits;  // numbers in eight words

  // Adding this rounds to a whole number, to nearest even, as its last bit is worth one. The last bits of the sum are
  // then the code, as a signed integer.
  static constexpr float kRound = 0x1.8p23f;
  static constexpr std::int32_t kRoundBits = 0x4b400000;

  // Seen as integers, magnitudes are in the same order, and infinity and NaN are above all numbers.
  ARGOSY_INLINE static float add(const float* values, float* residual, std::size_t /*count*/) {
    Signed peaks = {};
    for (std::size_t i = 0; i < kBlock; i += kLanes) {
      const Signed magnitude = Signed(add_vector(values + i, residual + i)) & kMagnitude;
      peaks = magnitude > peaks ? magnitude : peaks;
    }
    std::int32_t peak = 0;
    for (std::size_t i = 0; i < kLanes; ++i) peak = peaks[i] > peak ? peaks[i] : peak;
    return __builtin_bit_cast(float, peak);
  }

  ARGOSY_INLINE static float write(std::byte* codes, float* residual, float peak) {
    // The inverse of less would be infinite. Such a block is sent as zeros, and its numbers stay in the residual.
    const bool none = peak < 0x1p-100f;
    const float scale = none ? 0 : peak / kMost, inverse = none ? 0 : kMost / peak;
    for (std::size_t group = 0; group < kBlock; group += kGroup) {
      for (std::size_t lane = 0; lane < kApart; lane += kLanes) {
        Words word = {};
        for (std::uint32_t k = 0; k < kWordBits / kBits; ++k) {
          float* const at = residual + group + k * kApart + lane;
          const Floats value = load_floats(at), shifted = value * inverse + kRound;
          store_floats(at, value - (shifted - kRound) * scale);
          word |= (Words(shifted) & kMask) << (k * kBits);
        }
        store_vector<std::uint32_t>(codes + group * kBits / 8 + lane * sizeof(std::uint32_t), word);
      }
    }
    return scale;
  }

  template <class Take>
  ARGOSY_INLINE static void read(const std::byte* codes, float scale, Take take) {
    for (std::size_t group = 0; group < kBlock; group += kGroup) {
      for (std::size_t lane = 0; lane < kApart; lane += kLanes) {
        const Words word = load_vector<std::uint32_t>(codes + group * kBits / 8 + lane * sizeof(std::uint32_t));
        for (std::uint32_t k = 0; k < kWordBits / kBits; ++k) {
          const Signed code = Signed(word << (kWordBits - (k + 1) * kBits)) >> (kWordBits - kBits);
          take(group + k * kApart + lane, (Floats(code + kRoundBits) - kRound) * scale);
        }
      }
    }
  }
};

// One bit, the sign, of every number; the scale is the mean of their magnitudes.
struct Signs {
  static constexpr std::size_t kBlock = 512, kCodeBytes = kBlock / 8;
  static constexpr std::size_t kGroup = kApart * kWordBits;

  ARGOSY_INLINE static float add(const float* values, float* residual, std::size_t count) {
    // 32 sums in every build, which are then added up in one order: the same bits everywhere.
    constexpr std::size_t kSums = 32;
    Floats vectors[kSums / kLanes] = {};
    for (std::size_t i = 0; i < kBlock; i += kSums) {
      for (std::size_t k = 0; k < kSums; k += kLanes) {
        vectors[k / kLanes] += Floats(Signed(add_vector(values + i + k, residual + i + k)) & kMagnitude);
      }
    }
    float sums[kSums];
    for (std::size_t k = 0; k < kSums; k += kLanes) store_floats(sums + k, vectors[k / kLanes]);
    for (std::size_t width = kSums / 2; width > 0; width /= 2) {
      for (std::size_t k = 0; k < width; ++k) sums[k] += sums[k + width];
    }
    return sums[0] / static_cast<float>(count);
  }

  ARGOSY_INLINE static float write(std::byte* codes, float* residual, float mean) {
    const Words magnitude = Words(spread(mean));
    for (std::size_t group = 0; group < kBlock; group += kGroup) {
      for (std::size_t lane = 0; lane < kApart; lane += kLanes) {
        Words word = {};
        for (std::size_t k = 0; k < kWordBits; ++k) {
          float* const at = residual + group + k * kApart + lane;
          const Floats value = load_floats(at);
          const Words sign = Words(value) & kSign;
          word = (word >> 1) | sign;
          store_floats(at, value - Floats(magnitude | sign));
        }
        store_vector<std::uint32_t>(codes + group / 8 + lane * sizeof(std::uint32_t), word);
      }
    }
    return mean;
  }

  template <class Take>
  ARGOSY_INLINE static void read(const std::byte* codes, float scale, Take take) {
    const Words magnitude = Words(spread(scale));
    for (std::size_t group = 0; group < kBlock; group += kGroup) {
      for (std::size_t lane = 0; lane < kApart; lane += kLanes) {
        const Words word = load_vector<std::uint32_t>(codes + group / 8 + lane * sizeof(std::uint32_t));
        for (std::uint32_t k = 0; k < kWordBits; ++k) {
          take(group + k * kApart + lane, Floats(magnitude | ((word << (kWordBits - 1 - k)) & kSign)));
        }
      }
    }
  }
};

template <class Format>
constexpr std::size_t kRecordBytes = sizeof(float) + Format::kCodeBytes;

template <class Format>
ARGOSY_INLINE void encode_block(std::byte* record, const float* values, float* residual, std::size_t count) {
  std::byte* const codes = record + sizeof(float);
  const float magnitude = Format::add(values, residual, count);
  float scale;
  if (magnitude <= kLargest) {
    scale = Format::write(codes, residual, magnitude);
  } else {
    scale = __builtin_nanf("");
    __builtin_memset(codes, 0, Format::kCodeBytes);
    __builtin_memset(residual, 0, Format::kBlock * sizeof(float));
  }
  __builtin_memcpy(record, &scale, sizeof scale);
}

template <class Format>
void encode(std::byte* records, const float* values, float* residual, std::size_t count) {
  constexpr std::size_t kBlock = Format::kBlock;
  for (; count >= kBlock; count -= kBlock, values += kBlock, residual += kBlock, records += kRecordBytes<Format>) {
    encode_block<Format>(records, values, residual, kBlock);
  }
  if (count > 0) {
    float padded[2][kBlock] = {};
    __builtin_memcpy(padded[0], values, count * sizeof(float));
    __builtin_memcpy(padded[1], residual, count * sizeof(float));
    encode_block<Format>(records, padded[0], padded[1], count);
    __builtin_memcpy(residual, padded[1], count * sizeof(float));
  }
}

// Which of two NaNs an addition returns is up to CPU and compiler: one and the same leaves.
ARGOSY_INLINE void store_canonical(float* out, Floats value) {
  store_floats(out, value == value ? value : spread(__builtin_nanf("")));
}

template <class Format>
ARGOSY_INLINE void decode_block(float* out, const std::byte* const* sources, std::size_t source_count,
                                std::size_t offset, bool add) {
  for (std::size_t k = 0; k < source_count; ++k) {
    const std::byte* const record = sources[k] + offset;
    float scale;
    __builtin_memcpy(&scale, record, sizeof scale);
    if (k > 0 || add) {
      Format::read(record + sizeof scale, scale,
                   [&](std::size_t i, Floats value) { store_canonical(out + i, load_floats(out + i) + value); });
    } else {
      Format::read(record + sizeof scale, scale, [&](std::size_t i, Floats value) { store_canonical(out + i, value); });
    }
  }
}

template <class Format>
void decode(float* out, const std::byte* const* sources, std::size_t source_count, std::size_t count, bool add) {
  constexpr std::size_t kBlock = Format::kBlock;
  std::size_t offset = 0;
  for (; count >= kBlock; count -= kBlock, out += kBlock, offset += kRecordBytes<Format>) {
    decode_block<Format>(out, sources, source_count, offset, add);
  }
  if (count > 0) {
    float padded[kBlock] = {};
    __builtin_memcpy(padded, out, count * sizeof(float));
    decode_block<Format>(padded, sources, source_count, offset, add);
    __builtin_memcpy(out, padded, count * sizeof(float));
  }
}

template <class Format>
constexpr QuantKernels kQuantKernels = {Format::kBlock, kRecordBytes<Format>, encode<Format>, decode<Format>};

}  // namespace

const QuantKernels* find_quant_kernels(int bits) {
  switch (bits) {
    case 8:
      return &kQuantKernels<Integers<8, 256>>;
    case 4:
      return &kQuantKernels<Integers<4, 128>>;
    case 1:
      return &kQuantKernels<Signs>;
    default:
      return nullptr;
  }
}

}  // namespace argosy::ARGOSY_ISA
