#include "tcp_link.h"

#include <fcntl.h>
#include <linux/tcp.h>  // knows more of tcp_info than the C library's
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "crc32c.h"
#include "failure.h"
#include "frame.h"

namespace argosy {
namespace {

// A frame smaller than this goes by the first free lane, so that the receiver finds most of them in one place.
constexpr std::size_t kSpread = 64 << 10;

// [Note: a cut link]
// A cable that is pulled says nothing. While no data is under way, keep-alive asks: after a second of silence, each
// second, three times. While some is, `notice_cuts` ends the wait for the peer's word after 3.5 s. It is for the
// keeper's connection alone: a peer that computes and does not read yet looks just the same once its window is full.
//
// Buffers are left to the kernel, which fits them to the path. Fixed ones, of 128 KiB to 2 MiB, gained nothing.
constexpr int kUserTimeoutMilliseconds = 3500, kIdleSeconds = 1, kIntervalSeconds = 1, kProbes = 3;

// [Note: order on the wire]
// What waits in the buffers of two connections leaves by turns. So a round's message to the next partner would take
// half of the link from what was handed over before it, whose receiver then is late with its own: halving-doubling on
// four hosts lost a tenth of its time, on four hosts of two ranks a fifth. Hence a program turns to another partner
// when the connections to the last one have taken all, and a connection takes little more than it sends at once: what
// leaves in a few milliseconds, in which a thread that is wanted gets a core. On a fast link less would cost speed.
constexpr double kUnsentSeconds = 0.004;
constexpr int kLeastUnsent = 16 << 10, kMostUnsent = 128 << 10;
constexpr unsigned kBetweenLooks = 16;  // how often a connection must be full until its speed is looked at again

void set(int fd, int level, int name, int value, const char* what) {
  if (setsockopt(fd, level, name, &value, sizeof value) != 0) {
    throw std::system_error(errno, std::generic_category(), what);
  }
}

void prepare(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
    throw std::system_error(errno, std::generic_category(), "lane: fd " + std::to_string(fd));
  }
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw std::system_error(errno, std::generic_category(), "lane: fd " + std::to_string(fd));
  }
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return;  // a socketpair needs none of this
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kMostUnsent, "TCP_NOTSENT_LOWAT");
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds, "TCP_KEEPIDLE");
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kIntervalSeconds, "TCP_KEEPINTVL");
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes, "TCP_KEEPCNT");
}

// Takes less of what it cannot send soon. What is no TCP connection has no speed to look at.
void limit_unsent(int fd) {
  tcp_info seen = {};
  socklen_t size = sizeof seen;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &seen, &size) != 0 || seen.tcpi_delivery_rate == 0) return;
  const double soon = static_cast<double>(seen.tcpi_delivery_rate) * kUnsentSeconds;
  const int bytes = static_cast<int>(std::clamp<double>(soon, kLeastUnsent, kMostUnsent));
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, sizeof bytes);  // a help, and nothing fails without it
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

TcpLink::TcpLink(int peer, int rank, const std::vector<int>& fds) : peer_(peer), rank_(rank) {
  if (fds.empty()) throw std::invalid_argument("a link to rank " + std::to_string(peer) + " needs a connection");
  for (const int fd : fds) prepare(fd);  // before any is taken over: whoever gave them closes them if this throws
  for (const int fd : fds) {
    lanes_.push_back(std::make_unique<Lane>());
    lanes_.back()->fd = fd;
  }
}

TcpLink::~TcpLink() {
  for (const auto& lane : lanes_) close(lane->fd);
}

void TcpLink::lose(const std::string& what) const {
  throw Failure(Failure::Kind::lost, peer_, "rank " + std::to_string(peer_) + " is lost: " + what);
}

bool TcpLink::send(const Frame& frame, const std::byte* payload, std::uint64_t* sent) {
  if (!broken_.empty()) return false;
  const std::size_t first = frame.length < kSpread ? 0 : turn_;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    const std::size_t number = (first + i) % lanes_.size();
    Lane& lane = *lanes_[number];
    if (lane.out.busy) continue;
    turn_ = number + 1;
    lane.out.frame = frame;
    lane.out.frame.from = static_cast<std::uint32_t>(rank_);
    seal(lane.out.frame, crc32c(0, payload, frame.length));
    lane.out.payload = payload;
    lane.out.sent = sent;
    lane.out.done = 0;
    lane.out.busy = true;
    push(lane);
    return true;
  }
  return false;
}

bool TcpLink::flush() {
  bool moved = false;
  for (const auto& lane : lanes_) {
    if (lane->out.busy) moved |= push(*lane);
  }
  return moved;
}

