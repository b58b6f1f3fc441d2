// A parameter server: tables and ranges, and a thread for each connection of a worker.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ps_session.h"

namespace argosy {

class PsServer {
 public:
  // Pushes are applied at once, or if `aggregate` > 0 gathered until so many workers have done a step.
  PsServer(std::uint32_t workers, std::uint32_t aggregate, bool reject_not_finite);
  ~PsServer();
  PsServer(const PsServer&) = delete;
  PsServer& operator=(const PsServer&) = delete;

  // Takes over a connected stream socket whose other end has proved to be this client. Throws without taking it over.
  void add_connection(int fd, std::uint32_t client, std::uint32_t lane);
  // Ends all connections, and then their threads. Nothing may be added after that.
  void stop();

  std::string json() const { return core_.json(); }
  std::vector<std::uint32_t> lost() const { return core_.steps.lost(); }
  // For tests: how many threads still serve.
  std::size_t connections() const;

 private:
  struct Connection {
    int fd;
    std::uint32_t client;
    std::uint64_t visit;
    std::atomic<bool> ended = false;
    std::thread thread;
  };

  void serve(Connection& connection);
  void reap();

  PsCore core_;
  std::mutex stopping_;
  mutable std::mutex mutex_;
  bool stopped_ = false;
  std::list<Connection> connections_;
};

}  // namespace argosy
