// Messages between two ranks, matched by their tags, over links of their own so that collectives do not hold them up.
//
// Sends to one peer go out one after the other. What arrives goes to the first receive posted for its sender and tag;
// if there is none yet, it is kept, up to a limit beyond which the sender has to wait. Nobody's thread is needed to
// make progress but that of whoever waits; for operations that nobody waits for yet the engine has a thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "link.h"
#include "watch.h"

namespace argosy {

// A send or a receive that was posted.
struct Delivery {
  static constexpr int kAnyone = -1;

  bool sending;
  int peer;  // or kAnyone, to receive from
  std::uint64_t tag;
  std::uint64_t dtype;
  std::byte* address;
  std::size_t bytes;
  double timeout_seconds;

  bool done = false;
  int source = kAnyone;                  // who sent it
  std::exception_ptr error;              // set with `done`
  std::uint64_t started = 0;             // bytes given to the link
  std::uint64_t handed = 0;              // bytes that the link has sent, or that have arrived
  std::shared_ptr<void> keep = nullptr;  // whatever must live until it is done
  bool announced = false;                // its first frame is on its way: an empty message has one too
};

class Post {
 public:
  explicit Post(int rank) : rank_(rank) {}

  void add(int peer, std::unique_ptr<Link> link);

  std::shared_ptr<Delivery> post(Delivery delivery);
  // Returns when it is done; throws what it failed with.
  void wait(const std::shared_ptr<Delivery>& delivery, Watch& watch);
  bool done(const Delivery& delivery);
  // Moves what can be moved until nothing is pending. Throws when the watch does, after failing all that is pending.
  void drain(Watch& watch);
  bool pending();
  void shut();
  void forsake();
  // Whether sends are under way.
  bool sending();
  // What was kept for deliveries that are done, to be dropped by the caller.
  std::vector<std::shared_ptr<void>> take_finished();
  void fail_all(const std::exception_ptr& error);

 private:
  struct Kept {  // a message that came before anybody asked for it
    std::uint64_t tag, dtype;
    std::vector<std::byte> bytes;
    std::uint64_t arrived = 0;
    bool whole = false;
    std::shared_ptr<Delivery> wanted_by;
  };
  struct Correspondent final : Sink {
    Correspondent(Post& post, int peer, std::unique_ptr<Link> link) : post(post), peer(peer), link(std::move(link)) {}
    Place offer(const Frame& frame) override;
    void arrived(const Frame& frame, const std::byte* payload) override;

    Post& post;
    int peer;
    std::unique_ptr<Link> link;
    std::deque<std::shared_ptr<Delivery>> outgoing;
    std::shared_ptr<Delivery> receiving;  // of the message that is arriving now,
    Kept* keeping = nullptr;              // or where it is kept
    std::list<Kept> kept;
    std::uint32_t sent_messages = 0;
  };

  bool progress();
  bool progress(Correspondent& with);
  bool send_some(Correspondent& with);
  bool concerns(const Correspondent& with) const;
  std::shared_ptr<Delivery> take_receive(int from, std::uint64_t tag);
  bool take_kept(const std::shared_ptr<Delivery>& receive);
  void finish(Delivery& delivery, int source);
  void collect(std::vector<pollfd>& into);

  const int rank_;
  std::mutex mutex_;
  std::map<int, std::unique_ptr<Correspondent>> peers_;
  std::list<std::shared_ptr<Delivery>> receives_;  // in the order in which they were posted
  std::uint64_t kept_bytes_ = 0;
  std::vector<std::shared_ptr<void>> finished_;
};

}  // namespace argosy
