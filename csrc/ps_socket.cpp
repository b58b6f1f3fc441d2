#include "ps_socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>

namespace argosy {
namespace {

// As for the links of a group: see [Note: a cut link] in tcp_link.cpp.
constexpr int kIdleSeconds = 1, kIntervalSeconds = 1, kProbes = 3;

[[noreturn]] void fail(const char* what, int fd) {
  throw std::system_error(errno, std::generic_category(), std::string(what) + " of fd " + std::to_string(fd));
}

void set(int fd, int level, int name, int value, const char* what) {
  if (setsockopt(fd, level, name, &value, sizeof value) != 0) fail(what, fd);
}

}  // namespace

void prepare_ps_socket(int fd, bool blocking) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK) < 0) fail("flags", fd);
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) fail("the peer", fd);
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return;  // a socketpair needs none of this
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds, "TCP_KEEPIDLE");
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kIntervalSeconds, "TCP_KEEPINTVL");
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes, "TCP_KEEPCNT");
}

bool receive_all(int fd, std::byte* into, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = recv(fd, into, bytes, MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    into += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool send_all(int fd, const std::byte* head, std::size_t head_bytes, const std::byte* payload, std::size_t bytes) {
  iovec parts[2] = {{const_cast<std::byte*>(head), head_bytes}, {const_cast<std::byte*>(payload), bytes}};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  while (parts[0].iov_len + parts[1].iov_len > 0) {
    const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    auto left = static_cast<std::size_t>(sent);
    for (iovec& part : parts) {
      const std::size_t taken = std::min(left, part.iov_len);
      part.iov_base = static_cast<std::byte*>(part.iov_base) + taken;
      part.iov_len -= taken;
      left -= taken;
    }
  }
  return true;
}

bool has_hung_up(int fd) {
  pollfd end = {.fd = fd, .events = POLLRDHUP, .revents = 0};
  return poll(&end, 1, 0) > 0;
}

}  // namespace argosy
