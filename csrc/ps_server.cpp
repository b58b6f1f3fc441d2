#include "ps_server.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <stdexcept>

#include "ps_socket.h"
#include "signals.h"

namespace argosy {

PsServer::PsServer(std::uint32_t workers, std::uint32_t aggregate, bool reject_not_finite)
    : core_(workers, aggregate, reject_not_finite) {}

PsServer::~PsServer() { stop(); }

void PsServer::add_connection(int fd, std::uint32_t client, std::uint32_t lane) {
  if (client >= core_.steps.workers()) {
    throw std::invalid_argument("client " + std::to_string(client) + " is not one of the " +
                                std::to_string(core_.steps.workers()) + " workers");
  }
  if (lane > 1) throw std::invalid_argument("lane is " + std::to_string(lane) + ": it is 0 (pulls) or 1 (pushes)");
  const std::lock_guard lock(mutex_);
  if (stopped_) throw std::runtime_error("the server was stopped");
  prepare_ps_socket(fd, /*blocking=*/true);
  reap();
  const AllSignalsBlocked blocked;
  Connection& connection = connections_.emplace_back();
  connection.fd = fd;
  connection.client = client;
  connection.visit = core_.steps.joined(client);
  try {
    connection.thread = std::thread([this, &connection] { serve(connection); });
  } catch (...) {
    connections_.pop_back();
    throw;
  }
  const std::string name = "ps-" + std::to_string(client) + (lane == 0 ? "-pull" : "-push");
  pthread_setname_np(connection.thread.native_handle(), name.c_str());
}

void PsServer::serve(Connection& connection) {
  try {
    PsSession(core_, connection.fd, connection.client).run();
  } catch (const std::exception&) {  // no memory even for an answer: only this connection ends
  }
  core_.steps.ended(connection.client, connection.visit);
  const std::lock_guard lock(mutex_);
  // A worker that lost one of its connections is lost: its others end too, and tell it so.
  for (Connection& other : connections_) {
    if (other.client == connection.client && other.visit == connection.visit && !other.ended) {
      shutdown(other.fd, SHUT_RDWR);
    }
  }
  close(connection.fd);
  connection.ended = true;
}

void PsServer::reap() {
  std::erase_if(connections_, [](Connection& connection) {
    if (!connection.ended) return false;
    connection.thread.join();
    return true;
  });
}

void PsServer::stop() {
  const std::lock_guard one_at_a_time(stopping_);
  core_.steps.stop();
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    for (Connection& connection : connections_) {
      if (!connection.ended) shutdown(connection.fd, SHUT_RDWR);
    }
  }
  // No thread adds or removes any more; they need the lock to end.
  for (Connection& connection : connections_) {
    if (connection.thread.joinable()) connection.thread.join();
  }
}

std::size_t PsServer::connections() const {
  const std::lock_guard lock(mutex_);
  std::size_t count = 0;
  for (const Connection& connection : connections_) count += !connection.ended;
  return count;
}

}  // namespace argosy
