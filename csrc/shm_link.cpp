#include "shm_link.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "failure.h"
#include "frame.h"

namespace argosy {

ShmLink::ShmLink(int peer, int rank, Ring* out, Ring* in, std::size_t slots, std::size_t slot_bytes)
    : peer_(peer), rank_(rank), out_(out), in_(in), slots_(slots), slot_bytes_(slot_bytes) {
  const auto misaligned = [](const Ring* ring) { return reinterpret_cast<std::uintptr_t>(ring) % alignof(Ring) != 0; };
  if (out == nullptr || in == nullptr || misaligned(out) || misaligned(in)) {
    throw std::invalid_argument("a ring must begin at a multiple of 64 bytes");
  }
  if (slots == 0 || slot_bytes == 0 || slot_bytes % 64 != 0 || slot_bytes > Frame::kMaxPayload) {
    throw std::invalid_argument("a ring needs slots, of a multiple of 64 bytes up to " +
                                std::to_string(Frame::kMaxPayload) + ", not " + std::to_string(slots) + " of " +
                                std::to_string(slot_bytes));
  }
  written_ = out->written.load(std::memory_order_relaxed);
  taken_ = out->read.load(std::memory_order_acquire);
  read_ = there_ = in->read.load(std::memory_order_relaxed);
}

void ShmLink::refuse(const char* what) const {
  throw Failure(Failure::Kind::corrupt, peer_,
                "the ring shared with rank " + std::to_string(peer_) + " is corrupt: " + what);
}

Ring::Slot& ShmLink::slot(Ring& ring, std::uint64_t number) const {
  return *reinterpret_cast<Ring::Slot*>(ring.slots + number % slots_ * (sizeof(Frame) + slot_bytes_));
}

bool ShmLink::send(const Frame& frame, const std::byte* payload, std::uint64_t* sent) {
  if (written_ - taken_ >= slots_) {
    taken_ = out_->read.load(std::memory_order_acquire);
    if (written_ - taken_ > slots_) refuse("more is read than was written");
    if (written_ - taken_ == slots_) return false;
  }
  if (frame.length > slot_bytes_) {
    throw std::invalid_argument("a frame of " + std::to_string(frame.length) + " bytes does not fit into a slot of " +
                                std::to_string(slot_bytes_));
  }
  Frame sealed = frame;
  sealed.from = static_cast<std::uint32_t>(rank_);
  seal(sealed, 0);
  Ring::Slot& place = slot(*out_, written_);
  std::memcpy(&place.frame, &sealed, sizeof sealed);
  if (frame.length > 0) std::memcpy(place.payload, payload, frame.length);
  out_->written.store(++written_, std::memory_order_release);
  if (sent != nullptr) *sent += frame.length;
  return true;
}

bool ShmLink::receive(Sink& sink) {
  if (there_ == read_) {
    there_ = in_->written.load(std::memory_order_acquire);
    if (there_ == read_) return false;
    if (there_ - read_ > slots_) refuse("more is written than there is room for");
  }
  const Ring::Slot& place = slot(*in_, read_);
  Frame frame;  // copied before it is checked: the peer can still write there
  std::memcpy(&frame, &place.frame, sizeof frame);
  check_head(frame, peer_);
  if (frame.length > slot_bytes_) refuse("a frame is longer than its slot");
  if (frame.type == Frame::Type::abort) throw_abort(frame, place.payload);
  if (frame.type == Frame::Type::data) {
    const Sink::Place wanted = sink.offer(frame);
    if (!wanted.ready) return false;
    if (wanted.into != nullptr && frame.length > 0) std::memcpy(wanted.into, place.payload, frame.length);
    sink.arrived(frame, wanted.into != nullptr ? wanted.into : place.payload);
  }
  in_->read.store(++read_, std::memory_order_release);
  return true;
}

}  // namespace argosy
