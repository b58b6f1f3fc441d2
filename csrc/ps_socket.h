// The sockets between workers and servers: what both ends set on them, and whole reads and writes for the server.
#pragma once

#include <cstddef>

namespace argosy {

// Sets what a connection needs. Throws std::system_error, and then the caller still owns it.
void prepare_ps_socket(int fd, bool blocking);

// All of it, or false: the connection has ended. For blocking sockets.
bool receive_all(int fd, std::byte* into, std::size_t bytes);
bool send_all(int fd, const std::byte* head, std::size_t head_bytes, const std::byte* payload, std::size_t bytes);

// Whether the other end has closed the connection, or is gone.
bool has_hung_up(int fd);

}  // namespace argosy
