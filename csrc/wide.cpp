#include "wide.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "engine.h"
#include "reduce.h"

namespace argosy {
namespace {

constexpr std::size_t kZeros = 16 << 10;

// Divides by the number of ranks: an average with zeros for the other ranks' values, so the kernels' own rounding
// holds.
void divide(const Operation& what, std::byte* data, std::size_t count, int ranks) {
  static const std::array<std::byte, kZeros> zeros{};
  const ReduceKernel average = find_reduce_kernel(Op::avg, what.dtype);
  const std::size_t element = element_bytes(what.dtype);
  std::vector<const std::byte*> sources(ranks, zeros.data());
  for (std::size_t done = 0; done < count; done += kZeros / element) {
    sources[0] = data + done * element;
    average(data + done * element, sources.data(), sources.size(), std::min(kZeros / element, count - done));
  }
}

// A sum of 16-bit floats may overflow where their average does not: there each rank divides first.
bool divides_first(const Operation& what) { return what.op == Op::avg && what.dtype == DType::f16; }
bool divides_last(const Operation& what) { return what.op == Op::avg && what.dtype != DType::f16; }

// Memory that is not filled first.
std::unique_ptr<std::byte[]> scratch(std::size_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

}  // namespace

struct Wide::Context {
  const Request& request;
  const Operation& what;
  const Notice& notice;
  std::size_t element, count;
  ReduceKernel kernel;
  Local& local;
  Watch& watch;
};

std::vector<Step> Wide::steps(const Plan& plan, std::byte* data, std::size_t count, std::size_t element) const {
  const Parts slots{count, plan.slots};
  std::vector<Step> steps;
  steps.reserve(plan.parts.size());
  for (const Plan::Part& part : plan.parts) {
    const std::size_t begin = slots.begin(part.begin), end = slots.begin(part.begin + part.width);
    steps.push_back({part.kind, part.peer, data + begin * element, (end - begin) * element});
  }
  return steps;
}

void Wide::go(const std::vector<Step>& steps, const Context& context, std::uint64_t earlier) {
  Program program;
  program.steps = steps;
  program.operation.sequence = context.notice.sequence - earlier;
  program.operation.operation = context.what.packed();
  program.operation.count = context.request.count;
  program.operation.from = static_cast<std::uint32_t>(rank_);
  program.kernel = context.kernel;
  program.element_bytes = context.element;
  program.chunk_bytes = 0;
  program.link = [this](int peer) -> Link& { return *links_.at(peer); };
  argosy::run(program, context.watch);
}

void Wide::run(const Request& request, const Notice& notice, Local& local, Watch& watch) {
  const Operation& what = request.operation;
  const bool planned = what.collective != Collective::gather && what.collective != Collective::scatter &&
                       what.collective != Collective::all_to_all;
  if (planned && !request.plan) throw std::logic_error("no plan for " + describe(what.packed(), request.count));
  const bool reduces = what.collective == Collective::all_reduce || what.collective == Collective::reduce ||
                       what.collective == Collective::reduce_scatter || what.collective == Collective::barrier;
  const Op op = what.op == Op::avg ? Op::sum : what.op;
  const Context context{request,       what,
                        notice,        element_bytes(what.dtype),
                        request.count, reduces ? find_reduce_kernel(op, what.dtype) : nullptr,
                        local,         watch};
  switch (what.collective) {
    case Collective::all_reduce:
      return all_reduce(context);
    case Collective::reduce:
      return reduce(context);
    case Collective::reduce_scatter:
      return reduce_scatter(context);
    case Collective::all_gather:
      return all_gather(context);
    case Collective::broadcast:
      return go(steps(*request.plan, request.out, request.count, context.element), context);
    case Collective::gather:
      return gather(context);
    case Collective::scatter:
      return scatter(context);
    case Collective::all_to_all:
      return all_to_all(context);
    case Collective::barrier: {
      std::byte token[16] = {};
      return go(steps(*request.plan, token, 1, context.element), context);
    }
    case Collective::message:
      break;
  }
  throw std::logic_error("messages do not go by a plan");
}

void Wide::all_reduce(const Context& context) {
  if (divides_first(context.what)) divide(context.what, context.request.out, context.count, size_);
  const Plan& chosen = *context.request.plan;
  if (chosen.owners > 0) {
    hierarchical(context, chosen, context.request);
  } else {
    go(steps(chosen, context.request.out, context.count, context.element), context);
  }
  if (divides_last(context.what)) divide(context.what, context.request.out, context.count, size_);
}

void Wide::hierarchical(const Context& context, const Plan& chosen, const Request& request) {
  const Parts parts{context.count, chosen.owners};
  context.local.reduce_to_owners(context.notice, {context.kernel, context.element}, request.out, parts);
  go(steps(chosen, request.out, context.count, context.element), context);
  context.local.take_from_owners(context.notice, context.element, request.out, parts);
}

void Wide::reduce(const Context& context) {
  const Plan& chosen = *context.request.plan;
  std::byte* const data = context.request.out;
  const bool root = static_cast<int>(context.what.root) == rank_;
  const bool receives = std::any_of(chosen.parts.begin(), chosen.parts.end(),
                                    [](const Plan::Part& part) { return part.kind != Step::Kind::send; });
  const bool first = divides_first(context.what);
  if (root && first) divide(context.what, data, context.count, size_);
  if (root || (!receives && !first)) {
    go(steps(chosen, data, context.count, context.element), context);
  } else {
    const auto copy = scratch(context.count * context.element);
    std::memcpy(copy.get(), data, context.count * context.element);
    if (first) divide(context.what, copy.get(), context.count, size_);
    go(steps(chosen, copy.get(), context.count, context.element), context);
  }
  if (root && divides_last(context.what)) divide(context.what, data, context.count, size_);
}

void Wide::reduce_scatter(const Context& context) {
  const std::size_t bytes = context.count * context.element;
  const auto copy = scratch(bytes * size_);
  std::memcpy(copy.get(), context.request.in, bytes * size_);
  if (divides_first(context.what)) divide(context.what, copy.get(), context.count * size_, size_);
  go(steps(*context.request.plan, copy.get(), context.count * size_, context.element), context);
  std::memcpy(context.request.out, copy.get() + rank_ * bytes, bytes);
  if (divides_last(context.what)) divide(context.what, context.request.out, context.count, size_);
}

void Wide::all_gather(const Context& context) {
  const std::size_t bytes = context.count * context.element;
  std::memcpy(context.request.out + rank_ * bytes, context.request.in, bytes);
  go(steps(*context.request.plan, context.request.out, context.count * size_, context.element), context);
}

void Wide::gather(const Context& context) {
  const std::size_t bytes = context.count * context.element;
  const int root = static_cast<int>(context.what.root);
  if (rank_ != root) return go({{Step::Kind::send, root, const_cast<std::byte*>(context.request.in), bytes}}, context);
  std::memcpy(context.request.out + root * bytes, context.request.in, bytes);
  std::vector<Step> steps;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != root) steps.push_back({Step::Kind::copy, peer, context.request.out + peer * bytes, bytes});
  }
  go(steps, context);
}

