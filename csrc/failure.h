// Why an operation did not end well. Thrown by everything that waits; the engine adds the operation's name and number.
#pragma once

#include <stdexcept>
#include <string>

namespace argosy {

struct Failure : std::runtime_error {
  enum class Kind {
    lost,      // a peer died, left, or cannot be reached
    timeout,   // the deadline passed
    mismatch,  // a peer calls another operation
    aborted,   // the group was aborted, here or by a peer that failed first
    corrupt,   // bytes arrived that no peer sent
  };

  static const char* name(Kind kind) {
    constexpr const char* kNames[] = {"lost", "timeout", "mismatch", "aborted", "corrupt"};
    return kNames[static_cast<int>(kind)];
  }

  Failure(Kind kind, int peer, const std::string& message) : std::runtime_error(message), kind(kind), peer(peer) {}

  Kind kind;
  int peer;  // the rank that is to blame, or -1
};

}  // namespace argosy
