// The vocabulary that the gradient codecs' dispatcher and their kernels share.
//
// Every build of the kernels includes this file, so it stays free of standard templates: see
// [Note: one build per instruction set] in lanes.h.
//
// [Note: records]
// Numbers are quantised in blocks. A block becomes a record: its scale (or scales), and its codes, of 8, 4 or 1 bit. So
// a run of blocks is a run of bytes, which can be cut between any two records and sent. The last block of a buffer may
// be short; its record is not: what is missing counts as zeros.
//
// A block with a number that is not finite gets NaN for its scale, so that all of it is NaN wherever it is read. What
// was held back of it is dropped: it would come back as NaN for ever.
#pragma once

#include <cstddef>

namespace argosy {

struct QuantKernels {
  std::size_t block;         // numbers of a block
  std::size_t record_bytes;  // bytes of its record

  // Error feedback in one pass: adds `values` to `residual`, writes the records of the sums, and leaves in `residual`
  // what the records do not say.
  void (*encode)(std::byte* records, const float* values, float* residual, std::size_t count);

  // Sets `out` to what the records of all sources say, added up in their order; with `add`, to what it holds is added.
  void (*decode)(float* out, const std::byte* const* sources, std::size_t source_count, std::size_t count, bool add);
};

// A matrix M of `rows` x `columns`, approximated by P Q^T. P and Q are kept as `rank` rows each: a row of P has `rows`
// numbers, one of Q has `columns`.
struct LowRank {
  std::size_t rows, columns, rank;
};

struct Product {
  const float *p, *q;
};

struct LowRankKernels {
  // matrix += weight * values - sent, and p = matrix q.
  void (*project)(float* p, float* matrix, Product sent, const float* values, float weight, const float* q,
                  LowRank shape);

  // matrix -= sent, with the bits that `project` would make of it.
  void (*settle)(float* matrix, Product sent, LowRank shape);

  // Makes the rows of p orthonormal, by Gram and Schmidt. One that depends on those before it becomes zero.
  void (*orthogonalise)(float* p, std::size_t rows, std::size_t rank);

  // q = matrix^T p.
  void (*project_back)(float* q, const float* matrix, const float* p, LowRank shape);

  // out = p q^T.
  void (*expand)(float* out, const float* p, const float* q, LowRank shape);

  // Rows of q that are not all zeros replace those of `start`, brought to a largest magnitude of one.
  void (*restart)(float* start, const float* q, std::size_t columns, std::size_t rank);
};

// A build's kernels. `find_quant_kernels` gives null for a number of bits that there are no codes of.
namespace baseline {
const QuantKernels* find_quant_kernels(int bits);
extern const LowRankKernels kLowRankKernels;
}  // namespace baseline
namespace avx2 {
const QuantKernels* find_quant_kernels(int bits);
extern const LowRankKernels kLowRankKernels;
}  // namespace avx2
namespace avx512 {
const QuantKernels* find_quant_kernels(int bits);
extern const LowRankKernels kLowRankKernels;
}  // namespace avx512

}  // namespace argosy
