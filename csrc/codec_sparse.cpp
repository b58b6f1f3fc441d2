#include "codec_sparse.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "reduce.h"

namespace argosy {
namespace {

constexpr std::size_t kLongestGap = 65535;
constexpr std::size_t kLeastSamples = 1024;
constexpr std::size_t kLookEvery = 509;  // a prime: it meets every column of a matrix
constexpr std::size_t kAhead = 32;       // entries: of a parameter's lines hardly any is in a cache

const SparseKernels& kernels_of(std::optional<std::string_view> isa) {
  for (const std::string_view name : instruction_sets()) {
    if (isa.value_or(name) != name) continue;
#if defined(__x86_64__)
    if (name == "avx512") return avx512::sparse_kernels;
    if (name == "avx2") return avx2::sparse_kernels;
#endif
    return baseline::sparse_kernels;
  }
  throw std::invalid_argument("this CPU cannot run isa '" + std::string(*isa) + "'");
}

std::uint32_t magnitude_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & kMagnitude;
}

// The k-th largest magnitude, digit by digit, and how many of those that are equal to it belong to the k.
struct Kth {
  Kth(std::span<const float> values, std::size_t k) : magnitude(0), equals(k) {
    constexpr unsigned kDigit = 11;
    for (unsigned shift = 2 * kDigit;; shift -= kDigit) {               // 22, 11 and 0: three digits are 33 bits
      std::array<std::uint32_t, std::size_t{1} << kDigit> histogram{};  // there are fewer than 2^32 elements
      for (const float value : values) {
        const std::uint64_t bits = magnitude_of(value);
        if (bits >> (shift + kDigit) == std::uint64_t{magnitude} >> (shift + kDigit)) {
          ++histogram[(bits >> shift) & (histogram.size() - 1)];
        }
      }
      std::size_t digit = histogram.size() - 1;
      for (; histogram[digit] < equals; --digit) equals -= histogram[digit];
      magnitude |= static_cast<std::uint32_t>(digit << shift);
      if (shift == 0) return;
    }
  }

  std::uint32_t magnitude;
  std::size_t equals;
};

// About 1 % of a tensor, for guesses of where its k-th largest magnitude lies.
class Sample {
 public:
  Sample(const SparseKernels& kernels, const Share& share, std::size_t k) {
    const std::size_t wanted = std::min(std::max(share.count / 100, kLeastSamples), share.count);
    const std::size_t stride = (share.count / wanted) | 1;  // odd: a power of two would see few columns of a matrix
    const std::size_t runs = share.count / (stride * kSampleRun);
    values_.resize(runs * kSampleRun);
    kernels.sample(share, stride, values_.data(), runs);
    // Counts in a sample spread by their square root; four times that is hardly ever exceeded.
    const double expected = static_cast<double>(k) * values_.size() / share.count;
    rank_ = static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 4);
  }

  // A magnitude that more than k elements probably have, and zeros never; 1 if there is none.
  std::uint32_t guess() const {
    if (rank_ > values_.size()) return 1;
    return std::clamp<std::uint32_t>(Kth(values_, rank_).magnitude, 1, kInfinite);
  }

  void doubt() { rank_ *= 8; }

 private:
  std::vector<float> values_;
  std::size_t rank_;
};

// Leaves the k largest, in their order; of equals the first. Returns the magnitude of the least of them.
std::uint32_t keep_largest(Candidates& found, std::size_t k) {
  Kth kth({found.values, found.count}, k);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < found.count; ++i) {
    const std::uint32_t size = magnitude_of(found.values[i]);
    const bool equal = size == kth.magnitude;
    if (size < kth.magnitude || (equal && kth.equals == 0)) continue;
    kth.equals -= equal;
    found.values[kept] = found.values[i];
    found.indices[kept++] = found.indices[i];
  }
  found.count = kept;
  return kth.magnitude;
}

using Pass = std::size_t (*)(const Share& share, std::size_t begin, std::uint32_t least, Candidates& found);

// Whenever the room is full, all but the k largest go, and from then on only what is larger is of interest: of equals,
// the first are taken. So a bad guess costs time, and never more room.
void run(Pass pass, const Share& share, std::size_t k, std::uint32_t least, Candidates& found) {
  for (std::size_t at = 0; (at = pass(share, at, least, found)) < share.count;) least = keep_largest(found, k) + 1;
}

