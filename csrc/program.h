// Runs one rank's program: the steps that a schedule gives it, over links, as a flow of data.
//
// Sends leave in the order of the list: a later one would take bandwidth from an earlier one that others wait for. A
// receive happens when what it needs is there, whatever the order of the list, as long as the result is that of running
// the list in order (see [Note: hazards] in hazards.cpp). Messages are cut into chunks; a chunk that has been received
// and reduced is sent on while the rest of its message is still on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "link.h"
#include "reduce_types.h"
#include "watch.h"

namespace argosy {

struct Step {
  enum class Kind { send, copy, reduce };  // send to a peer; receive and replace; receive and reduce into what is there
  Kind kind;
  int peer;  // may be the rank itself: what it sends there it also receives
  std::byte* address;
  std::size_t bytes;
};

struct Program {
  std::span<const Step> steps;
  Frame operation;            // sequence, operation, count and from, as every frame of this program carries them
  ReduceKernel kernel;        // for reduce steps: called with out = source 0 = the address, source 1 = the payload
  std::size_t element_bytes;  // chunks end between elements
  std::size_t chunk_bytes;    // of a long message, or 0 for the default; all ranks must give the same
  std::function<Link&(int peer)> link;
};

// Returns when all steps are done and all that was sent is handed to the network (or the ring). Throws Failure; then
// links have adopted what was under way, and can carry nothing more than an abort frame.
//
// The k-th message from one rank to another is what the k-th of the one's sends to the other brings to the k-th of
// the other's receives; they have the same number of bytes. All programs that run over the same links, one after the
// other, have growing sequence numbers: see [Note: early or wrong] in program.cpp.
void run(const Program& program, Watch& watch);

}  // namespace argosy
