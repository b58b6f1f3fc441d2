#include "ps_post.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>

#include "crc32c.h"
#include "ps_socket.h"
#include "signals.h"

namespace argosy {
namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(200);  // at whether the caller is interrupted

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

PsPost::PsPost(const std::vector<int>& fds, std::vector<std::string> names, std::function<void()> interrupted)
    : names_(std::move(names)), interrupted_(std::move(interrupted)) {
  for (const int fd : fds) prepare_ps_socket(fd, /*blocking=*/false);  // before any is taken over
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  for (const int fd : fds) {
    lanes_.push_back(std::make_unique<Lane>());
    lanes_.back()->fd = fd;
  }
  const AllSignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "ps-client");
}

void PsPost::stop() {
  stopping_ = true;
  wake();
}

PsPost::~PsPost() {
  stop();
  if (thread_.joinable()) thread_.join();
  for (const auto& lane : lanes_) close(lane->fd);
  close(wake_fd_);
}

std::string PsPost::called(std::size_t lane) const {
  const std::size_t server = lane / 2;
  return "server " + std::to_string(server) + (server < names_.size() ? " (" + names_[server] + ")" : "");
}

std::string PsPost::told(std::size_t lane, const PsRequest& request) const {
  return called(lane) + ", " + describe(request.head);
}

void PsPost::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);  // full is awake enough
}

void PsPost::submit(std::size_t number, const PsRequestPtr& request) {
  Lane& lane = *lanes_.at(number);
  {
    const std::lock_guard lock(mutex_);
    if (!lane.lost.empty())
      throw PsError("lost", static_cast<int>(number / 2), told(number, *request) + ": " + lane.lost);
    lane.queue.push_back(request);
    lane.quiet += request->quiet;
  }
  const std::unique_lock sending(lane.sending, std::try_to_lock);
  if (sending.owns_lock()) send_some(lane);
  bool all;
  {
    const std::lock_guard lock(mutex_);
    all = lane.sent >= lane.queue.size();
  }
  if (!all) wake();
}

// Sends what the socket takes. The caller holds lane.sending.
void PsPost::send_some(Lane& lane) {
  while (true) {
    PsRequestPtr request;
    {
      const std::lock_guard lock(mutex_);
      if (lane.sent >= lane.queue.size() || !lane.lost.empty()) return;
      request = lane.queue[lane.sent];
    }
    const std::size_t total = sizeof(PsHead) + request->head.length;
    const std::byte* const payload = request->from != nullptr ? request->from : request->payload.data();
    while (lane.out_done < total) {
      iovec parts[2];
      std::size_t count = 0;
      if (lane.out_done < sizeof(PsHead)) {
        parts[count++] = {reinterpret_cast<std::byte*>(&request->head) + lane.out_done, sizeof(PsHead) - lane.out_done};
      }
      if (request->head.length > 0) {
        const std::size_t offset = lane.out_done - std::min(lane.out_done, sizeof(PsHead));
        parts[count++] = {const_cast<std::byte*>(payload) + offset, request->head.length - offset};
      }
      msghdr message = {};
      message.msg_iov = parts;
      message.msg_iovlen = count;
      const ssize_t sent = sendmsg(lane.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return;  // it is full; or an error, which reading finds again, after what the server said
      lane.out_done += static_cast<std::size_t>(sent);
      bytes_sent_ += static_cast<std::uint64_t>(sent);
    }
    const std::lock_guard lock(mutex_);
    lane.out_done = 0;
    ++lane.sent;
  }
}

void PsPost::run() {
  std::vector<pollfd> fds(lanes_.size() + 1);
  while (!stopping_) {
    fds[0] = {wake_fd_, POLLIN, 0};
    {
      const std::lock_guard lock(mutex_);
      for (std::size_t i = 0; i < lanes_.size(); ++i) {
        const Lane& lane = *lanes_[i];
        const bool sends = lane.sent < lane.queue.size();
        fds[i + 1] = {lane.lost.empty() ? lane.fd : -1, static_cast<short>(POLLIN | (sends ? POLLOUT : 0)), 0};
      }
    }
    if (poll(fds.data(), fds.size(), -1) < 0) continue;
    if (fds[0].revents != 0) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t got = read(wake_fd_, &count, sizeof count);
    }
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      if (fds[i + 1].revents & POLLOUT) {
        const std::lock_guard sending(lanes_[i]->sending);
        send_some(*lanes_[i]);
      }
      if (fds[i + 1].revents & ~POLLOUT) receive_some(i);
    }
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i) lose(i, "lost", "the client was closed");
}

// Reads until nothing is there.
void PsPost::receive_some(std::size_t number) {
  Lane& lane = *lanes_[number];
  while (true) {
    const bool in_head = lane.in_place == nullptr;
    std::byte* const into = in_head ? reinterpret_cast<std::byte*>(&lane.reply) : lane.in_place;
    const std::size_t total = in_head ? sizeof(PsReply) : lane.reply.length;
    const ssize_t got = recv(lane.fd, into + lane.in_done, total - lane.in_done, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && would_block()) return;
    if (got <= 0) return lose(number, "lost", got == 0 ? "it closed the connection" : std::strerror(errno));
    if (!in_head) lane.in_crc = crc32c(lane.in_crc, into + lane.in_done, static_cast<std::size_t>(got));
    lane.in_done += static_cast<std::size_t>(got);
    bytes_received_ += static_cast<std::uint64_t>(got);
    if (lane.in_done < total) continue;
    lane.in_done = 0;
    if (in_head) {
      if (!begin_answer(number)) return;
      if (lane.reply.length > 0) continue;
    }
    end_answer(number);
    if (!lane.lost.empty()) return;
  }
}