void pack(const Candidates& found, float* values, std::uint16_t* gaps, std::size_t entries) {
  std::size_t entry = 0, previous = 0;
  const auto put = [&](float value, std::size_t gap) {
    values[entry] = value;
    gaps[entry++] = static_cast<std::uint16_t>(gap);
  };
  for (std::size_t i = 0; i < found.count; ++i) {
    std::size_t gap = found.indices[i] - previous;
    for (; gap > kLongestGap; gap -= kLongestGap) put(0, kLongestGap);
    put(found.values[i], gap);
    previous = found.indices[i];
  }
  while (entry < entries) put(0, 0);
}

// The places that messages lead to, once each, in the order of the messages.
std::vector<std::uint32_t> places_of(const std::uint16_t* gaps, std::size_t entries, std::size_t messages,
                                     std::vector<std::uint64_t>& seen, std::size_t count) {
  std::vector<std::uint32_t> places;
  places.reserve(entries * messages);
  for (std::size_t message = 0; message < messages; ++message) {
    std::size_t index = 0;
    for (std::size_t entry = 0; entry < entries; ++entry) {
      index += gaps[message * entries + entry];
      if (index >= count) throw std::invalid_argument("these are not entries of this tensor");
      std::uint64_t& word = seen[index / 64];
      const std::uint64_t bit = std::uint64_t{1} << (index % 64);
      if ((word & bit) == 0) places.push_back(static_cast<std::uint32_t>(index));
      word |= bit;
    }
  }
  return places;
}

}  // namespace

std::size_t sparse_entries(std::size_t count, std::size_t k) {
  if (k < 1 || k > count || count > std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument("k is " + std::to_string(k) + " and count " + std::to_string(count) +
                                ": k must be from 1 to count, and count below 2^32");
  }
  return k + (count - 1) / kLongestGap;
}

std::size_t sparse_compress(const Share& share, std::size_t k, float* values, std::uint16_t* gaps,
                            std::optional<std::string_view> isa) {
  const SparseKernels& kernels = kernels_of(isa);
  const std::size_t entries = sparse_entries(share.count, k), room = k + k / 2 + 4096;
  const auto room_values = std::make_unique_for_overwrite<float[]>(room);
  const auto room_indices = std::make_unique_for_overwrite<std::uint32_t[]>(room);
  Candidates found{room_values.get(), room_indices.get(), 0, room};

  Sample sample(kernels, share, k);
  std::uint32_t least = sample.guess();
  run(kernels.gather, share, k, least, found);
  if (found.broken != Candidates::kNone) {
    found.values[0] = std::numeric_limits<float>::quiet_NaN();
    found.indices[0] = static_cast<std::uint32_t>(found.broken);
    found.count = 1;
  }
  while (found.count < k && least > 1 && found.broken == Candidates::kNone) {
    sample.doubt();
    least = sample.guess();
    found.count = 0;
    run(kernels.collect, share, k, least, found);
  }
  if (found.count > k) keep_largest(found, k);

  for (std::size_t i = 0; i < found.count; ++i) {
    share.kept[found.indices[i]] = 0;
    if (share.velocity != nullptr) share.velocity[found.indices[i]] = 0;
  }
  pack(found, values, gaps, entries);
  return found.count;
}

void sparse_drain(const Share& share, std::optional<std::string_view> isa) { kernels_of(isa).drain(share); }

void sparse_add(float* out, std::size_t count, const float* values, const std::uint16_t* gaps, std::size_t entries) {
  std::size_t index = 0;
  for (std::size_t entry = 0; entry < entries; ++entry) {
    index += gaps[entry];
    if (index >= count) {
      throw std::invalid_argument("entry " + std::to_string(entry) + " is for element " + std::to_string(index) +
                                  " of " + std::to_string(count) + ": these are not entries of this tensor");
    }
    out[index] += values[entry];
  }
}

bool sparse_descend(float* parameter, const float* gradient, std::size_t count, float rate, const std::uint16_t* gaps,
                    std::size_t entries, std::size_t messages) {
  std::vector<std::uint64_t> seen((count + 63) / 64);
  const std::vector<std::uint32_t> places = places_of(gaps, entries, messages, seen, count);
  for (std::size_t i = 0; i < count; i += kLookEvery) {
    __builtin_prefetch(gradient + std::min(i + 16 * kLookEvery, count - 1));
    if (gradient[i] != 0 && (seen[i / 64] >> (i % 64) & 1) == 0) return false;
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    const std::uint32_t ahead = places[std::min(i + kAhead, places.size() - 1)], place = places[i];
    __builtin_prefetch(parameter + ahead, 1);
    __builtin_prefetch(gradient + ahead);
    parameter[place] = std::fma(-rate, gradient[place], parameter[place]);  // as torch does it, bit for bit
  }
  return true;
}

}  // namespace argosy
