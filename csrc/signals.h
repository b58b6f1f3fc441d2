// Keeps signals away from the core's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace argosy {

// A thread starts with the signal mask of its creator. With all signals blocked, those meant for the process go to
// its other threads, where Python expects them.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t previous_;
};

}  // namespace argosy