// A whole head is there: finds a place for its payload.
bool PsPost::begin_answer(std::size_t number) {
  Lane& lane = *lanes_[number];
  const PsReply& reply = lane.reply;
  if (!is_sealed(reply) || reply.version != PsHead::kVersion || reply.length > kPsMostPayload) {
    lose(number, "corrupt", "it sent bytes that are no answer");
    return false;
  }
  {
    // A server may answer before the caller who sent the request has noted it.
    const std::lock_guard sending(lane.sending);
    const std::lock_guard lock(mutex_);
    // An answer to what is not sent yet can only be an error, after which the server ends the connection.
    const bool expected = !lane.queue.empty() && (lane.sent > 0 || reply.wrong != PsWrong::none);
    lane.receiving = expected ? lane.queue.front() : nullptr;
  }
  if (lane.receiving == nullptr || lane.receiving->head.sequence != reply.sequence) {
    lose(number, "corrupt", "it sent an answer that was not asked for");
    return false;
  }
  PsRequest& request = *lane.receiving;
  lane.in_crc = 0;
  if (reply.length == 0) return true;
  if (reply.wrong == PsWrong::none && request.into != nullptr && reply.length == request.into_bytes) {
    lane.in_place = request.into;
  } else {
    request.answer.resize(reply.length);
    lane.in_place = request.answer.data();
  }
  return true;
}

void PsPost::end_answer(std::size_t number) {
  Lane& lane = *lanes_[number];
  const PsRequestPtr request = std::move(lane.receiving);
  const bool in_place = lane.in_place != nullptr && lane.in_place == request->into;
  lane.in_place = nullptr;
  if (lane.in_crc != lane.reply.payload_crc) return lose(number, "corrupt", "the CRC of an answer does not hold");
  request->reply = lane.reply;
  if (lane.reply.wrong != PsWrong::none) {
    request->error_kind = name(lane.reply.wrong);
    request->error = called(number) + ": " +
                     std::string(reinterpret_cast<const char*>(request->answer.data()), request->answer.size());
  } else if (request->into != nullptr && request->into_bytes > 0 && !in_place) {
    request->error_kind = "corrupt";
    request->error = told(number, *request) + ": the answer has " + std::to_string(lane.reply.length) + " bytes, not " +
                     std::to_string(request->into_bytes);
  }
  lane.global_step = std::max(lane.global_step.load(), lane.reply.global_step);  // only this thread writes it
  bool was_sent;
  {
    const std::lock_guard lock(mutex_);
    was_sent = lane.sent > 0;
    lane.queue.pop_front();
    if (was_sent) --lane.sent;
    finish(number, request);
  }
  if (!was_sent) lose(number, "lost", request->error);
}

// The caller holds the lock.
void PsPost::finish(std::size_t number, const PsRequestPtr& request) {
  request->finished = true;
  if (request->quiet) {
    --lanes_[number]->quiet;
    if (!request->error.empty() && late_error_ == nullptr) {
      late_error_ = std::make_unique<PsError>(request->error_kind, static_cast<int>(number / 2), request->error);
    }
    request->payload.reset();
  }
  changed_.notify_all();
}

void PsPost::lose(std::size_t number, const std::string& kind, const std::string& why) {
  Lane& lane = *lanes_[number];
  const std::lock_guard sending(lane.sending);
  const std::lock_guard lock(mutex_);
  if (!lane.lost.empty()) return;
  lane.lost = why;
  lane.receiving.reset();
  lane.in_place = nullptr;
  for (const PsRequestPtr& request : lane.queue) {
    request->error_kind = kind;
    request->error = told(number, *request) + ": " + why;
    finish(number, request);
  }
  lane.queue.clear();
  lane.sent = 0;
  changed_.notify_all();
}

template <class Ready>
void PsPost::wait_until(std::unique_lock<std::mutex>& lock, std::size_t lane, const std::string& what,
                        Clock::time_point deadline, Ready ready) {
  const auto begin = Clock::now();
  while (!ready()) {
    const auto now = Clock::now();
    if (now >= deadline) {
      const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - begin).count();
      throw PsError("timeout", static_cast<int>(lane / 2), what + ": no answer for " + std::to_string(waited) + " ms");
    }
    if (changed_.wait_until(lock, std::min(deadline, now + kBetweenLooks)) == std::cv_status::timeout && interrupted_) {
      lock.unlock();
      interrupted_();
      lock.lock();
    }
  }
}

void PsPost::wait(std::size_t lane, const PsRequestPtr& request, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  if (!request->finished) {
    wait_until(lock, lane, told(lane, *request), deadline, [&] { return request->finished; });
  }
  if (!request->error.empty()) throw PsError(request->error_kind, static_cast<int>(lane / 2), request->error);
}

bool PsPost::is_quiet() const {
  const std::lock_guard lock(mutex_);
  return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->quiet == 0; });
}

void PsPost::wait_for_window(std::size_t lane, std::size_t most, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  wait_until(lock, lane, called(lane) + ", pushes", deadline, [&] { return lanes_[lane]->quiet < most; });
}

std::uint64_t PsPost::global_step() const {
  std::uint64_t furthest = 0;
  for (const auto& lane : lanes_) furthest = std::max(furthest, lane->global_step.load());
  return furthest;
}

std::uint64_t PsPost::steps_over() const {
  std::uint64_t over = std::numeric_limits<std::uint64_t>::max();
  for (std::size_t lane = 0; lane + 1 < lanes_.size(); lane += 2) {
    over = std::min(over, std::max(lanes_[lane]->global_step.load(), lanes_[lane + 1]->global_step.load()));
  }
  return over;
}

void PsPost::throw_late_error() {
  const std::lock_guard lock(mutex_);
  if (late_error_ == nullptr) return;
  const PsError error = *late_error_;
  late_error_.reset();
  throw error;
}

}  // namespace argosy