// An error is not thrown here: the peer may have told on another lane why it goes, and that is what should be seen.
bool TcpLink::push(Lane& lane) {
  Outgoing& out = lane.out;
  const std::size_t total = sizeof(Frame) + out.frame.length;
  bool moved = false;
  while (out.done < total && broken_.empty()) {
    iovec parts[2];
    std::size_t count = 0;
    if (out.done < sizeof(Frame)) {
      parts[count++] = {reinterpret_cast<std::byte*>(&out.frame) + out.done, sizeof(Frame) - out.done};
    }
    if (out.frame.length > 0) {
      const std::size_t offset = out.done - std::min(out.done, sizeof(Frame));
      parts[count++] = {const_cast<std::byte*>(out.payload) + offset, out.frame.length - offset};
    }
    const msghdr message = {.msg_name = nullptr,
                            .msg_namelen = 0,
                            .msg_iov = parts,
                            .msg_iovlen = count,
                            .msg_control = nullptr,
                            .msg_controllen = 0,
                            .msg_flags = 0};
    const ssize_t written = sendmsg(lane.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && would_block()) {
      if (moved && out.full++ % kBetweenLooks == 0) limit_unsent(lane.fd);
      return moved;
    }
    if (written < 0) {
      broken_ = std::string("sending to it failed: ") + std::strerror(errno);
      return moved;
    }
    out.done += static_cast<std::size_t>(written);
    moved = true;
  }
  if (out.done == total) {
    out.busy = false;
    if (out.sent != nullptr) *out.sent += out.frame.length;
    out.adopted.reset();
  }
  return moved;
}

bool TcpLink::receive(Sink& sink) {
  bool moved = false;
  for (const auto& lane : lanes_) {
    if (lane->ended || !receive_on(*lane, sink)) continue;
    moved = true;
    if (lane->in.frame.length < kSpread) break;  // it may be what an answer waits for; the next call looks further
  }
  if (lanes() == 0) lose("it closed the connection");
  if (!moved && !broken_.empty()) lose(broken_);
  return moved;
}

bool TcpLink::receive_on(Lane& lane, Sink& sink) {
  Incoming& in = lane.in;
  bool moved = false;
  while (in.stage == Incoming::Stage::head) {
    const std::size_t there = in.ahead_end - in.ahead_begin;
    if (there >= sizeof(Frame)) {
      std::memcpy(&in.frame, in.ahead.data() + in.ahead_begin, sizeof(Frame));
      in.ahead_begin += sizeof(Frame);
      check_head(in.frame, peer_);
      in.stage = Incoming::Stage::offering;
      moved = true;
      break;
    }
    std::memmove(in.ahead.data(), in.ahead.data() + in.ahead_begin, there);
    in.ahead_begin = 0;
    in.ahead_end = there;
    std::size_t none = 0;
    read(lane, nullptr, 0, none);
    if (in.ahead_end == there) return moved;
    moved = true;
    if (in.ahead_end < sizeof(Frame)) return moved;
  }
  if (in.stage == Incoming::Stage::offering && !start_frame(lane, sink)) return moved;
  if (in.into == nullptr && in.frame.length <= in.ahead_end - in.ahead_begin) {  // shown where it is
    const std::byte* const payload = in.ahead.data() + in.ahead_begin;
    in.ahead_begin += in.frame.length;
    in.crc = crc32c(0, payload, in.frame.length);
    finish_frame(lane, sink, payload);
    return true;
  }
  if (fill_payload(lane, moved)) {
    finish_frame(lane, sink, in.into);
    moved = true;
  }
  return moved;
}

// Finds a place for the payload. Returns false if the frame is to be held back.
bool TcpLink::start_frame(Lane& lane, Sink& sink) {
  Incoming& in = lane.in;
  in.into = nullptr;
  if (in.frame.type == Frame::Type::data && !in.pass_over) {
    const Sink::Place place = sink.offer(in.frame);
    if (!place.ready) return false;
    in.into = place.into;
  }
  in.done = 0;
  in.crc = 0;
  in.stage = Incoming::Stage::payload;
  if (in.into == nullptr && in.frame.length > in.ahead_end - in.ahead_begin) {
    if (in.buffer_bytes < in.frame.length) {
      in.buffer = std::make_unique_for_overwrite<std::byte[]>(in.frame.length);
      in.buffer_bytes = in.frame.length;
    }
    in.into = in.buffer.get();
  }
  return true;
}

