#include "local.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace argosy {
namespace {

// Up to this size, of all ranks together, every rank reduces everything itself: one meeting instead of three.
constexpr std::size_t kSmallBytes = 16 << 10;
// What is reduced at a time before it is copied to the others, out of the nearest cache.
constexpr std::size_t kStripBytes = 8 << 10;
constexpr std::size_t kShortChunk = 128 << 10;

std::size_t at_least_one(std::size_t number) { return std::max<std::size_t>(number, 1); }

// Addresses of all members' data, without an allocation.
struct Sources {
  const std::byte* address[Local::kMaxMembers];
};

}  // namespace

// How a tensor goes through the window: every member owns a part of it, and of all parts a chunk goes at a time. A slot
// holds the chunk of each part, one behind the other, and behind them a chunk of the result.
struct Local::Chunks {
  Chunks(const Crew& crew, std::size_t element_bytes, std::byte* tensor, std::size_t count)
      : parts{count, crew.size()},
        element(element_bytes),
        width(std::min(at_least_one(chunk_bytes(crew) / crew.size() / element), parts.longest())),
        me(crew.me()),
        data(tensor) {}

  // Two chunks at least, unless they are short: while one is summed, the results of the other are read.
  std::size_t chunk_bytes(const Crew& crew) const {
    return std::clamp(parts.count * element / 2, kShortChunk, crew.chunk_bytes());
  }
  std::size_t input(std::size_t owner) const { return owner * width * element; }
  std::size_t result() const { return input(parts.parts); }
  std::size_t slot_bytes() const { return input(parts.parts + 1); }

  std::byte* part(std::size_t owner, std::size_t done) const { return data + (parts.begin(owner) + done) * element; }
  std::size_t bytes(std::size_t owner, std::size_t done) const {
    const std::size_t length = parts.length(owner);
    return done < length ? std::min(width, length - done) * element : 0;
  }
  void give(Giver& giver, std::byte* slot, std::size_t done) const {
    for (std::size_t owner = 0; owner < parts.parts; ++owner) {
      if (owner != me) giver.copy(slot + input(owner), part(owner, done), bytes(owner, done));
    }
  }

  Parts parts;
  std::size_t element, width, me;
  std::byte* data;
};

void Local::barrier(const Notice& notice) { crew_.meet(notice, watch_); }

void Local::all_reduce(Notice notice, Reduction reduction, std::byte* data, std::size_t count) {
  const std::size_t bytes = count * reduction.element_bytes;
  if (bytes * crew_.size() <= kSmallBytes) return reduce_small(notice, reduction, data, count);
  const Chunks chunks(crew_, reduction.element_bytes, data, count);
  // A tensor that is not in the heap will go through the window: its first chunk is shown at the first meeting already.
  std::byte* const slot = crew_.slot(chunks.slot_bytes());
  if (heap_.holds(data, bytes)) {
    notice.offset = static_cast<std::uint64_t>(data - heap_.base());
  } else {
    chunks.give(crew_.giver(), slot, 0);
  }
  crew_.meet(notice, watch_);
  find_tensors(bytes) ? reduce_in_place(reduction, count) : reduce_staged(reduction, chunks);
}

// Where a member's tensor is, after the first meeting of an operation. Null if it is not in its heap.
std::byte* Local::tensor(std::size_t member, std::size_t bytes) const {
  const std::uint64_t offset = crew_.notice(member).offset;
  if (offset == Notice::kElsewhere) return nullptr;
  if (offset > crew_.heap_bytes(member) || bytes > crew_.heap_bytes(member) - offset) {
    throw Failure(Failure::Kind::corrupt, crew_.rank(member),
                  "rank " + std::to_string(crew_.rank(member)) + " shows a tensor beyond its memory");
  }
  return crew_.base(member) + offset;
}

// The same for all members. False if a tensor of one of them is not in its heap.
bool Local::find_tensors(std::size_t bytes) {
  tensors_.resize(crew_.size());
  for (std::size_t member = 0; member < crew_.size(); ++member) {
    tensors_[member] = tensor(member, bytes);
    if (tensors_[member] == nullptr) {
      tensors_.clear();
      return false;
    }
  }
  return true;
}

void Local::reduce_small(const Notice& notice, Reduction reduction, std::byte* data, std::size_t count) {
  std::memcpy(crew_.slot(count * reduction.element_bytes), data, count * reduction.element_bytes);
  crew_.meet(notice, watch_);
  Sources sources;
  for (std::size_t member = 0; member < crew_.size(); ++member) sources.address[member] = crew_.shown(member);
  reduction.kernel(data, sources.address, crew_.size(), count);
}

