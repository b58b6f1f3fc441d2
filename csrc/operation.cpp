#include "operation.h"

#include <array>
#include <string_view>

#include "reduce.h"

namespace argosy {
namespace {

constexpr std::array<std::string_view, 10> kNames = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                                     "reduce",     "gather",         "scatter",    "all_to_all",
                                                     "barrier",    "message"};

// As `argosy/comm/plans.py` numbers them.
constexpr std::array<std::string_view, 7> kAlgorithms = {"direct", "ring",         "halving_doubling", "binary_blocks",
                                                         "tree",   "hierarchical", "pairwise"};

}  // namespace

std::string describe(std::uint64_t packed, std::uint64_t count) {
  const std::size_t kind = packed & 0xff;
  const auto collective = static_cast<Collective>(kind);
  std::string text(kind < kNames.size() ? kNames[kind] : "an unknown operation");
  if (collective == Collective::barrier) return text;
  if (collective == Collective::message) {
    return text + " of " + std::to_string(count) + " bytes of " + std::string(dtype_name(packed >> 8 & 0xff));
  }
  const bool reduces = collective == Collective::all_reduce || collective == Collective::reduce_scatter ||
                       collective == Collective::reduce;
  if (reduces) text += " (" + std::string(op_name(packed >> 16 & 0xff)) + ")";
  text += " of " + std::to_string(count) + " " + std::string(dtype_name(packed >> 8 & 0xff));
  const bool rooted = collective == Collective::broadcast || collective == Collective::reduce ||
                      collective == Collective::gather || collective == Collective::scatter;
  if (rooted) text += ", root " + std::to_string(packed >> 32);
  const std::size_t algorithm = packed >> 24 & 0xff;
  if (algorithm != 0) text += " by " + std::string(algorithm < kAlgorithms.size() ? kAlgorithms[algorithm] : "a trial");
  return text;
}

Failure splits_differ(int rank, int peer, std::uint64_t sent, std::uint64_t expected) {
  return Failure(Failure::Kind::mismatch, peer,
                 "rank " + std::to_string(peer) + " sends " + std::to_string(sent) + " bytes to rank " +
                     std::to_string(rank) + ", which expects " + std::to_string(expected) +
                     " (all_to_all): the splits must agree");
}

Failure differ(int rank, const Notice& mine, int peer, const Notice& theirs) {
  const auto calls = [](int who, const Notice& notice) {
    return "rank " + std::to_string(who) + " calls " + describe(notice.operation, notice.count) + " as operation #" +
           std::to_string(notice.sequence);
  };
  return Failure(
      Failure::Kind::mismatch, peer,
      calls(rank, mine) + ", " + calls(peer, theirs) + "; all ranks must call the same operations in the same order");
}

}  // namespace argosy
