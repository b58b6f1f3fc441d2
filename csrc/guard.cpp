#include "guard.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "signals.h"

namespace argosy {
namespace {

// Others never hang up: a file has no other end, and a datagram socket does not notice.
bool hangs_up(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) return false;
  if (S_ISFIFO(status.st_mode)) return true;
  int type = 0;
  socklen_t size = sizeof type;
  return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && (type == SOCK_STREAM || type == SOCK_SEQPACKET);
}

void kill_group_when_closed(int fd) {
  // Of what poll may report only hang-up is asked for, and errors always are; unread bytes wake nobody.
  pollfd end = {.fd = fd, .events = POLLRDHUP, .revents = 0};
  while (poll(&end, 1, -1) <= 0) {
  }
  kill(0, SIGKILL);
}

}  // namespace

void guard(int fd) {
  // A stopped process runs no thread. The launcher's death wakes it, so that the guard can do its work.
  prctl(PR_SET_PDEATHSIG, SIGCONT);
  const std::string name = "guard: fd " + std::to_string(fd);
  const int own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own_fd < 0) throw std::system_error(errno, std::generic_category(), name);
  if (!hangs_up(own_fd)) {
    close(own_fd);
    throw std::invalid_argument(name + " is neither a pipe nor a stream socket: it would not show its peer's end");
  }
  const AllSignalsBlocked blocked;
  try {
    std::thread thread(kill_group_when_closed, own_fd);
    pthread_setname_np(thread.native_handle(), "argosy-guard");
    thread.detach();
  } catch (...) {
    close(own_fd);
    throw;
  }
}

}  // namespace argosy