// Returns whether the payload is complete.
bool TcpLink::fill_payload(Lane& lane, bool& moved) {
  Incoming& in = lane.in;
  const auto take = [&](std::size_t bytes) {
    in.crc = crc32c(in.crc, in.into + in.done, bytes);
    in.done += bytes;
    moved = true;
  };
  if (const std::size_t there = std::min<std::size_t>(in.ahead_end - in.ahead_begin, in.frame.length - in.done)) {
    std::memcpy(in.into + in.done, in.ahead.data() + in.ahead_begin, there);
    in.ahead_begin += there;
    take(there);
  }
  while (in.done < in.frame.length) {
    in.ahead_begin = in.ahead_end = 0;  // all of it was payload
    std::size_t got = 0;
    const bool more = read(lane, in.into + in.done, in.frame.length - in.done, got);
    if (got > 0) take(got);
    if (!more && in.done < in.frame.length) return false;
  }
  return true;
}

void TcpLink::finish_frame(Lane& lane, Sink& sink, const std::byte* payload) {
  Incoming& in = lane.in;
  in.stage = Incoming::Stage::head;
  const bool pass_over = std::exchange(in.pass_over, false);
  if (pass_over) return;  // adopted in the middle of it, so its CRC is not known
  check_payload(in.frame, in.crc);
  if (in.frame.type == Frame::Type::abort) throw_abort(in.frame, payload);
  if (in.frame.type == Frame::Type::data) sink.arrived(in.frame, payload);
}

// Reads up to `bytes` into a place, `got` of them, and what follows into `ahead`. Returns false if there was nothing
// more to read.
bool TcpLink::read(Lane& lane, std::byte* into, std::size_t bytes, std::size_t& got) {
  Incoming& in = lane.in;
  const std::size_t room = kAhead - in.ahead_end;
  iovec parts[2];
  std::size_t count = 0;
  if (bytes > 0) parts[count++] = {into, bytes};
  parts[count++] = {in.ahead.data() + in.ahead_end, room};
  ssize_t size;
  do {
    size = readv(lane.fd, parts, static_cast<int>(count));
  } while (size < 0 && errno == EINTR);
  if (size < 0 && would_block()) return false;
  const bool between = in.stage == Incoming::Stage::head && in.ahead_begin == in.ahead_end;
  if (size <= 0) {
    const int error = size < 0 ? errno : 0;
    // A peer that is done closes its lanes in any order, perhaps with a reset, while another still has frames of it.
    if (between && (error == 0 || error == ECONNRESET)) {
      lane.ended = true;
      return false;
    }
    const std::string what = error == 0 ? "it closed the connection" : std::strerror(error);
    lose(between ? what : what + ", in the middle of a frame");
  }
  got = std::min(static_cast<std::size_t>(size), bytes);
  in.ahead_end += static_cast<std::size_t>(size) - got;
  return static_cast<std::size_t>(size) == bytes + room;
}

void TcpLink::notice_cuts() {
  for (const auto& lane : lanes_) {
    setsockopt(lane->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMilliseconds, sizeof kUserTimeoutMilliseconds);
  }
}

void TcpLink::forsake() {
  for (const auto& lane : lanes_) {
    close(lane->fd);
    lane->fd = -1;
  }
}

void TcpLink::shut() {
  for (const auto& lane : lanes_) ::shutdown(lane->fd, SHUT_WR);
}

void TcpLink::adopt() {
  for (const auto& lane : lanes_) {
    Outgoing& out = lane->out;
    if (out.busy && out.adopted == nullptr) {
      out.adopted = std::make_unique_for_overwrite<std::byte[]>(out.frame.length);
      if (out.frame.length > 0) std::memcpy(out.adopted.get(), out.payload, out.frame.length);
      out.payload = out.adopted.get();
      out.sent = nullptr;
    }
    Incoming& in = lane->in;
    if (in.stage == Incoming::Stage::payload) {
      in.pass_over = true;
      if (in.buffer_bytes < in.frame.length) {
        in.buffer = std::make_unique_for_overwrite<std::byte[]>(in.frame.length);
        in.buffer_bytes = in.frame.length;
      }
      in.into = in.buffer.get();
    }
  }
}

std::size_t TcpLink::descriptors(pollfd* into, std::size_t room) const {
  std::size_t count = 0;
  for (const auto& lane : lanes_) {
    // A lane that holds a frame back has nothing to tell until the frame is taken.
    const bool reads = !lane->ended && lane->in.stage != Incoming::Stage::offering;
    const int events = (reads ? POLLIN : 0) | (lane->out.busy ? POLLOUT : 0);
    if (events != 0 && count < room) into[count++] = {lane->fd, static_cast<short>(events), 0};
  }
  return count;
}

std::size_t TcpLink::lanes() const {
  const auto open = [](const auto& lane) { return !lane->ended; };
  return static_cast<std::size_t>(std::count_if(lanes_.begin(), lanes_.end(), open));
}

}  // namespace argosy
