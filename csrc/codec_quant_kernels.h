// Blockwise quantisation with error feedback, written once and built for each instruction set. See [Note: records].
//
// A format says how a block is written and read:
//   add: adds the block's values to its residual, and gives the magnitudes that its scales are made of; one is not
//        finite if a number in the block is not;
//   write: writes the record, and leaves in the residual what it does not say;
//   write_nan: writes the record of a block that is not finite;
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
  static constexpr std::size_t kBlock = kNumbers, kScales = 1;
  static constexpr std::size_t kRecordBytes = sizeof(float) + kBlock * kBits / 8;
  static constexpr float kMost = (1 << (kBits - 1)) - 1;
  static constexpr std::uint32_t kMask = (1 << kBits) - 1;
  static constexpr std::size_t kGroup = kApart * kWordBits / kBits;  // numbers in eight words

  // Adding this rounds to a whole number, to nearest even, as its last bit is worth one. The last bits of the sum are
  // then the code, as a signed integer.
  static constexpr float kRound = 0x1.8p23f;
  static constexpr std::int32_t kRoundBits = 0x4b400000;

  // Seen as integers, magnitudes are in the same order, and infinity and NaN are above all numbers.
  ARGOSY_INLINE static void add(const float* values, float* residual, std::size_t /*count*/, float* magnitudes) {
    Signed peaks = {};
    for (std::size_t i = 0; i < kBlock; i += kLanes) {
      const Signed magnitude = Signed(add_vector(values + i, residual + i)) & kMagnitude;
      peaks = magnitude > peaks ? magnitude : peaks;
    }
    std::int32_t peak = 0;
    for (std::size_t i = 0; i < kLanes; ++i) peak = peaks[i] > peak ? peaks[i] : peak;
    magnitudes[0] = __builtin_bit_cast(float, peak);
  }

  ARGOSY_INLINE static void write(std::byte* record, float* residual, const float* magnitudes) {
    const float peak = magnitudes[0];
    // The inverse of less would be infinite. Such a block is sent as zeros, and its numbers stay in the residual.
    const bool none = peak < 0x1p-100f;
    const float scale = none ? 0 : peak / kMost, inverse = none ? 0 : kMost / peak;
    __builtin_memcpy(record, &scale, sizeof scale);
    std::byte* const codes = record + sizeof scale;
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
  }

  ARGOSY_INLINE static void write_nan(std::byte* record) {
    const float scale = __builtin_nanf("");
    __builtin_memset(record, 0, kRecordBytes);
    __builtin_memcpy(record, &scale, sizeof scale);
  }

  template <class Take>
  ARGOSY_INLINE static void read(const std::byte* record, Take take) {
    float scale;
    __builtin_memcpy(&scale, record, sizeof scale);
    const std::byte* const codes = record + sizeof scale;
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

// One bit, the sign, of every number. Every 64 numbers of a block have a scale of their own, the mean of their
// magnitudes: with one for more, training was found to diverge at learning rates that are right for exact gradients. It
// is cut to the upper half of a float; error feedback makes up for that, too.
struct Signs {
  static constexpr std::size_t kBlock = 256, kScales = 4, kRun = kBlock / kScales;
  static constexpr std::size_t kHeaderBytes = kScales * sizeof(std::uint16_t);
  static constexpr std::size_t kRecordBytes = kHeaderBytes + kBlock / 8;
  static constexpr std::uint16_t kHalfNan = 0x7fc0;

  ARGOSY_INLINE static void add(const float* values, float* residual, std::size_t count, float* magnitudes) {
    for (std::size_t run = 0; run < kScales; ++run) {
      // Eight sums in every build, which are then added up in one order: the same bits everywhere.
      Floats vectors[kApart / kLanes] = {};
      for (std::size_t i = run * kRun; i < (run + 1) * kRun; i += kApart) {
        for (std::size_t lane = 0; lane < kApart; lane += kLanes) {
          const Signed sum = Signed(add_vector(values + i + lane, residual + i + lane));
          vectors[lane / kLanes] += Floats(sum & kMagnitude);
        }
      }
      float sums[kApart];
      for (std::size_t lane = 0; lane < kApart; lane += kLanes) store_floats(sums + lane, vectors[lane / kLanes]);
      for (std::size_t width = kApart / 2; width > 0; width /= 2) {
        for (std::size_t k = 0; k < width; ++k) sums[k] += sums[k + width];
      }
      const std::size_t before = run * kRun, numbers = count < before + kRun ? count - before : kRun;
      magnitudes[run] = count > before ? sums[0] / static_cast<float>(numbers) : 0;
    }
  }

  ARGOSY_INLINE static void write(std::byte* record, float* residual, const float* magnitudes) {
    std::uint16_t halves[kScales];
    for (std::size_t run = 0; run < kScales; ++run) {
      halves[run] = static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, magnitudes[run]) >> 16);
    }
    __builtin_memcpy(record, halves, kHeaderBytes);
    for (std::size_t lane = 0; lane < kApart; lane += kLanes) {
      Words word = {};
      for (std::size_t run = 0; run < kScales; ++run) {
        const Words magnitude = spread_half(halves[run]);
        for (std::size_t i = run * kRun; i < (run + 1) * kRun; i += kApart) {
          const Floats value = load_floats(residual + i + lane);
          const Words sign = Words(value) & kSign;
          word = (word >> 1) | sign;
          store_floats(residual + i + lane, value - Floats(magnitude | sign));
        }
      }
      store_vector<std::uint32_t>(record + kHeaderBytes + lane * sizeof(std::uint32_t), word);
    }
  }

  ARGOSY_INLINE static void write_nan(std::byte* record) {
    const std::uint16_t halves[kScales] = {kHalfNan, kHalfNan, kHalfNan, kHalfNan};
    __builtin_memset(record, 0, kRecordBytes);
    __builtin_memcpy(record, halves, kHeaderBytes);
  }

  template <class Take>
  ARGOSY_INLINE static void read(const std::byte* record, Take take) {
    std::uint16_t halves[kScales];
    __builtin_memcpy(halves, record, kHeaderBytes);
    for (std::size_t lane = 0; lane < kApart; lane += kLanes) {
      Words word = load_vector<std::uint32_t>(record + kHeaderBytes + lane * sizeof(std::uint32_t));
      for (std::size_t run = 0; run < kScales; ++run) {
        const Words magnitude = spread_half(halves[run]);
        for (std::uint32_t k = 0; k < kRun / kApart; ++k) {
          const Words sign = (word << (kWordBits - 1 - k)) & kSign;
          take(run * kRun + k * kApart + lane, Floats(magnitude | sign));
        }
        word >>= kRun / kApart;
      }
    }
  }

  ARGOSY_INLINE static Words spread_half(std::uint16_t half) { return Words{} + (std::uint32_t{half} << 16); }
};

