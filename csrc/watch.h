// What every wait looks at while nothing happens: the deadline, the peers' lives, and whether the group is aborted.
#pragma once

namespace argosy {

class Watch {
 public:
  virtual ~Watch() = default;

  // Throws Failure when there is no use in waiting longer for `peer` (a rank, or -1 for any). It makes system calls:
  // waits call it about once a millisecond, not in every turn of a spin.
  virtual void check(int peer) = 0;

  // Whether somebody waits for the end of what this wait is part of. If not, the core is better left to others.
  virtual bool hurried() const { return true; }
};

}  // namespace argosy
