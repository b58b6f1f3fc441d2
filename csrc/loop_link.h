// A rank's link to itself: a frame in hand. Some schedules, such as all-to-all, have a rank keep a part of its data.
#pragma once

#include <cstring>

#include "link.h"

namespace argosy {

class LoopLink final : public Link {
 public:
  bool send(const Frame& frame, const std::byte* payload, std::uint64_t* sent) override {
    if (full_) return false;
    frame_ = frame, payload_ = payload, sent_ = sent, full_ = true;
    return true;
  }
  bool flush() override { return false; }
  bool receive(Sink& sink) override {
    if (!full_) return false;
    const Sink::Place place = sink.offer(frame_);
    if (!place.ready) return false;
    if (place.into != nullptr) std::memmove(place.into, payload_, frame_.length);
    sink.arrived(frame_, place.into != nullptr ? place.into : payload_);
    *sent_ += frame_.length;
    full_ = false;
    return true;
  }
  void shut() override {}
  void forsake() override {}
  void adopt() override { full_ = false; }
  std::size_t lanes() const override { return 1; }
  std::size_t room() const override { return Frame::kMaxPayload; }
  bool wakes() const override { return true; }  // by what its rank does, which is not asleep then
  std::size_t descriptors(pollfd*, std::size_t) const override { return 0; }

 private:
  bool full_ = false;
  Frame frame_;
  const std::byte* payload_ = nullptr;
  std::uint64_t* sent_ = nullptr;
};

}  // namespace argosy