template <class Format>
ARGOSY_INLINE void encode_block(std::byte* record, const float* values, float* residual, std::size_t count) {
  float magnitudes[Format::kScales];
  Format::add(values, residual, count, magnitudes);
  bool finite = true;
  for (const float magnitude : magnitudes) finite &= magnitude <= kLargest;
  if (finite) {
    Format::write(record, residual, magnitudes);
  } else {
    Format::write_nan(record);
    __builtin_memset(residual, 0, Format::kBlock * sizeof(float));
  }
}

template <class Format>
void encode(std::byte* records, const float* values, float* residual, std::size_t count) {
  constexpr std::size_t kBlock = Format::kBlock;
  for (; count >= kBlock; count -= kBlock, values += kBlock, residual += kBlock, records += Format::kRecordBytes) {
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
    if (k > 0 || add) {
      Format::read(record,
                   [&](std::size_t i, Floats value) { store_canonical(out + i, load_floats(out + i) + value); });
    } else {
      Format::read(record, [&](std::size_t i, Floats value) { store_canonical(out + i, value); });
    }
  }
}

template <class Format>
void decode(float* out, const std::byte* const* sources, std::size_t source_count, std::size_t count, bool add) {
  constexpr std::size_t kBlock = Format::kBlock;
  std::size_t offset = 0;
  for (; count >= kBlock; count -= kBlock, out += kBlock, offset += Format::kRecordBytes) {
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
constexpr QuantKernels kQuantKernels = {Format::kBlock, Format::kRecordBytes, encode<Format>, decode<Format>};

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
