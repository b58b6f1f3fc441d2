// No worker outlives its launcher.
//
// The launcher holds one end of a pipe or socket pair and gives the other to the worker. However the launcher ends,
// even by SIGKILL, the kernel closes its end; that is the one sign of its death that always comes.
#pragma once

namespace argosy {

// Starts a detached thread that waits until the other end of `fd` is closed, then sends SIGKILL to the caller's whole
// process group, so call it from a process that leads a group of its own. Bytes that arrive on `fd` are neither read
// nor minded. The thread keeps its own duplicate of `fd`: the caller may close its own.
//
// Throws std::system_error if `fd` is not open or the thread cannot start, and std::invalid_argument if `fd` is of a
// kind whose other end cannot be seen closing.
void guard(int fd);

}  // namespace argosy
