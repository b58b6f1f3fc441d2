#include "heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

namespace argosy {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMaxBytes = std::size_t{64} << 30;  // so that hundreds of heaps fit into an address space

std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

std::size_t physical_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE));
}

}  // namespace

Mapping::Mapping(int fd, std::size_t bytes) : bytes_(bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (memory == MAP_FAILED) fail("mapping shared memory (is there a limit on virtual memory, `ulimit -v`?)");
  base_ = static_cast<std::byte*>(memory);
  madvise(memory, bytes, MADV_DONTDUMP);  // a core file would hold every peer's heap
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

Heap::Heap(std::size_t reserved_bytes) : fd_(memfd_create("argosy", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  if (fd_ < 0) fail("memfd_create for shared memory");
  try {
    const std::size_t bytes = pages(reserved_bytes) + std::min(pages(physical_bytes()), kMaxBytes);
    if (fchmod(fd_, 0600) != 0) fail("fchmod of shared memory");
    if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) fail("sizing shared memory");
    // A peer that maps it relies on its size: nobody may cut it.
    if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("sealing shared memory");
    if (getrandom(nonce_.data(), nonce_.size(), 0) != static_cast<ssize_t>(nonce_.size())) fail("getrandom");
    map_ = Mapping(fd_, bytes);
  } catch (...) {
    close(fd_);
    throw;
  }
  std::memcpy(map_.base(), nonce_.data(), nonce_.size());
  used_[0] = pages(reserved_bytes);
}

Heap::~Heap() { close(fd_); }

std::byte* Heap::allocate(std::size_t bytes) {
  const std::size_t wanted = std::max(pages(bytes), kPage);
  const std::lock_guard lock(mutex_);
  std::size_t begin = 0;
  for (const auto& [offset, length] : used_) {
    if (offset - begin >= wanted) break;
    begin = offset + length;
  }
  if (wanted > map_.bytes() - begin) throw std::bad_alloc();
  used_[begin] = wanted;
  return map_.base() + begin;
}

void Heap::release(std::byte* memory) {
  if (getpid() != owner_) return;  // a forked child drops its copies of tensors; the memory is its parent's
  const std::lock_guard lock(mutex_);
  const auto offset = static_cast<std::size_t>(memory - map_.base());
  const auto found = used_.find(offset);
  if (offset == 0 || found == used_.end()) throw std::invalid_argument("this memory was not allocated here");
  if (detached_) {
    madvise(memory, found->second, MADV_DONTNEED);
  } else {
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(found->second));
  }
  used_.erase(found);
}

void Heap::detach() {
  const std::lock_guard lock(mutex_);
  if (detached_.exchange(true)) return;
  for (const auto& [offset, bytes] : used_) {
    if (offset == 0) continue;  // the board: peers are to read it
    std::byte* const place = map_.base() + offset;
    void* const own = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED) continue;
    std::memcpy(own, place, bytes);
    if (mremap(own, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) == MAP_FAILED) munmap(own, bytes);
  }
}

Mapping map_peer(pid_t pid, int fd, std::size_t bytes, const Nonce& nonce) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  struct stat status{};
  // Asked before it is opened: to open some other kind of file may wait, or do something.
  if (stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  if (status.st_size != static_cast<off_t>(bytes) || bytes < nonce.size()) return {};
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) return {};
  Mapping mapping;
  try {
    constexpr int kSealed = F_SEAL_SHRINK;
    if ((fcntl(opened, F_GET_SEALS) & kSealed) == kSealed) mapping = Mapping(opened, bytes);
  } catch (const std::system_error&) {
    close(opened);
    throw;
  }
  close(opened);
  if (mapping.base() == nullptr || std::memcmp(mapping.base(), nonce.data(), nonce.size()) != 0) return {};
  return mapping;
}

}  // namespace argosy
