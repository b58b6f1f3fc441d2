// Copies into memory that other ranks will read.
//
// [Note: near and far]
// A store to a line that another core has read must take it back first. If both cores share a cache that is soon done.
// If they do not (other sockets, other parts of one chip), it takes ten times as long: 64 KiB were written in 26
// microseconds instead of 2, while reading them took 4 instead of 1.7. Stores around the caches have nothing to take
// back, 64 KiB were written in 1.3 microseconds then; but where a cache is shared they cost more than twice, as the
// reader must fetch the bytes from memory. Which it is changes while a process runs: schedulers move threads, and
// hypervisors move what looks like a core. So now and then a long copy is timed, and the next ones are made as it
// tells.
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

 private:
  void timed(std::byte* to, const std::byte* from, std::size_t bytes);

  bool far_ = false;
  int since_ = 0;  // copies since the last timed one
  int slow_ = 0;   // timed copies that were slow, one after the other
};

}  // namespace argosy
