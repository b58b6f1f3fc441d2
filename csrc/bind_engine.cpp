// The Python face of the engine.
#include "bind_engine.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <thread>

#include "engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace argosy {
namespace {

std::byte* address(std::uintptr_t number) { return reinterpret_cast<std::byte*>(number); }

constexpr const char* kKinds[] = {"lost", "timeout", "mismatch", "aborted", "corrupt"};

// Raised as EngineError(kind, peer, sequence, operation, text).
PyObject* engine_error = nullptr;

void raise_engine_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const OperationFailed& failed) {
    const nb::object value = nb::make_tuple(kKinds[static_cast<int>(failed.kind)], failed.peer, failed.sequence,
                                            failed.operation, failed.what());
    PyErr_SetObject(engine_error, value.ptr());
  }
}

Nonce nonce_of(const nb::bytes& bytes) {
  Nonce nonce;
  if (bytes.size() != nonce.size()) throw std::invalid_argument("a nonce has 16 bytes");
  std::memcpy(nonce.data(), bytes.data(), nonce.size());
  return nonce;
}

Request request_of(int collective, int dtype, int op, int algorithm, int root, std::uintptr_t in, std::uintptr_t out,
                   std::size_t count, double timeout_seconds) {
  Request request;
  request.operation = {static_cast<Collective>(collective), static_cast<DType>(dtype), static_cast<Op>(op),
                       static_cast<std::uint8_t>(algorithm), static_cast<std::uint32_t>(root)};
  request.in = address(in);
  request.out = address(out);
  request.count = count;
  request.timeout_seconds = timeout_seconds;
  return request;
}

// Signals arrive while the engine waits without the interpreter; their handlers run here, and may end the wait.
void run_signal_handlers() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace

void bind_engine(nb::module_& m) {
  engine_error = PyErr_NewException("argosy._native.EngineError", PyExc_RuntimeError, nullptr);
  m.attr("EngineError") = nb::handle(engine_error);
  nb::register_exception_translator(raise_engine_error);

  nb::class_<Ticket>(m, "Ticket").def_prop_ro("done", [](const Ticket& ticket) { return ticket.done.load(); });

  nb::class_<Delivery>(m, "Delivery").def_prop_ro("source", [](const Delivery& delivery) { return delivery.source; });

  nb::class_<Engine>(m, "Engine")
      .def(
          "__init__",
          [](Engine* self, int rank, int size) {
            new (self) Engine(rank, size);
            self->set_idle_hook(run_signal_handlers);
          },
          "rank"_a, "size"_a)
      .def("card",
           [](Engine& self) {
             const Nonce& nonce = self.heap().nonce();
             return nb::make_tuple(static_cast<int>(getpid()), self.heap().fd(), self.heap().bytes(),
                                   nb::bytes(reinterpret_cast<const char*>(nonce.data()), nonce.size()));
           })
      .def(
          "map_peer",
          [](Engine& self, int rank, int pid, int fd, std::size_t bytes, const nb::bytes& nonce) {
            return self.map_peer(rank, pid, fd, bytes, nonce_of(nonce));
          },
          "rank"_a, "pid"_a, "fd"_a, "bytes"_a, "nonce"_a)
      .def(
          "set_hosts",
          [](Engine& self, std::vector<int> host_numbers, const std::vector<std::string>&) {
            self.set_hosts(std::move(host_numbers));
          },
          "host_numbers"_a, "host_names"_a)
      .def("add_sockets", &Engine::add_sockets, "rank"_a, "fds"_a)
      .def("start", &Engine::start)
      .def(
          "allocate",
          [](Engine& self, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(self.heap().allocate(bytes)); },
          "bytes"_a)
      .def(
          "release", [](Engine& self, std::uintptr_t memory) { self.heap().release(address(memory)); }, "address"_a)
      .def("run",
           [](Engine& self, int collective, int dtype, int op, int algorithm, int root, std::uintptr_t in,
              std::uintptr_t out, std::size_t count, double timeout_seconds) {
             Request request = request_of(collective, dtype, op, algorithm, root, in, out, count, timeout_seconds);
             const nb::gil_scoped_release release;
             self.run(std::move(request));
           })
      .def("submit",
           [](Engine& self, int collective, int dtype, int op, int algorithm, int root, std::uintptr_t in,
              std::uintptr_t out, std::size_t count, double timeout_seconds, std::vector<std::size_t> in_bytes,
              std::vector<std::size_t> out_bytes) {
             Request request = request_of(collective, dtype, op, algorithm, root, in, out, count, timeout_seconds);
             request.in_bytes = std::move(in_bytes);
             request.out_bytes = std::move(out_bytes);
             return self.submit(std::move(request));
           })
      .def("wait", nb::overload_cast<const std::shared_ptr<Ticket>&, std::optional<double>>(&Engine::wait), "ticket"_a,
           "timeout_seconds"_a.none(), nb::call_guard<nb::gil_scoped_release>())
      .def("post",
           [](Engine& self, bool sending, int peer, std::uint64_t tag, int dtype, std::uintptr_t memory,
              std::size_t bytes, double timeout_seconds) {
             Delivery delivery{};
             delivery.sending = sending;
             delivery.peer = peer;
             delivery.tag = tag;
             delivery.dtype = static_cast<std::uint64_t>(dtype);
             delivery.address = address(memory);
             delivery.bytes = bytes;
             delivery.timeout_seconds = timeout_seconds;
             delivery.source = Delivery::kAnyone;
             const nb::gil_scoped_release release;
             return self.post(std::move(delivery));
           })
      .def("wait_message", nb::overload_cast<const std::shared_ptr<Delivery>&, std::optional<double>>(&Engine::wait),
           "delivery"_a, "timeout_seconds"_a.none(), nb::call_guard<nb::gil_scoped_release>())
      .def("message_done", [](Engine& self, const Delivery& delivery) { return self.done(delivery); })
      .def("set_plan",
           [](Engine& self, int collective, int algorithm, int root, std::size_t slots, std::size_t owners,
              const std::vector<std::tuple<int, int, std::size_t, std::size_t>>& steps) {
             Plan plan;
             plan.slots = slots;
             plan.owners = owners;
             for (const auto& [kind, peer, begin, width] : steps) {
               plan.parts.push_back({static_cast<Step::Kind>(kind), peer, begin, width});
             }
             self.set_plan({static_cast<Collective>(collective), DType{}, Op{}, static_cast<std::uint8_t>(algorithm),
                            static_cast<std::uint32_t>(root)},
                           std::move(plan));
           })
      .def("abort", &Engine::abort, "reason"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("broken", &Engine::broken);
}

}  // namespace argosy
