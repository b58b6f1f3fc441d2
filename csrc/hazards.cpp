#include "hazards.h"

#include <algorithm>

namespace argosy {

// [Note: hazards]
// Steps run as soon as they can, and the result is that of running the list in order. So of two steps that touch the
// same bytes, at least one of them receiving into them, the later one waits for the earlier:
//
//  - a send waits for what was to be received there before: it passes that on;
//  - a receive waits for what was to be sent from there before, and for what was to be received there before, so that
//    reductions happen in the order of the list and every rank gets the same bits.
//
// It waits byte by byte, not for the whole: a chunk can go when the earlier step is past the chunk's end. This is what
// makes a pipeline of a chain of receives and sends, also where their ranges are not the same, as in halving.
//
// The boundaries of all ranges cut memory into segments. Going through the list, each segment remembers the last step
// that received into it, and those that sent it since. A receive waits for these senders alone if there are any: they
// waited for the step before them.
//
// Steps of one round (see schedule.py) never touch the same bytes, so waits go back to earlier rounds only. Hence no
// deadlock, even where a lane holds frames back and its sender has to wait: of the ranks that are least far, each has
// all that its steps wait for, and so do those that must take frames from it.
namespace {

constexpr std::uint32_t kNone = UINT32_MAX;

struct Sender {
  std::uint32_t step;
  std::uint32_t before;  // in `senders`, or kNone
};

struct Segment {
  std::uint32_t receiver = kNone;
  std::uint32_t senders = kNone;  // since then, the last one first
};

}  // namespace

Hazards::Hazards(std::span<const Step> steps) : first_(steps.size() + 1), dropped_(steps.size()) {
  std::vector<const std::byte*> bounds;
  bounds.reserve(2 * steps.size());
  for (const Step& step : steps) {
    if (step.bytes == 0) continue;
    bounds.push_back(step.address);
    bounds.push_back(step.address + step.bytes);
  }
  std::sort(bounds.begin(), bounds.end());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());

  std::vector<Segment> segments(bounds.size());
  std::vector<Sender> senders;
  std::vector<std::uint32_t> noted(steps.size(), kNone);  // for which step each was last put on the list
  for (std::uint32_t number = 0; number < steps.size(); ++number) {
    const Step& step = steps[number];
    const auto wait_for = [&](std::uint32_t earlier) {
      if (earlier == kNone || noted[earlier] == number) return;
      noted[earlier] = number;
      list_.push_back(earlier);
    };
    first_[number] = static_cast<std::uint32_t>(list_.size());
    if (step.bytes == 0) continue;
    auto at = static_cast<std::size_t>(std::lower_bound(bounds.begin(), bounds.end(), step.address) - bounds.begin());
    for (; bounds[at] != step.address + step.bytes; ++at) {
      Segment& segment = segments[at];
      if (step.kind == Step::Kind::send) {
        wait_for(segment.receiver);
        senders.push_back({number, segment.senders});
        segment.senders = static_cast<std::uint32_t>(senders.size() - 1);
        continue;
      }
      if (segment.senders == kNone) wait_for(segment.receiver);
      for (std::uint32_t i = segment.senders; i != kNone; i = senders[i].before) wait_for(senders[i].step);
      segment = {.receiver = number, .senders = kNone};
    }
  }
  first_[steps.size()] = static_cast<std::uint32_t>(list_.size());
}

}  // namespace argosy