void Local::reduce_in_place(Reduction reduction, std::size_t count) {
  // Slices end between cache lines, if the tensors begin at one: two ranks do not write the same line.
  const std::size_t line = 64 / reduction.element_bytes;
  const Parts parts{(count + line - 1) / line, crew_.size()};
  const std::size_t begin = parts.begin(crew_.me()) * line, end = parts.begin(crew_.me() + 1) * line;
  reduce_range(reduction, begin, std::min(end, count), tensors_[crew_.me()] + begin * reduction.element_bytes, true);
  crew_.meet(watch_);
}

// Reduces a range of all members' tensors to `out`, and writes the result back into all of them if told so.
void Local::reduce_range(Reduction reduction, std::size_t begin, std::size_t end, std::byte* out, bool write_back) {
  const std::size_t members = crew_.size(), me = crew_.me(), element = reduction.element_bytes;
  Sources sources;
  while (begin < end) {
    const std::size_t width = std::min(end - begin, kStripBytes / element), at = begin * element;
    for (std::size_t member = 0; member < members; ++member) sources.address[member] = tensors_[member] + at;
    reduction.kernel(out, sources.address, members, width);
    for (std::size_t member = 0; write_back && member < members; ++member) {
      if (member != me) std::memcpy(tensors_[member] + at, out, width * element);
    }
    begin += width;
    out += width * element;
  }
}

void Local::reduce_to_owners(Notice notice, Reduction reduction, std::byte* data, Parts parts) {
  const std::size_t me = crew_.me(), element = reduction.element_bytes;
  if (heap_.holds(data, parts.count * element)) notice.offset = static_cast<std::uint64_t>(data - heap_.base());
  crew_.meet(notice, watch_);
  const bool owner = me < parts.parts;
  if (find_tensors(parts.count * element)) {
    if (owner) {
      reduce_range(reduction, parts.begin(me), parts.begin(me + 1), tensors_[me] + parts.begin(me) * element, false);
    }
    return;
  }
  reduce_parts(notice, reduction, data, parts, owner ? data + parts.begin(me) * element : nullptr);
}

void Local::take_from_owners(const Notice& notice, std::size_t element, std::byte* data, Parts parts) {
  const std::size_t me = crew_.me();
  const bool owner = me < parts.parts;
  const std::size_t at = owner ? parts.begin(me) * element : 0;
  if (tensors_.empty()) return gather_parts(notice, element, owner ? data + at : nullptr, parts, data);
  for (std::size_t member = 0; owner && member < crew_.size(); ++member) {
    if (member != me) std::memcpy(tensors_[member] + at, data + at, parts.length(me) * element);
  }
  crew_.meet(watch_);
}

// Each meeting shows the inputs of one chunk and the results of the chunk before.
void Local::reduce_staged(Reduction reduction, const Chunks& chunks) {
  const std::size_t members = crew_.size(), me = crew_.me(), element = reduction.element_bytes;
  const std::size_t whole = chunks.parts.count * element;
  const auto take = [&](std::size_t done) {
    for (std::size_t ahead = 1; ahead < members; ++ahead) {
      const std::size_t owner = (me + ahead) % members;
      std::memcpy(chunks.part(owner, done), crew_.shown(owner) + chunks.result(), chunks.bytes(owner, done));
    }
  };
  Sources sources;
  for (std::size_t done = 0; done < chunks.parts.longest(); done += chunks.width) {
    if (done > 0) crew_.meet(watch_);
    for (std::size_t member = 0; member < members; ++member) {
      // Whose tensor is in the heap has not copied the first chunk: it can be read where it is.
      const std::byte* const open = done == 0 ? tensor(member, whole) : nullptr;
      sources.address[member] = member == me      ? chunks.part(me, done)
                                : open != nullptr ? open + (chunks.part(me, done) - chunks.data)
                                                  : crew_.shown(member) + chunks.input(me);
    }
    if (done > 0) take(done - chunks.width);
    std::byte* const next = crew_.slot(chunks.slot_bytes());
    const std::size_t mine = chunks.bytes(me, done);
    for (std::size_t at = 0; at < mine; at += kStripBytes) {
      const std::size_t strip = std::min(kStripBytes, mine - at);
      reduction.kernel(chunks.part(me, done) + at, sources.address, members, strip / element);
      crew_.giver().copy(next + chunks.result() + at, chunks.part(me, done) + at, strip);
      for (std::size_t member = 0; member < members; ++member) sources.address[member] += strip;
    }
    if (done + chunks.width < chunks.parts.longest()) chunks.give(crew_.giver(), next, done + chunks.width);
  }
  crew_.meet(watch_);
  take((chunks.parts.longest() - 1) / chunks.width * chunks.width);
}

