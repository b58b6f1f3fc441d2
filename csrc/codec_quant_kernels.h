// Blockwise quantisation with error feedback, written once and built for each instruction set. See [Note: records].
//
// A format says how a block is written and read:
//   add: adds the block's values to its residual, and returns the block's magnitude, which is not finite if a number in
//        it is not;
//   write: writes the codes, leaves in the residual what they do not say, and returns the scale;
//   read: gives the block's numbers, eight lanes at a time.
#pragma once

#include "codec_quant_lanes.h"
#include "codec_quant_types.h"

namespace argosy::ARGOSY_ISA {
namespace {

constexpr std::int32_t kMagnitude = 0x7fffffff;  // all bits of a float but its sign
constexpr float kLargest = __FLT_MAX__;

// Codes of -most to most, a fraction of the block's largest magnitude.
struct Integers {
  // Seen as integers, magnitudes are in the same order, and infinity and NaN are above all numbers.
  template <std::size_t block>
  ARGOSY_INLINE static float add_block(const float* values, float* residual) {
    Lanes<std::int32_t> peaks = {};
    for (std::size_t i = 0; i < block; i += kLanes) {
      const Lanes<float> sum = load_lanes<float>(values + i) + load_lanes<float>(residual + i);
      store_lanes<float>(residual + i, sum);
      const Lanes<std::int32_t> magnitude = Lanes<std::int32_t>(sum) & kMagnitude;
      peaks = magnitude > peaks ? magnitude : peaks;
    }
    std::int32_t peak = 0;
    for (std::size_t i = 0; i < kLanes; ++i) peak = peaks[i] > peak ? peaks[i] : peak;
    return __builtin_bit_cast(float, peak);
  }

  struct Scaling {
    ARGOSY_INLINE Scaling(float peak, float most) {
      // The inverse of less would be infinite. Such a block is sent as zeros, and its numbers stay in the residual.
      if (peak < 0x1p-100f) return;
      scale = peak / most;
      inverse = most / peak;
    }
    float scale = 0, inverse = 0;
  };

  // To a multiple of one, by adding a number whose last bit is worth one: that rounds to nearest even, and leaves the
  // code, as a signed integer, in the last bits.
  static constexpr float kRound = 0x1.8p23f;

  ARGOSY_INLINE static Lanes<std::int32_t> encode(float* residual, const Scaling& scaling) {
    const Lanes<float> value = load_lanes<float>(residual);
    const Lanes<float> shifted = value * scaling.inverse + kRound;
    store_lanes<float>(residual, value - (shifted - kRound) * scaling.scale);
    return Lanes<std::int32_t>(shifted);
  }

  ARGOSY_INLINE static void store_bytes(std::byte* codes, Lanes<std::int32_t> low) {
    store_lanes<std::int8_t>(codes, __builtin_convertvector(low, Lanes<std::int8_t>));
  }
  ARGOSY_INLINE static Lanes<std::int32_t> load_bytes(const std::byte* codes) {
    return __builtin_convertvector(load_lanes<std::int8_t>(codes), Lanes<std::int32_t>);
  }
};

struct Bytes : Integers {
  static constexpr std::size_t kBlock = 256, kCodeBytes = kBlock;

  ARGOSY_INLINE static float add(const float* values, float* residual, std::size_t /*count*/) {
    return add_block<kBlock>(values, residual);
  }
  ARGOSY_INLINE static float write(std::byte* codes, float* residual, float peak) {
    const Scaling scaling(peak, 127);
    for (std::size_t i = 0; i < kBlock; i += kLanes) store_bytes(codes + i, encode(residual + i, scaling));
    return scaling.scale;
  }
  template <class Take>
  ARGOSY_INLINE static void read(const std::byte* codes, float scale, Take take) {
    for (std::size_t i = 0; i < kBlock; i += kLanes) {
      take(i, __builtin_convertvector(load_bytes(codes + i), Lanes<float>) * scale);
    }
  }
};

// A byte holds the codes of one number of the block's first half and of one of its second, so that lanes stay in place.
struct Nibbles : Integers {
  static constexpr std::size_t kBlock = 128, kCodeBytes = kBlock / 2;