void Wide::scatter(const Context& context) {
  const std::size_t bytes = context.count * context.element;
  const int root = static_cast<int>(context.what.root);
  if (rank_ != root) return go({{Step::Kind::copy, root, context.request.out, bytes}}, context);
  auto* const in = const_cast<std::byte*>(context.request.in);
  std::memcpy(context.request.out, in + root * bytes, bytes);
  std::vector<Step> steps;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != root) steps.push_back({Step::Kind::send, peer, in + peer * bytes, bytes});
  }
  go(steps, context);
}

// Sizes are the callers' own: all ranks hear first what the others will send, in the number before the operation's.
void Wide::compare_splits(const Context& context) {
  std::vector<std::uint64_t> sent(context.request.in_bytes.begin(), context.request.in_bytes.end()), told(size_);
  told[rank_] = sent[rank_];
  std::vector<Step> steps;
  for (int ahead = 1; ahead < size_; ++ahead) {
    const int target = (rank_ + ahead) % size_, source = (rank_ + size_ - ahead) % size_;
    steps.push_back({Step::Kind::send, target, reinterpret_cast<std::byte*>(&sent[target]), sizeof sent[target]});
    steps.push_back({Step::Kind::copy, source, reinterpret_cast<std::byte*>(&told[source]), sizeof told[source]});
  }
  go(steps, context, 1);
  for (int peer = 0; peer < size_; ++peer) {
    if (told[peer] != context.request.out_bytes[peer]) {
      throw splits_differ(rank_, peer, told[peer], context.request.out_bytes[peer]);
    }
  }
}

// In round k every rank sends to the one k places further on, as pairwise exchange does, with sizes of their own.
void Wide::all_to_all(const Context& context) {
  const Request& request = context.request;
  std::vector<std::byte*> from(size_), to(size_);
  auto* in = const_cast<std::byte*>(request.in);
  std::byte* out = request.out;
  for (int peer = 0; peer < size_; ++peer) {
    from[peer] = in, to[peer] = out;
    in += request.in_bytes[peer], out += request.out_bytes[peer];
  }
  compare_splits(context);
  std::memcpy(to[rank_], from[rank_], request.in_bytes[rank_]);
  std::vector<Step> steps;
  for (int ahead = 1; ahead < size_; ++ahead) {
    const int target = (rank_ + ahead) % size_, source = (rank_ + size_ - ahead) % size_;
    steps.push_back({Step::Kind::send, target, from[target], request.in_bytes[target]});
    steps.push_back({Step::Kind::copy, source, to[source], request.out_bytes[source]});
  }
  go(steps, context);
}

}  // namespace argosy