void Local::reduce_parts(Notice notice, Reduction reduction, const std::byte* in, Parts parts, std::byte* out) {
  const std::size_t members = crew_.size(), me = crew_.me(), element = reduction.element_bytes;
  const std::size_t whole = parts.count * element;
  const bool owner = me < parts.parts;
  // What others read in place must not change meanwhile: a result may only stand where this member alone reads.
  const bool apart =
      !owner || out + parts.length(me) * element <= in || out >= in + whole || out == in + parts.begin(me) * element;
  if (apart && heap_.holds(in, whole)) notice.offset = static_cast<std::uint64_t>(in - heap_.base());
  const std::size_t most = at_least_one(crew_.chunk_bytes() / parts.parts / element), longest = parts.longest();
  const std::size_t width = at_least_one(std::min(most, longest)), stride = width * element;
  Sources sources;
  for (std::size_t done = 0; done == 0 || done < longest; done += width) {
    std::byte* const slot = crew_.slot(parts.parts * stride);
    for (std::size_t owner = 0; owner < parts.parts; ++owner) {
      const std::size_t length = parts.length(owner);
      if (owner == me || done >= length) continue;
      crew_.giver().copy(slot + owner * stride, in + (parts.begin(owner) + done) * element,
                         std::min(width, length - done) * element);
    }
    done == 0 ? crew_.meet(notice, watch_) : crew_.meet(watch_);
    if (done == 0 && find_tensors(whole)) {
      if (owner) reduce_range(reduction, parts.begin(me), parts.begin(me + 1), out, false);
      return crew_.meet(watch_);  // nobody reads any more
    }
    if (!owner || done >= parts.length(me)) continue;
    for (std::size_t member = 0; member < members; ++member) {
      sources.address[member] =
          member == me ? in + (parts.begin(me) + done) * element : crew_.shown(member) + me * stride;
    }
    reduction.kernel(out + done * element, sources.address, members, std::min(width, parts.length(me) - done));
  }
}

void Local::gather_parts(const Notice& notice, std::size_t element, const std::byte* mine, Parts parts,
                         std::byte* out) {
  const std::size_t me = crew_.me(), members = crew_.size();
  const std::size_t width = at_least_one(crew_.chunk_bytes() / element), longest = parts.longest();
  for (std::size_t done = 0; done == 0 || done < longest; done += width) {
    const auto bytes = [&](std::size_t owner) {
      const std::size_t length = parts.length(owner);
      return done < length ? std::min(width, length - done) * element : 0;
    };
    const auto place = [&](std::size_t owner) { return out + (parts.begin(owner) + done) * element; };
    std::byte* const slot = crew_.slot(std::min(width, longest) * element);
    if (me < parts.parts && bytes(me) > 0) {
      const std::byte* const given = mine + done * element;
      crew_.giver().copy(slot, given, bytes(me));
      if (place(me) != given) std::memcpy(place(me), given, bytes(me));
    }
    done == 0 ? crew_.meet(notice, watch_) : crew_.meet(watch_);
    for (std::size_t ahead = 1; ahead < members; ++ahead) {
      const std::size_t owner = (me + ahead) % members;
      if (owner < parts.parts) std::memcpy(place(owner), crew_.shown(owner), bytes(owner));
    }
  }
}

void Local::reduce(const Notice& notice, Reduction reduction, std::byte* data, std::size_t count, std::size_t root) {
  const std::size_t members = crew_.size(), me = crew_.me(), element = reduction.element_bytes;
  const Parts parts{count, members};
  std::vector<std::byte> own(parts.length(me) * element);
  reduce_parts(notice, reduction, data, parts, own.data());
  const std::size_t width = at_least_one(crew_.chunk_bytes() / element);
  for (std::size_t done = 0; done < parts.longest(); done += width) {
    const auto bytes = [&](std::size_t owner) {
      const std::size_t length = parts.length(owner);
      return done < length ? std::min(width, length - done) * element : 0;
    };
    crew_.giver().copy(crew_.slot(std::min(width, parts.longest()) * element), own.data() + done * element, bytes(me));
    crew_.meet(watch_);
    if (me != root) continue;
    for (std::size_t owner = 0; owner < members; ++owner) {
      const std::byte* const given = owner == me ? own.data() + done * element : crew_.shown(owner);
      std::memcpy(data + (parts.begin(owner) + done) * element, given, bytes(owner));
    }
  }
}

