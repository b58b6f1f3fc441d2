// Copies into memory that other ranks will read.
//
// [Note: near and far]
// A store to a line that another core has read must take it back first. If both cores share a cache that is soon done.
// If they do not (other sockets, other parts of one chip), it takes ten times as long: 64 KiB were written in 26
// microseconds instead of 2, while reading them took 4 instead of 1.7. Stores around the caches have nothing to take
// back, 64 KiB were written in 1.5 microseconds then; but where a cache is shared they cost more than twice, as the
// reader must fetch the bytes from memory. Which it is changes while a process runs: schedulers move threads, and
// hypervisors move what looks like a core.
//
// So now and then a copy is timed. If two in a row are slow, the next ones go around the caches, on trial: what makes
// these slow too (memory that is touched for the first time, or that everybody wants) is no reason to go that way.
#pragma once

#include <cstddef>

namespace argosy {

// A copy that goes around the caches, all but its ends; nothing else is in order with it.
void copy_around(std::byte* to, const std::byte* from, std::size_t bytes);

class Giver {
 public:
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);
  // Before others are told that they can read: stores around the caches are not in order with others.
  void settle() const;
  // From now on all copies go around the caches, or none does, whatever they take: for tests.
  void force(bool far) { far_ = far, forced_ = true; }

 private:
  void timed(std::byte* to, const std::byte* from, std::size_t bytes);
  void forget();

  bool far_ = false, on_trial_ = false, forced_ = false;
  std::size_t since_ = 0;  // bytes since the last timed copy
  int slow_ = 0;           // timed copies through the caches that were slow, one after the other
  double through_ = 0;     // what the last one took for each line, in nanoseconds
};

}  // namespace argosy