  ARGOSY_INLINE static float add(const float* values, float* residual, std::size_t /*count*/) {
    return add_block<kBlock>(values, residual);
  }
  ARGOSY_INLINE static float write(std::byte* codes, float* residual, float peak) {
    const Scaling scaling(peak, 7);
    for (std::size_t i = 0; i < kCodeBytes; i += kLanes) {
      const Lanes<std::int32_t> low = encode(residual + i, scaling), high = encode(residual + kCodeBytes + i, scaling);
      store_bytes(codes + i, (low & 15) | (high << 4));
    }
    return scaling.scale;
  }
  template <class Take>
  ARGOSY_INLINE static void read(const std::byte* codes, float scale, Take take) {
    for (std::size_t i = 0; i < kCodeBytes; i += kLanes) {
      const Lanes<std::int32_t> both = load_bytes(codes + i);
      take(i, __builtin_convertvector((both << 28) >> 28, Lanes<float>) * scale);
      take(kCodeBytes + i, __builtin_convertvector(both >> 4, Lanes<float>) * scale);
    }
  }
};

// One bit, the sign, of every number; the scale is the mean of their magnitudes. A word collects the bits of one lane
// over 32 vectors.
struct Signs {
  static constexpr std::size_t kBlock = 512, kCodeBytes = kBlock / 8, kWord = 32;
  using Words = Lanes<std::uint32_t>;
  static constexpr std::uint32_t kSign = 0x80000000;

  ARGOSY_INLINE static float add(const float* values, float* residual, std::size_t count) {
    constexpr std::size_t kSums = 4;  // one would wait for itself
    Lanes<float> sums[kSums] = {};
    for (std::size_t i = 0; i < kBlock; i += kSums * kLanes) {
      for (std::size_t k = 0; k < kSums; ++k) {
        const std::size_t at = i + k * kLanes;
        const Lanes<float> sum = load_lanes<float>(values + at) + load_lanes<float>(residual + at);
        store_lanes<float>(residual + at, sum);
        sums[k] += Lanes<float>(Lanes<std::int32_t>(sum) & kMagnitude);
      }
    }
    const Lanes<float> lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float total = 0;
    for (std::size_t i = 0; i < kLanes; ++i) total += lanes[i];
    return total / static_cast<float>(count);
  }
  ARGOSY_INLINE static float write(std::byte* codes, float* residual, float mean) {
    const Words magnitude = Words(spread(mean));
    for (std::size_t group = 0; group < kBlock; group += kWord * kLanes) {
      Words word = {};
      for (std::size_t i = group; i < group + kWord * kLanes; i += kLanes) {
        const Lanes<float> value = load_lanes<float>(residual + i);
        const Words sign = Words(value) & kSign;
        word = (word >> 1) | sign;
        store_lanes<float>(residual + i, value - Lanes<float>(magnitude | sign));
      }
      store_lanes<std::uint32_t>(codes + group / 8, word);
    }
    return mean;
  }
  template <class Take>
  ARGOSY_INLINE static void read(const std::byte* codes, float scale, Take take) {
    const Words magnitude = Words(spread(scale));
    for (std::size_t group = 0; group < kBlock; group += kWord * kLanes) {
      const Words word = load_lanes<std::uint32_t>(codes + group / 8);
      for (std::uint32_t bit = 0; bit < kWord; ++bit) {
        take(group + bit * kLanes, Lanes<float>(magnitude | ((word << (kWord - 1 - bit)) & kSign)));
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
ARGOSY_INLINE void store_canonical(float* out, Lanes<float> value) {
  store_lanes<float>(out, value == value ? value : spread(__builtin_nanf("")));
}

template <class Format>
ARGOSY_INLINE void decode_block(float* out, const std::byte* const* sources, std::size_t source_count,
                                std::size_t offset, bool add) {
  for (std::size_t k = 0; k < source_count; ++k) {
    const std::byte* const record = sources[k] + offset;
    float scale;
    __builtin_memcpy(&scale, record, sizeof scale);
    if (k > 0 || add) {
      Format::read(record + sizeof scale, scale, [&](std::size_t i, Lanes<float> value) {
        store_canonical(out + i, load_lanes<float>(out + i) + value);
      });
    } else {
      Format::read(record + sizeof scale, scale,
                   [&](std::size_t i, Lanes<float> value) { store_canonical(out + i, value); });
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
      return &kQuantKernels<Bytes>;
    case 4:
      return &kQuantKernels<Nibbles>;
    case 1:
      return &kQuantKernels<Signs>;
    default:
      return nullptr;
  }
}

}  // namespace argosy::ARGOSY_ISA
