// The Python face of the parameter server: servers that take connections over, and the client of a worker.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ps_client.h"
#include "ps_server.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace argosy;
using Address = std::uintptr_t;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void raise_ps_error(const std::exception_ptr& pointer, void* type) {
  try {
    std::rethrow_exception(pointer);
  } catch (const PsError& failure) {
    const nb::handle error_type(static_cast<PyObject*>(type));
    const nb::object text = nb::steal(PyUnicode_DecodeUTF8(failure.what(), std::strlen(failure.what()), "replace"));
    const nb::object error = error_type(text);
    error.attr("kind") = failure.kind;
    error.attr("server") = failure.server;
    PyErr_SetObject(error_type.ptr(), error.ptr());
  } catch (const PsRefusal& refusal) {  // found here, before it was sent
    const nb::handle error_type(static_cast<PyObject*>(type));
    const nb::object error = error_type(refusal.what());
    error.attr("kind") = name(refusal.wrong);
    error.attr("server") = -1;
    PyErr_SetObject(error_type.ptr(), error.ptr());
  }
}

// As in bind_engine.cpp: handlers of signals run on the main thread, and may end its wait.
void run_signal_handlers() {
  if (gettid() != getpid()) return;
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

nb::object parsed(const std::string& json) { return nb::module_::import_("json").attr("loads")(json); }

TableConfig config_of(const nb::bytes& bytes) {
  TableConfig config;
  if (bytes.size() != sizeof config) {
    throw std::invalid_argument("a table's configuration has " + std::to_string(sizeof config) + " bytes, not " +
                                std::to_string(bytes.size()) + ": make it with table_config()");
  }
  std::memcpy(&config, bytes.c_str(), sizeof config);
  return config;
}

std::unique_ptr<PsClient> make_client(std::uint32_t client, std::size_t servers, std::vector<int> pull_fds,
                                      std::vector<int> push_fds, std::string_view values, std::vector<bool> shared,
                                      std::vector<std::string> names, double timeout_seconds) {
  if (pull_fds.size() != servers) {
    throw std::invalid_argument("pull_fds has " + std::to_string(pull_fds.size()) +
                                " entries: it needs one for each of " + std::to_string(servers) + " servers");
  }
  PsClientConfig config;
  config.client = client;
  config.pull_fds = std::move(pull_fds);
  config.push_fds = std::move(push_fds);
  config.values = parse_values(values);
  config.shared = std::move(shared);
  config.names = std::move(names);
  config.timeout_seconds = timeout_seconds;
  const nb::gil_scoped_release release;
  return std::make_unique<PsClient>(std::move(config), run_signal_handlers);
}

// The client, until it is closed. A call that another thread is in then ends with an error, and lets the client go.
class Client {
 public:
  explicit Client(std::unique_ptr<PsClient> client) : client_(std::move(client)) {}
  ~Client() { close(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  std::shared_ptr<PsClient> get() const {
    const std::lock_guard lock(mutex_);
    if (client_ == nullptr) throw std::invalid_argument("the client is closed");
    return client_;
  }
  void close() {
    if (getpid() != owner_) {  // a forked child has no thread to end, and its parent's memory and connections to leave
      (void)new std::shared_ptr<PsClient>(std::move(client_));
      return;
    }
    const nb::gil_scoped_release release;
    std::shared_ptr<PsClient> client;
    {
      const std::lock_guard lock(mutex_);
      client.swap(client_);
    }
    if (client != nullptr) client->stop();
  }

 private:
  const pid_t owner_ = getpid();
  mutable std::mutex mutex_;
  std::shared_ptr<PsClient> client_;
};

nb::tuple scan(const Client& client, std::uint32_t table, std::uint32_t server, std::uint64_t cursor,
               std::size_t room) {
  PsClient::Scanned found;
  {
    const nb::gil_scoped_release release;
    found = client.get()->scan(table, server, cursor, room);
  }
  const TableConfig config = client.get()->config(table);
  const auto* place = reinterpret_cast<const char*>(found.rows.data());
  const char* const end = place + found.rows.size();
  const auto next = [&](std::size_t bytes) {
    if (bytes > static_cast<std::size_t>(end - place)) throw std::runtime_error("a scan's answer is too short");
    const nb::bytes part(place, bytes);
    place += bytes;
    return part;
  };
  const nb::bytes ids = next(found.count * sizeof(std::int64_t));
  const nb::bytes values = next(found.count * config.dim * sizeof(float));
  const nb::bytes state = next(found.count * state_floats(config.rule.kind, config.dim) * sizeof(float));
  const nb::bytes counters = next(found.count * 2 * sizeof(float));
  return nb::make_tuple(found.next, ids, values, state, counters);
}

void bind_server(nb::module_& m) {
  nb::class_<PsServer>(m, "PsServer", "A parameter server's tables, and a native thread for each connection.")
      .def(nb::init<std::uint32_t, std::uint32_t, bool>(), "workers"_a, "aggregate"_a = 0, "reject_not_finite"_a = true)
      .def("add_connection", &PsServer::add_connection, "fd"_a, "client"_a, "lane"_a, NoGil(),
           "Take over a connected socket whose other end has proved to be this client.")
      .def("stop", &PsServer::stop, NoGil(), "End all connections and their threads.")
      .def("stats", [](const PsServer& server) { return parsed(server.json()); })
      .def("lost", &PsServer::lost, "The clients whose connections ended before they left.")
      .def_prop_ro("connections", &PsServer::connections, "How many connections are served.");
}

void bind_pulls(nb::class_<Client>& type) {
  type.def(
          "pull",
          [](Client& c, std::uint32_t table, Address ids, std::size_t count, Address out, std::uint64_t own,
             std::uint64_t all, double timeout, bool distinct) {
            const auto ticket = c.get()->start_pull(table, at<std::int64_t>(ids), count, own, all, distinct);
            c.get()->finish_pull(ticket, at<float>(out), timeout);
          },
          "table"_a, "ids_at"_a, "count"_a, "out_at"_a, "own"_a = 0, "all"_a = 0, "timeout_seconds"_a = 60.0,
          "distinct"_a = false, NoGil())
      .def(
          "start_pull",
          [](Client& c, std::uint32_t table, Address ids, std::size_t count, std::uint64_t own, std::uint64_t all,
             bool distinct) { return c.get()->start_pull(table, at<std::int64_t>(ids), count, own, all, distinct); },
          "table"_a, "ids_at"_a, "count"_a, "own"_a = 0, "all"_a = 0, "distinct"_a = false, NoGil())
      .def(
          "finish_pull",
          [](Client& c, std::uint64_t ticket, Address out, double timeout) {
            c.get()->finish_pull(ticket, at<float>(out), timeout);
          },
          "ticket"_a, "out_at"_a, "timeout_seconds"_a = 60.0, NoGil())
      .def(
          "take_pull",
          [](Client& c, std::uint64_t ticket, double timeout) {
            return reinterpret_cast<Address>(c.get()->take_pull(ticket, timeout));
          },
          "ticket"_a, "timeout_seconds"_a = 60.0, NoGil())
      .def(
          "release_pull", [](Client& c, std::uint64_t ticket) { c.get()->release_pull(ticket); }, "ticket"_a, NoGil())
      .def(
          "start_pull_range",
          [](Client& c, std::uint32_t number, std::uint64_t own, std::uint64_t all) {
            return c.get()->start_pull_range(number, own, all);
          },
          "number"_a, "own"_a = 0, "all"_a = 0, NoGil())
      .def(
          "pull_range",
          [](Client& c, std::uint32_t number, Address out, std::uint64_t own, std::uint64_t all, double timeout) {
            c.get()->finish_pull(c.get()->start_pull_range(number, own, all), at<float>(out), timeout);
          },
          "number"_a, "out_at"_a, "own"_a = 0, "all"_a = 0, "timeout_seconds"_a = 60.0, NoGil());
}

void bind_pushes(nb::class_<Client>& type) {
  type.def(
          "push",
          [](Client& c, std::uint32_t table, Address ids, std::size_t count, Address gradients, Address shows,
             Address clicks, Address pulled, float compensation, float lr_factor, std::uint64_t sequence,
             Address places, std::size_t given) {
            PsPushRows push;
            push.table = table;
            push.ids = at<std::int64_t>(ids), push.count = count, push.gradients = at<float>(gradients);
            push.shows = at<std::uint32_t>(shows), push.clicks = at<float>(clicks), push.pulled = at<float>(pulled);
            push.compensation = compensation, push.lr_factor = lr_factor, push.sequence = sequence;
            push.places = at<std::uint32_t>(places), push.given = given;
            c.get()->push(push);
          },
          "table"_a, "ids_at"_a, "count"_a, "gradients_at"_a, "shows_at"_a = 0, "clicks_at"_a = 0, "pulled_at"_a = 0,
          "compensation"_a = 0.0f, "lr_factor"_a = 1.0f, "sequence"_a = 0, "places_at"_a = 0, "given"_a = 0, NoGil())
      .def(
          "push_range",
          [](Client& c, std::uint32_t number, Address gradients, Address pulled, float compensation, float lr_factor,
             std::uint64_t sequence) {
            c.get()->push_range(number, at<float>(gradients), at<float>(pulled), compensation, lr_factor, sequence);
          },
          "number"_a, "gradients_at"_a, "pulled_at"_a = 0, "compensation"_a = 0.0f, "lr_factor"_a = 1.0f,
          "sequence"_a = 0, NoGil())
      .def(
          "done",
          [](Client& c, std::uint64_t step, double weight, std::uint64_t batches, bool may_be_late) {
            c.get()->done(step, weight, batches, may_be_late);
          },
          "step"_a, "weight"_a = 1.0, "batches"_a = 1, "may_be_late"_a = false, NoGil())
      .def(
          "flush", [](Client& c, double timeout) { c.get()->flush(timeout); }, "timeout_seconds"_a = 60.0, NoGil())
      .def(
          "leave", [](Client& c, double timeout) { c.get()->leave(timeout); }, "timeout_seconds"_a = 60.0, NoGil())
      .def(
          "rest", [](Client& c, double timeout) { c.get()->rest(timeout); }, "timeout_seconds"_a = 60.0, NoGil())
      .def(
          "set_rows",
          [](Client& c, std::uint32_t table, Address ids, std::size_t count, Address values) {
            c.get()->set_rows(table, at<std::int64_t>(ids), count, at<float>(values));
          },
          "table"_a, "ids_at"_a, "count"_a, "values_at"_a, NoGil())
      .def(
          "set_range",
          [](Client& c, std::uint32_t number, Address values) { c.get()->set_range(number, at<float>(values)); },
          "number"_a, "values_at"_a, NoGil());
}

void bind_rest(nb::class_<Client>& type) {
  type.def(
          "create_table",
          [](Client& c, std::uint32_t number, const nb::bytes& config) {
            const TableConfig made = config_of(config);
            const nb::gil_scoped_release release;
            c.get()->create_table(number, made);
          },
          "number"_a, "config"_a)
      .def(
          "create_range",
          [](Client& c, std::uint32_t number, const nb::bytes& config, std::size_t count, std::uint32_t server) {
            const TableConfig made = config_of(config);
            const nb::gil_scoped_release release;
            c.get()->create_range(number, made, count, server);
          },
          "number"_a, "config"_a, "count"_a, "server"_a = 0)
      .def(
          "end_day", [](Client& c, std::uint32_t table, float decay) { c.get()->end_day(table, decay); }, "table"_a,
          "decay"_a, NoGil())
      .def(
          "shrink",
          [](Client& c, std::uint32_t table, float score_below, std::uint32_t unseen_days, float click_weight) {
            return c.get()->shrink(table, score_below, unseen_days, click_weight);
          },
          "table"_a, "score_below"_a = 0.0f, "unseen_days"_a = 0, "click_weight"_a = 0.0f, NoGil())
      .def("scan", &scan, "table"_a, "server"_a, "cursor"_a, "room"_a)
      .def(
          "stats",
          [](Client& c, std::uint32_t server) {
            std::string text;
            {
              const nb::gil_scoped_release release;
              text = c.get()->stats(server);
            }
            return parsed(text);
          },
          "server"_a = 0)
      .def("close", &Client::close)
      .def_prop_ro("global_step", [](const Client& c) { return c.get()->global_step(); })
      .def_prop_ro("is_pushing", [](const Client& c) { return c.get()->is_pushing(); })
      .def_prop_ro("steps_over", [](const Client& c) { return c.get()->steps_over(); })
      .def_prop_ro("bytes_sent", [](const Client& c) { return c.get()->bytes_sent(); })
      .def_prop_ro("bytes_received", [](const Client& c) { return c.get()->bytes_received(); })
      .def_prop_ro("shared", [](const Client& c) { return c.get()->shared(); });
}

}  // namespace

void bind_ps(nb::module_& m) {
  PyObject* const error = PyErr_NewExceptionWithDoc(
      "argosy._native.PsError", "A request to a parameter server failed: `kind` says how, `server` is its number.",
      PyExc_RuntimeError, nullptr);
  m.attr("PsError") = nb::steal(nb::handle(error));
  nb::register_exception_translator(raise_ps_error, error);

  bind_server(m);
  nb::class_<Client> type(m, "PsClient", "A worker's connections to all parameter servers. Addresses, and no GIL.");
  type.def(
      "__init__",
      [](Client* place, std::uint32_t client, std::size_t servers, std::vector<int> pull_fds, std::vector<int> push_fds,
         std::string_view values, std::vector<bool> shared, std::vector<std::string> names, double timeout_seconds) {
        new (place) Client(make_client(client, servers, std::move(pull_fds), std::move(push_fds), values,
                                       std::move(shared), std::move(names), timeout_seconds));
      },
      "client"_a, "servers"_a, "pull_fds"_a, "push_fds"_a, "values"_a, "shared"_a,
      "names"_a = std::vector<std::string>(), "timeout_seconds"_a = 60.0);
  bind_pulls(type);
  bind_pushes(type);
  bind_rest(type);
}
