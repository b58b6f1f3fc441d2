// The vocabulary that the sparse codecs' driver and their kernels share.
//
// Every build of the kernels includes this file, so it stays free of standard templates: see
// [Note: one build per instruction set] in lanes.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace argosy {

// A worker's share of a tensor's gradient, what it has kept of earlier ones, and how the two are put together:
//   g = scale * gradient + decay * parameter
//   no momentum:  kept += g
//   momentum:     velocity = momentum * velocity + g,     kept += velocity
//   Nesterov's:   velocity = momentum * (velocity + g),   kept += velocity + g
struct Share {
  float* gradient;
  float* velocity;         // null: no momentum
  float* kept;             // null, where it is drained only: nothing
  const float* parameter;  // null: no weight decay
  std::size_t count;
  float scale, decay, momentum;
  bool nesterov;
};

// Numbers that may be sent, in rising order of their indices.
struct Candidates {
  static constexpr std::size_t kNone = ~std::size_t{0};

  float* values;
  std::uint32_t* indices;
  std::size_t count, room;
  std::size_t broken = kNone;  // the index of a number that was not finite
};

// Magnitudes are compared as whole numbers, without the sign's bit: zeros are 0, and what is not finite is on top.
constexpr std::uint32_t kMagnitude = 0x7fffffff, kInfinite = 0x7f800000;

// Samples are taken in short runs: elements by themselves would each cost a cache line of every array, and at 1 % that
// is a sixth of all there are.
constexpr std::size_t kSampleRun = 4;

// What has to be done to every element, built for each instruction set.
struct SparseKernels {
  // Takes what `kept` would have, of every `stride`-th run of kSampleRun elements.
  void (*sample)(const Share& share, std::size_t stride, float* values, std::size_t runs);
  // Updates velocity and kept from element `begin` on, zeroes the gradient, and collects what has a magnitude of
  // `least` (from 1 to kInfinite) or more. Returns where it stopped: the end, or earlier if there was no more room.
  // What is not finite is not collected, but noted, and zeroed in velocity and kept.
  std::size_t (*gather)(const Share& share, std::size_t begin, std::uint32_t least, Candidates& found);
  // Collects in the same way from `kept` as it is.
  std::size_t (*collect)(const Share& share, std::size_t begin, std::uint32_t least, Candidates& found);
  // Updates, moves all of kept into the gradient, and leaves kept zero. What is not finite is zeroed in velocity.
  void (*drain)(const Share& share);
};

namespace baseline {
extern const SparseKernels sparse_kernels;
}
namespace avx2 {
extern const SparseKernels sparse_kernels;
}
namespace avx512 {
extern const SparseKernels sparse_kernels;
}

}  // namespace argosy
