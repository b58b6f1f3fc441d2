#include "keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <system_error>
#include <vector>

#include "frame.h"

namespace argosy {
namespace {

constexpr auto kBeat = std::chrono::milliseconds(500);
constexpr auto kSilence = std::chrono::milliseconds(2500);

}  // namespace

Keeper::~Keeper() { stop(); }

void Keeper::add(int peer, int fd) {
  auto link = std::make_unique<TcpLink>(peer, rank_, std::vector<int>{fd});
  link->notice_cuts();
  contacts_.try_emplace(peer, std::move(link));
}

void Keeper::start() {
  if (contacts_.empty()) return;
  if (pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0) throw std::system_error(errno, std::generic_category(), "pipe2");
  for (auto& [peer, contact] : contacts_) contact.heard = Clock::now();
  thread_ = std::thread(&Keeper::watch, this);
}

void Keeper::watch() {
  std::vector<pollfd> polled;
  while (!stopping_) {
    polled.assign(1, {wake_[0], POLLIN, 0});
    {
      const std::lock_guard lock(mutex_);
      for (auto& [peer, contact] : contacts_) {
        if (contact.failure || contact.left) continue;
        beat(contact, kRunning);
        polled.emplace_back();
        if (contact.link->descriptors(&polled.back(), 1) == 0) polled.pop_back();
      }
    }
    const auto next = Clock::now() + kBeat;
    while (!stopping_ && Clock::now() < next) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now());
      if (poll(polled.data(), polled.size(), static_cast<int>(left.count())) <= 0) break;
      const std::lock_guard lock(mutex_);
      for (auto& [peer, contact] : contacts_) listen(contact);
      // A connection that has ended, or that nothing was read from, would be ready for ever: it is looked at again
      // after the next beat.
      for (std::size_t i = 1; i < polled.size(); ++i) {
        if (polled[i].revents != 0) polled[i].fd = -1;
      }
    }
  }
}

void Keeper::beat(Contact& contact, std::uint32_t message) {
  try {
    contact.link->flush();
    Frame frame;
    frame.from = static_cast<std::uint32_t>(rank_);
    frame.message = message;
    frame.sequence = notice_.sequence;
    frame.operation = notice_.operation;
    frame.count = notice_.count;
    contact.link->send(frame, nullptr, &contact.sent);
  } catch (const Failure& failure) {
    if (!contact.failure) contact.failure = failure;
  }
}

void Keeper::listen(Contact& contact) {
  if (contact.failure) return;
  try {
    while (contact.link->receive(contact)) {
    }
  } catch (const Failure& failure) {
    contact.failure = failure;
  }
}

void Keeper::check() {
  const std::lock_guard lock(mutex_);
  for (auto& [peer, contact] : contacts_) {
    if (contact.failure && !contact.left) throw Failure(*contact.failure);
    const Notice& theirs = contact.notice;
    if (theirs.sequence != notice_.sequence || theirs.sequence == 0) continue;
    if (theirs.operation != notice_.operation || theirs.count != notice_.count) {
      throw differ(rank_, notice_, peer, theirs);
    }
  }
}

void Keeper::tell_operation(const Notice& notice) {
  if (contacts_.empty()) return;
  const std::lock_guard lock(mutex_);
  notice_ = notice;
}

std::optional<Failure> Keeper::told_by(int peer) {
  const std::lock_guard lock(mutex_);
  const auto found = contacts_.find(peer);
  if (found == contacts_.end()) return {};
  listen(found->second);
  if (!found->second.left) return found->second.failure;
  return Failure(Failure::Kind::lost, peer, "rank " + std::to_string(peer) + " has left the group");
}

std::string Keeper::silent(int* first) {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (auto& [peer, contact] : contacts_) {
    const auto silence = Clock::now() - contact.heard;
    if (contact.left || contact.failure || silence < kSilence) continue;
    if (*first < 0) *first = peer;
    if (!text.empty()) text += ", ";
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(silence).count();
    text += "rank " + std::to_string(peer) + " (silent for " + std::to_string(seconds) + " s: is it stopped?)";
  }
  return text;
}

void Keeper::tell_failure(const Failure& failure) {
  const std::lock_guard lock(mutex_);
  const std::string text = failure.what();
  Frame frame = make_abort(failure.peer, text);
  frame.operation = static_cast<std::uint64_t>(failure.kind);
  for (auto& [peer, contact] : contacts_) {
    if (contact.failure || contact.left) continue;
    try {
      // A beat may be half sent; it is short, and so is the wait.
      for (int turn = 0; turn < 100; ++turn) {
        contact.link->flush();
        if (contact.link->send(frame, reinterpret_cast<const std::byte*>(text.data()), &contact.sent)) break;
        usleep(100);
      }
      contact.link->flush();
      contact.link->adopt();
    } catch (const Failure&) {  // it is the one that was lost
    }
  }
}

void Keeper::tell_leaving() {
  {
    const std::lock_guard lock(mutex_);
    for (auto& [peer, contact] : contacts_) {
      if (!contact.failure && !contact.left) beat(contact, kLeaving);
    }
  }
  stop();
}

void Keeper::stop() {
  stopping_ = true;
  if (thread_.joinable()) {
    [[maybe_unused]] const ssize_t written = write(wake_[1], "", 1);
    thread_.join();
  }
  for (int& fd : wake_) {
    if (fd >= 0) close(fd);
    fd = -1;
  }
}

void Keeper::forsake() {
  for (auto& [peer, contact] : contacts_) contact.link->forsake();
  for (const int fd : wake_) {
    if (fd >= 0) close(fd);
  }
}

}  // namespace argosy
