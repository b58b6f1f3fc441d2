// The requests of a connection that move rows and ranges.
#include <algorithm>
#include <cstring>

#include "ps_session.h"
#include "ps_socket.h"

namespace argosy {
namespace {

template <class T>
std::unique_ptr<T[]> copied(const T* from, std::size_t count) {
  auto to = std::make_unique_for_overwrite<T[]>(count);
  std::memcpy(to.get(), from, count * sizeof(T));
  return to;
}

template <class T>
const T* part(const std::byte* payload, std::uint64_t offset, bool there) {
  return there ? reinterpret_cast<const T*>(payload + offset) : nullptr;
}

}  // namespace

bool PsSession::wait_for(const PsHead& head) {
  return core_.steps.wait(client_, head.own, head.all, [this] { return has_hung_up(fd_); });
}

bool PsSession::was_pushed(const PsHead& head, bool range) {
  if (!core_.steps.repeated(client_, range, head.number, head.sequence)) return false;
  ++core_.repeated;
  return true;
}

// Numbers that were encoded, as floats; where they are floats already, in their place.
const float* PsSession::floats(PsValues values, const std::byte* encoded, std::size_t count, std::size_t width,
                               Room& room) {
  if (values == PsValues::fp32) return reinterpret_cast<const float*>(encoded);
  auto* const out = reinterpret_cast<float*>(room.take(count * sizeof(float)));
  decode(values, encoded, count, width, out);
  return out;
}

void PsSession::check_finite(const PsHead& head, const float* gradients, std::size_t count, std::size_t width,
                             const std::int64_t* ids) const {
  if (!core_.reject_not_finite) return;
  const std::size_t row = first_not_finite(gradients, count, width);
  if (row * width >= count) return;
  throw PsRefusal(PsWrong::not_finite,
                  describe(head) + ": the gradient of " +
                      (ids != nullptr ? "id " + std::to_string(ids[row])
                                      : "number " + std::to_string(row * width) + " or one of the next") +
                      " is not finite; nothing of this push was applied");
}

bool PsSession::pull_rows(const PsHead& head) {
  PsTable& to = table_of(head);
  const std::uint64_t bytes = answer_bytes(head);
  const bool is_shared = head.flags & PsHead::kShared;
  const std::byte* payload = receive_payload(head);
  // The table reads ids more than once, so they must not change in between.
  if (is_shared) {
    std::byte* const own = ids_.take(head.count * sizeof(std::int64_t));
    std::memcpy(own, payload, head.count * sizeof(std::int64_t));
    payload = own;
  }
  std::byte* const place = is_shared ? shared(head.answer_at, bytes, head) : encoded_.take(bytes);
  const bool direct = head.values == PsValues::fp32;
  float* const rows = reinterpret_cast<float*>(direct ? place : rows_.take(head.count * head.dim * sizeof(float)));
  if (!wait_for(head)) return false;
  to.table.pull(reinterpret_cast<const std::int64_t*>(payload), head.count, rows);
  to.pulled_rows += head.count;
  if (!direct) encode(head.values, rows, head.count * head.dim, head.dim, place);
  return answer(head, place, is_shared ? 0 : bytes, head.count);
}

bool PsSession::pull_range(const PsHead& head) {
  PsRange& from = range_of(head);
  const std::uint64_t bytes = answer_bytes(head);
  const bool is_shared = head.flags & PsHead::kShared;
  std::byte* const place = is_shared ? shared(head.answer_at, bytes, head) : encoded_.take(bytes);
  const bool direct = head.values == PsValues::fp32;
  float* const numbers = reinterpret_cast<float*>(direct ? place : rows_.take(head.count * sizeof(float)));
  if (!wait_for(head)) return false;
  from.range.pull(numbers);
  if (!direct) encode(head.values, numbers, head.count, kPsRangeWidth, place);
  return answer(head, place, is_shared ? 0 : bytes, head.count);
}

bool PsSession::push_rows(const PsHead& head) {
  PsTable& to = table_of(head);
  const PushLayout layout = layout_of(head);
  const std::byte* const payload = receive_payload(head);
  if (was_pushed(head, false)) return answer(head);
  const std::byte* ids = payload + layout.ids;
  if (head.flags & PsHead::kShared) {
    std::byte* const own = ids_.take(head.count * sizeof(std::int64_t));
    std::memcpy(own, ids, head.count * sizeof(std::int64_t));
    ids = own;
  }
  const std::size_t numbers = head.count * head.dim;
  Push push = {};
  push.scale = 1;
  push.ids = reinterpret_cast<const std::int64_t*>(ids);
  push.count = head.count;
  push.gradients = floats(head.values, payload + layout.gradients, numbers, head.dim, gradients_);
  push.shows = part<std::uint32_t>(payload, layout.shows, head.flags & PsHead::kShows);
  push.clicks = part<float>(payload, layout.clicks, head.flags & PsHead::kClicks);
  push.compensation = head.compensation;
  push.lr_factor = head.lr_factor;
  push.sequence = head.sequence;
  check_finite(head, push.gradients, numbers, head.dim, push.ids);
  push.finite = core_.reject_not_finite;  // a worker that changes its push meanwhile harms its own job
  if (core_.steps.gathers()) {
    if (head.flags & PsHead::kPulled) {
      throw PsRefusal(PsWrong::mismatch, describe(head) + ": delay compensation needs pushes that are applied at once");
    }
    PsGathered kept;
    kept.table = &to;
    kept.count = head.count;
    kept.ids = copied(push.ids, head.count);
    kept.gradients = copied(push.gradients, numbers);
    if (push.shows != nullptr) kept.shows = copied(push.shows, head.count);
    if (push.clicks != nullptr) kept.clicks = copied(push.clicks, head.count);
    kept.lr_factor = head.lr_factor, kept.sequence = head.sequence, kept.basis = head.basis;
    core_.steps.gather(client_, std::move(kept));
  } else {
    if (head.flags & PsHead::kPulled)
      push.pulled = floats(head.values, payload + layout.pulled, numbers, head.dim, pulled_);
    apply(to, push);
    core_.steps.count_staleness(client_, head.basis);
  }
  core_.steps.mark(client_, false, head.number, head.sequence);
  return answer(head);
}

bool PsSession::push_range(const PsHead& head) {
  PsRange& to = range_of(head);
  const PushLayout layout = layout_of(head);
  const std::byte* const payload = receive_payload(head);
  if (was_pushed(head, true)) return answer(head);
  const float* const gradients = floats(head.values, payload + layout.gradients, head.count, kPsRangeWidth, gradients_);
  check_finite(head, gradients, head.count, kPsRangeWidth, nullptr);
  if (core_.steps.gathers()) {
    if (head.flags & PsHead::kPulled) {
      throw PsRefusal(PsWrong::mismatch, describe(head) + ": delay compensation needs pushes that are applied at once");
    }
    PsGathered kept;
    kept.range = &to;
    kept.count = head.count;
    kept.gradients = copied(gradients, head.count);
    kept.lr_factor = head.lr_factor, kept.sequence = head.sequence, kept.basis = head.basis;
    core_.steps.gather(client_, std::move(kept));
  } else {
    const float* pulled = nullptr;
    if (head.flags & PsHead::kPulled) {
      pulled = floats(head.values, payload + layout.pulled, head.count, kPsRangeWidth, pulled_);
    }
    apply(to, gradients, pulled, head.compensation, 1, head.lr_factor);
    core_.steps.count_staleness(client_, head.basis);
  }
  core_.steps.mark(client_, true, head.number, head.sequence);
  return answer(head);
}

bool PsSession::set_rows(const PsHead& head) {
  PsTable& to = table_of(head);
  const std::byte* const payload = receive_payload(head);
  std::byte* const ids = ids_.take(head.count * sizeof(std::int64_t));
  std::memcpy(ids, payload, head.count * sizeof(std::int64_t));
  to.table.set(reinterpret_cast<const std::int64_t*>(ids), head.count,
               reinterpret_cast<const float*>(payload + head.count * sizeof(std::int64_t)));
  return answer(head);
}

bool PsSession::scan(const PsHead& head) {
  PsTable& from = table_of(head);
  const TableConfig& config = from.table.config();
  const std::size_t state = state_floats(config.rule.kind, config.dim);
  const std::size_t row_bytes = sizeof(std::int64_t) + (config.dim + state + 2) * sizeof(float);
  const std::size_t room = std::min<std::uint64_t>(head.count, std::max<std::size_t>(kPsMostScan / row_bytes, 1));
  const auto ids = std::make_unique_for_overwrite<std::int64_t[]>(room);
  const auto values = std::make_unique_for_overwrite<float[]>(room * config.dim);
  const auto states = std::make_unique_for_overwrite<float[]>(room * state);
  const auto counters = std::make_unique_for_overwrite<float[]>(room * 2);
  std::size_t found = 0;
  const std::uint64_t next =
      from.table.scan(head.cursor, room, ids.get(), values.get(), states.get(), counters.get(), &found);
  std::byte* const payload = encoded_.take(found * row_bytes);
  std::byte* to = payload;
  const auto append = [&to](const void* data, std::size_t bytes) {
    std::memcpy(to, data, bytes);
    to += bytes;
  };
  append(ids.get(), found * sizeof(std::int64_t));
  append(values.get(), found * config.dim * sizeof(float));
  append(states.get(), found * state * sizeof(float));
  append(counters.get(), found * 2 * sizeof(float));
  return answer(head, payload, found * row_bytes, found, next);
}

}  // namespace argosy
