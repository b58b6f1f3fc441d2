// Collectives inside one host, over the memory of a crew.
//
// A tensor that lives in the heap of its rank is reduced where it is: rank r reduces slice r of all the tensors and
// writes the result back into all of them. Other tensors pass through the slots chunk by chunk, each chunk small enough
// that it is still in the cache when the others read it. Sums are always made in the order of the ranks, so all get the
// same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "crew.h"
#include "reduce_types.h"

namespace argosy {

// `count` elements cut into `parts`, as equal as can be.
struct Parts {
  std::size_t count;
  std::size_t parts;

  std::size_t begin(std::size_t part) const { return count * part / parts; }
  std::size_t length(std::size_t part) const { return begin(part + 1) - begin(part); }
  std::size_t longest() const { return (count + parts - 1) / parts; }
};

class Local {
 public:
  static constexpr std::size_t kMaxMembers = 1024;

  Local(Crew& crew, const Heap& heap, Watch& watch) : crew_(crew), heap_(heap), watch_(watch) {}

  struct Reduction {
    ReduceKernel kernel;
    std::size_t element_bytes;
  };

  void barrier(const Notice& notice);
  void all_reduce(Notice notice, Reduction reduction, std::byte* data, std::size_t count);
  // Other members' data stays as it is.
  void reduce(const Notice& notice, Reduction reduction, std::byte* data, std::size_t count, std::size_t root);
  void broadcast(const Notice& notice, std::byte* data, std::size_t bytes, std::size_t root);
  void gather(const Notice& notice, const std::byte* in, std::byte* out, std::size_t bytes, std::size_t root);
  void scatter(const Notice& notice, const std::byte* in, std::byte* out, std::size_t bytes, std::size_t root);
  // Sizes in bytes: what goes to each member, and what comes from each.
  void all_to_all(Notice notice, const std::byte* in, std::span<const std::size_t> in_bytes, std::byte* out,
                  std::span<const std::size_t> out_bytes);

  // The two halves of an all-reduce, between which the owners of the parts reduce them with other hosts: first member
  // p < parts ends with the sum of part p, in its place; then all take all parts from their owners.
  void reduce_to_owners(Notice notice, Reduction reduction, std::byte* data, Parts parts);
  void take_from_owners(const Notice& notice, std::size_t element_bytes, std::byte* data, Parts parts);

  // Member p < parts ends with the sum of part p, at `out`; `in` stays as it is, unless `out` is in it.
  void reduce_parts(Notice notice, Reduction reduction, const std::byte* in, Parts parts, std::byte* out);
  // Member p < parts gives part p, which stands at `mine`; all end with all parts in `out`.
  void gather_parts(const Notice& notice, std::size_t element_bytes, const std::byte* mine, Parts parts,
                    std::byte* out);

 private:
  void reduce_small(const Notice& notice, Reduction reduction, std::byte* data, std::size_t count);
  void reduce_in_place(Reduction reduction, std::size_t count);
  void reduce_range(Reduction reduction, std::size_t begin, std::size_t end, std::byte* out, bool write_back);
  struct Chunks;
  void reduce_staged(Reduction reduction, const Chunks& chunks);
  std::byte* tensor(std::size_t member, std::size_t bytes) const;
  bool find_tensors(std::size_t bytes);

  Crew& crew_;
  const Heap& heap_;
  Watch& watch_;
  std::vector<std::byte*> tensors_;  // of all members, if all are in heaps
};

}  // namespace argosy
