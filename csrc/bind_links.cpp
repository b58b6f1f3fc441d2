// The Python face of links and programs, for tests and measurements: the engine drives them from C++.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "crc32c.h"
#include "failure.h"
#include "frame.h"
#include "program.h"
#include "reduce.h"
#include "shm_link.h"
#include "tcp_link.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace argosy;

void raise_failure(const std::exception_ptr& pointer, void* type) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Failure& failure) {
    const nb::handle failure_type(static_cast<PyObject*>(type));
    // The reason may have come from a peer, so it need not be UTF-8.
    const nb::object text = nb::steal(PyUnicode_DecodeUTF8(failure.what(), std::strlen(failure.what()), "replace"));
    const nb::object error = failure_type(text);
    error.attr("kind") = Failure::name(failure.kind);
    error.attr("peer") = failure.peer;
    PyErr_SetObject(failure_type.ptr(), error.ptr());
  }
}

class Deadline final : public Watch {
 public:
  explicit Deadline(double seconds)
      : end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}
  void check(int peer) override {
    if (Clock::now() < end_) return;
    throw Failure(Failure::Kind::timeout, peer, "the deadline passed while waiting for rank " + std::to_string(peer));
  }

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end_;
};

// One rank's links to its peers.
class Links {
 public:
  Links(int rank, int size) : rank_(rank), size_(size) {
    if (rank < 0 || rank >= size) throw std::invalid_argument("rank " + std::to_string(rank) + " is not in the world");
  }

  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  void add_tcp(int peer, const std::vector<int>& fds) {
    checked(peer);
    links_[peer] = std::make_unique<TcpLink>(peer, rank_, fds);
  }

  void add_shm(int peer, std::uintptr_t out, std::uintptr_t in, std::size_t slots, std::size_t slot_bytes) {
    checked(peer);
    links_[peer] = std::make_unique<ShmLink>(peer, rank_, reinterpret_cast<Ring*>(out), reinterpret_cast<Ring*>(in),
                                             slots, slot_bytes);
  }

  void run_steps(const std::vector<std::tuple<int, int, std::uintptr_t, std::size_t>>& steps, std::uint64_t sequence,
                 std::uint64_t operation, std::uint64_t count, std::string_view dtype, std::string_view op,
                 double timeout_seconds, std::size_t chunk_bytes) {
    std::vector<Step> list;
    list.reserve(steps.size());
    for (const auto& [kind, peer, address, bytes] : steps) {
      if (kind < 0 || kind > 2) throw std::invalid_argument("a step's kind is 0, 1 or 2, not " + std::to_string(kind));
      if (peer != rank_ && !links_.contains(peer)) {
        throw std::invalid_argument("there is no link to rank " + std::to_string(peer));
      }
      list.push_back({static_cast<Step::Kind>(kind), peer, reinterpret_cast<std::byte*>(address), bytes});
    }
    const DType element = parse_dtype(dtype);
    Frame head;
    head.sequence = sequence, head.operation = operation, head.count = count;
    head.from = static_cast<std::uint32_t>(rank_);
    const Program program = {.steps = list,
                             .operation = head,
                             .kernel = find_reduce_kernel(parse_op(op), element),
                             .element_bytes = element_bytes(element),
                             .chunk_bytes = chunk_bytes,
                             .link = [this](int peer) -> Link& { return *links_.at(peer); }};
    const nb::gil_scoped_release release;
    Deadline watch(timeout_seconds);
    argosy::run(program, watch);
  }

  bool abort(int peer, int blamed, std::string_view text) {
    Link& link = *links_.at(checked(peer));
    const bool taken = link.send(make_abort(blamed, text), reinterpret_cast<const std::byte*>(text.data()), nullptr);
    link.adopt();
    return taken;
  }

  bool flush(int peer) { return links_.at(checked(peer))->flush(); }

  void close() { links_.clear(); }

 private:
  int checked(int peer) const {
    if (peer >= 0 && peer < size_ && peer != rank_) return peer;
    throw std::invalid_argument("rank " + std::to_string(rank_) + " has no link to rank " + std::to_string(peer));
  }

  const int rank_, size_;
  std::map<int, std::unique_ptr<Link>> links_;
};

nb::dict check_frame(nb::bytes data, int from) {
  if (data.size() != sizeof(Frame)) {
    throw std::invalid_argument("a head has 64 bytes, not " + std::to_string(data.size()));
  }
  Frame frame;
  std::memcpy(&frame, data.c_str(), sizeof frame);
  check_head(frame, from);
  nb::dict fields;
  fields["type"] = static_cast<std::uint32_t>(frame.type);
  fields["sequence"] = frame.sequence;
  fields["operation"] = frame.operation;
  fields["count"] = frame.count;
  fields["offset"] = frame.offset;
  fields["message"] = frame.message;
  fields["length"] = frame.length;
  fields["from"] = frame.from;
  fields["payload_crc"] = frame.payload_crc;
  return fields;
}

}  // namespace

void bind_links(nb::module_& m) {
  PyObject* const failure = PyErr_NewExceptionWithDoc(
      "argosy._native.Failure", "Why an operation did not end well: `kind`, and the rank to blame as `peer`, or -1.",
      PyExc_RuntimeError, nullptr);
  m.attr("Failure") = nb::steal(nb::handle(failure));
  nb::register_exception_translator(raise_failure, failure);

  m.def(
      "crc32c",
      [](nb::bytes data, std::uint32_t seed, std::optional<std::string_view> way) {
        return way ? crc32c_by(*way, seed, data.c_str(), data.size()) : crc32c(seed, data.c_str(), data.size());
      },
      "data"_a, "seed"_a = 0, "way"_a = nb::none(), "The CRC32C of `data`, going on from `seed`.");
  m.def(
      "crc32c_at",
      [](std::uintptr_t address, std::size_t bytes, std::uint32_t seed) {
        return crc32c(seed, reinterpret_cast<const void*>(address), bytes);
      },
      "address"_a, "bytes"_a, "seed"_a = 0, nb::call_guard<nb::gil_scoped_release>(),
      "The same of bytes in memory, without the GIL.");
  m.def("crc32c_ways", &crc32c_ways, "The ways in which this CPU can compute it, best first.");
  m.def("check_frame", &check_frame, "data"_a, "peer"_a, "The fields of a frame's head from rank `peer`, or Failure.");
  m.def("ring_bytes", &Ring::bytes, "slots"_a, "slot_bytes"_a, "The memory that a ring takes.");

  nb::class_<Links>(m, "Links", "One rank's links to its peers, for tests.")
      .def(nb::init<int, int>(), "rank"_a, "size"_a)
      .def("add_tcp", &Links::add_tcp, "peer"_a, "fds"_a, "Link by connected sockets, which are taken over.")
      .def("add_shm", &Links::add_shm, "peer"_a, "out_address"_a, "in_address"_a, "slots"_a, "slot_bytes"_a,
           "Link by two rings, zeroed at first.")
      .def("run", &Links::run_steps, "steps"_a, "sequence"_a, "operation"_a, "count"_a, "dtype"_a, "op"_a,
           "timeout_seconds"_a, "chunk_bytes"_a = 0, "Run (kind, peer, address, bytes) steps, without the GIL.")
      .def("abort", &Links::abort, "peer"_a, "blamed"_a, "text"_a, "Tell a peer why this rank gives up.")
      .def("flush", &Links::flush, "peer"_a, "Go on sending; whether anything moved.")
      .def("close", &Links::close, "Close all links.");
}