void Local::broadcast(const Notice& notice, std::byte* data, std::size_t bytes, std::size_t root) {
  const std::size_t chunk = crew_.chunk_bytes();
  for (std::size_t done = 0; done == 0 || done < bytes; done += chunk) {
    const std::size_t width = std::min(chunk, bytes - done);
    std::byte* const slot = crew_.slot(width);
    if (crew_.me() == root) crew_.giver().copy(slot, data + done, width);
    done == 0 ? crew_.meet(notice, watch_) : crew_.meet(watch_);
    if (crew_.me() != root) std::memcpy(data + done, crew_.shown(root), width);
  }
}

void Local::gather(const Notice& notice, const std::byte* in, std::byte* out, std::size_t bytes, std::size_t root) {
  const std::size_t chunk = crew_.chunk_bytes();
  for (std::size_t done = 0; done == 0 || done < bytes; done += chunk) {
    const std::size_t width = std::min(chunk, bytes - done);
    std::byte* const slot = crew_.slot(width);
    if (crew_.me() != root) crew_.giver().copy(slot, in + done, width);
    done == 0 ? crew_.meet(notice, watch_) : crew_.meet(watch_);
    if (crew_.me() != root) continue;
    for (std::size_t member = 0; member < crew_.size(); ++member) {
      std::memcpy(out + member * bytes + done, member == root ? in + done : crew_.shown(member), width);
    }
  }
}

void Local::scatter(const Notice& notice, const std::byte* in, std::byte* out, std::size_t bytes, std::size_t root) {
  const std::size_t chunk = at_least_one(std::min(crew_.chunk_bytes() / crew_.size(), bytes));
  for (std::size_t done = 0; done == 0 || done < bytes; done += chunk) {
    const std::size_t width = std::min(chunk, bytes - done);
    std::byte* const slot = crew_.slot(crew_.size() * chunk);
    if (crew_.me() == root) {
      for (std::size_t member = 0; member < crew_.size(); ++member) {
        const std::byte* const given = in + member * bytes + done;
        if (member == root) {
          std::memcpy(out + done, given, width);
        } else {
          crew_.giver().copy(slot + member * chunk, given, width);
        }
      }
    }
    done == 0 ? crew_.meet(notice, watch_) : crew_.meet(watch_);
    if (crew_.me() != root) std::memcpy(out + done, crew_.shown(root) + crew_.me() * chunk, width);
  }
}

void Local::all_to_all(Notice notice, const std::byte* in, std::span<const std::size_t> in_bytes, std::byte* out,
                       std::span<const std::size_t> out_bytes) {
  const std::size_t members = crew_.size(), me = crew_.me();
  // Sizes first: they may differ for every pair, and how many chunks there are depends on the largest of all.
  std::memcpy(crew_.slot(in_bytes.size_bytes()), in_bytes.data(), in_bytes.size_bytes());
  crew_.meet(notice, watch_);
  std::size_t largest = 0;
  for (std::size_t member = 0; member < members; ++member) {
    const auto* const sizes = reinterpret_cast<const std::size_t*>(
        member == me ? reinterpret_cast<const std::byte*>(in_bytes.data()) : crew_.shown(member));
    for (std::size_t other = 0; other < members; ++other) largest = std::max(largest, sizes[other]);
    if (sizes[me] != out_bytes[member]) {
      throw splits_differ(crew_.rank(me), crew_.rank(member), sizes[me], out_bytes[member]);
    }
  }
  std::vector<const std::byte*> from(members);
  std::vector<std::byte*> to(members);
  for (std::size_t member = 0; member < members; ++member) {
    from[member] = in, to[member] = out;
    in += in_bytes[member], out += out_bytes[member];
  }
  const std::size_t chunk = at_least_one(std::min(crew_.chunk_bytes() / members, largest));
  for (std::size_t done = 0; done < largest; done += chunk) {
    const auto part = [&](std::size_t bytes) { return done < bytes ? std::min(chunk, bytes - done) : 0; };
    std::byte* const slot = crew_.slot(members * chunk);
    for (std::size_t member = 0; member < members; ++member) {
      const std::byte* const given = from[member] + done;
      if (member == me) {
        std::memcpy(to[me] + done, given, part(in_bytes[member]));
      } else {
        crew_.giver().copy(slot + member * chunk, given, part(in_bytes[member]));
      }
    }
    crew_.meet(watch_);
    for (std::size_t member = 0; member < members; ++member) {
      if (member != me) std::memcpy(to[member] + done, crew_.shown(member) + me * chunk, part(out_bytes[member]));
    }
  }
}

}  // namespace argosy
