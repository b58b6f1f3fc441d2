// The Python face of the engine.
#include "bind_engine.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>

#include "engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace argosy {
namespace {

std::byte* address(std::uintptr_t number) { return reinterpret_cast<std::byte*>(number); }

// Raised as EngineError(kind, peer, sequence, operation, text).
PyObject* engine_error = nullptr;

void raise_engine_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const OperationFailed& failed) {
    const nb::object value =
        nb::make_tuple(Failure::name(failed.kind), failed.peer, failed.sequence, failed.operation, failed.what());
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

// Signals arrive while the engine waits without the interpreter; their handlers run here, and may end the wait. Only on
// the main thread, as in Python; others must not ask for the interpreter, which may be about to end.
void run_signal_handlers() {
  if (gettid() != getpid()) return;
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// A Python object that native code holds. Let go of with the interpreter's lock held: see `Engine::take_finished`.
std::shared_ptr<void> kept_alive(nb::object object) { return std::make_shared<nb::object>(std::move(object)); }

// What Python holds. In a forked child the engine is not used, and never destroyed.
struct Handle {
  Handle(int rank, int size) : engine(std::make_unique<Engine>(rank, size)) {}
  ~Handle() {
    if (!engine->owned()) {
      (void)engine.release();
      return;
    }
    const nb::gil_scoped_release release;  // threads that end may need the interpreter, and other threads want it
    engine->drop();
  }
  Engine* operator->() const {
    if (!engine->owned()) {
      throw std::runtime_error(
          "this process is a fork of a member of the group, and no member itself; join a new group");
    }
    return engine.get();
  }

  // At the end of the interpreter: what waits in the engine fails, and comes back while there is still an interpreter
  // to come back to. A thread that came later would end the process.
  void drop() {
    if (!engine->owned()) return;
    const nb::gil_scoped_release release;
    engine->drop();
    for (int turn = 0; turn < 2000 && visitors > 0; ++turn) usleep(1000);
  }

  std::unique_ptr<Engine> engine;
  std::atomic<int> visitors = 0;
};

// A call that waits in the engine, without the interpreter's lock.
class Visit {
 public:
  explicit Visit(Handle& handle) : handle_(handle), engine_(handle.operator->()) {
    ++handle_.visitors;
    release_.emplace();
  }
  ~Visit() {
    release_.reset();
    --handle_.visitors;
  }
  Engine* operator->() const { return engine_; }

 private:
  Handle& handle_;
  Engine* engine_;
  std::optional<nb::gil_scoped_release> release_;
};

}  // namespace

void bind_engine(nb::module_& m) {
  engine_error = PyErr_NewException("argosy._native.EngineError", PyExc_RuntimeError, nullptr);
  m.attr("EngineError") = nb::handle(engine_error);
  nb::register_exception_translator(raise_engine_error);

  nb::class_<Ticket>(m, "Ticket").def_prop_ro("done", [](const Ticket& ticket) { return ticket.done.load(); });

  nb::class_<Delivery>(m, "Delivery").def_prop_ro("source", [](const Delivery& delivery) { return delivery.source; });

  nb::class_<Handle>(m, "Engine")
      .def(
          "__init__",
          [](Handle* self, int rank, int size) {
            new (self) Handle(rank, size);
            self->engine->set_idle_hook(run_signal_handlers);
          },
          "rank"_a, "size"_a)
      .def("drop", &Handle::drop)
      .def("forsake", [](Handle& self) { self.engine->forsake(); })
      .def("card",
           [](Handle& self) {
             const Nonce& nonce = self->heap().nonce();
             return nb::make_tuple(static_cast<int>(getpid()), self->heap().fd(), self->heap().bytes(),
                                   nb::bytes(reinterpret_cast<const char*>(nonce.data()), nonce.size()));
           })
      .def(
          "map_peer",
          [](Handle& self, int rank, int pid, int fd, std::size_t bytes, const nb::bytes& nonce) {
            return self->map_peer(rank, pid, fd, bytes, nonce_of(nonce));
          },
          "rank"_a, "pid"_a, "fd"_a, "bytes"_a, "nonce"_a)
      .def(
          "set_hosts",
          [](Handle& self, std::vector<int> host_numbers, const std::vector<std::string>&) {
            self->set_hosts(std::move(host_numbers));
          },
          "host_numbers"_a, "host_names"_a)
      .def(
          "add_sockets", [](Handle& self, int rank, std::vector<int> fds) { self->add_sockets(rank, std::move(fds)); },
          "rank"_a, "fds"_a)
      .def("start", [](Handle& self) { self->start(); })
      .def(
          "allocate",
          [](Handle& self, std::size_t bytes) {
            return reinterpret_cast<std::uintptr_t>(self->heap().allocate(bytes));
          },
          "bytes"_a)
      .def(
          "release",
          [](Handle& self, std::uintptr_t memory) {
            if (self.engine->owned()) self->heap().release(address(memory));
          },
          "address"_a)
      .def(
          "heap_of", [](Handle& self, int rank) { return reinterpret_cast<std::uintptr_t>(self->heap_of(rank)); },
          "rank"_a)
      .def("run",
           [](Handle& self, int collective, int dtype, int op, int algorithm, int root, std::uintptr_t in,
              std::uintptr_t out, std::size_t count, double timeout_seconds) {
             Request request = request_of(collective, dtype, op, algorithm, root, in, out, count, timeout_seconds);
             Visit(self)->run(std::move(request));
           })
      .def("submit",
           [](Handle& self, int collective, int dtype, int op, int algorithm, int root, std::uintptr_t in,
              std::uintptr_t out, std::size_t count, double timeout_seconds, std::vector<std::size_t> in_bytes,
              std::vector<std::size_t> out_bytes, nb::object keep) {
             Request request = request_of(collective, dtype, op, algorithm, root, in, out, count, timeout_seconds);
             self.engine->take_finished();
             request.keep = kept_alive(keep);
             request.in_bytes = std::move(in_bytes);
             request.out_bytes = std::move(out_bytes);
             return self->submit(std::move(request));
           })
      .def(
          "wait",
          [](Handle& self, const std::shared_ptr<Ticket>& ticket, std::optional<double> timeout_seconds) {
            Visit(self)->wait(ticket, timeout_seconds);
          },
          "ticket"_a, "timeout_seconds"_a.none())
      .def("post",
           [](Handle& self, bool sending, int peer, std::uint64_t tag, int dtype, std::uintptr_t memory,
              std::size_t bytes, double timeout_seconds, nb::object keep) {
             Delivery delivery{};
             delivery.sending = sending;
             delivery.peer = peer;
             delivery.tag = tag;
             delivery.dtype = static_cast<std::uint64_t>(dtype);
             delivery.address = address(memory);
             delivery.bytes = bytes;
             delivery.timeout_seconds = timeout_seconds;
             delivery.source = Delivery::kAnyone;
             self.engine->take_finished();
             delivery.keep = kept_alive(keep);
             const nb::gil_scoped_release release;
             return self->post(std::move(delivery));
           })
      .def(
          "wait_message",
          [](Handle& self, const std::shared_ptr<Delivery>& delivery, std::optional<double> timeout_seconds) {
            Visit(self)->wait(delivery, timeout_seconds);
          },
          "delivery"_a, "timeout_seconds"_a.none())
      .def("message_done", [](Handle& self, const Delivery& delivery) { return self->done(delivery); })
      .def("set_plan",
           [](Handle& self, int collective, int algorithm, int root, std::size_t slots, std::size_t owners,
              const std::vector<std::tuple<int, int, std::size_t, std::size_t>>& steps) {
             Plan plan;
             plan.slots = slots;
             plan.owners = owners;
             for (const auto& [kind, peer, begin, width] : steps) {
               plan.parts.push_back({static_cast<Step::Kind>(kind), peer, begin, width});
             }
             self->set_plan({static_cast<Collective>(collective), DType{}, Op{}, static_cast<std::uint8_t>(algorithm),
                             static_cast<std::uint32_t>(root)},
                            std::move(plan));
           })
      .def(
          "abort",
          [](Handle& self, const std::string& reason) {
            if (self.engine->owned()) self.engine->abort(reason);
          },
          "reason"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "close",
          [](Handle& self) {
            if (self.engine->owned()) self.engine->close();
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "write_around", [](Handle& self, bool around) { self->write_around(around); }, "around"_a)
      .def_prop_ro("broken", [](Handle& self) { return self.engine->broken(); });
}

}  // namespace argosy
