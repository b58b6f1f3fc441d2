// A worker's side of the parameter server: rows and ranges of all servers, as if they were one.
//
// Ids are made distinct and divided among servers (mix(id) % servers), requests go to all at once, and what comes back
// is put in the caller's order. Every pull asks every server, also one that has none of its ids: all gates must be
// open. Not for several threads at once, but for what `finish_pull` waits for while another thread calls.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ids.h"
#include "ps_blocks.h"
#include "ps_post.h"
#include "table_types.h"

namespace argosy {

struct PsClientConfig {
  std::uint32_t client = 0;
  std::vector<int> pull_fds, push_fds;  // one of each for each server
  PsValues values = PsValues::fp32;     // how they travel by sockets; in shared memory they are fp32
  std::vector<bool> shared;             // whether a server is on this host
  std::vector<std::string> names;       // of servers, for errors
  double timeout_seconds = 60;          // of calls that name none
};

struct PsPushRows {
  std::uint32_t table = 0;
  const std::int64_t* ids = nullptr;  // distinct
  std::size_t count = 0;
  const float* gradients = nullptr;  // a row for each id; or, if `places` is given, for each place, to be added up
  const std::uint32_t* shows = nullptr;
  const float* clicks = nullptr;
  const float* pulled = nullptr;
  float compensation = 0, lr_factor = 1;
  std::uint64_t sequence = 0;
  const std::uint32_t* places = nullptr;
  std::size_t given = 0;
};

class PsClient {
 public:
  struct Scanned {
    std::uint64_t next = 0, count = 0;
    std::vector<std::byte> rows;  // ids, values, state, counters
  };

  PsClient(PsClientConfig config, std::function<void()> interrupted);
  ~PsClient();
  PsClient(const PsClient&) = delete;
  PsClient& operator=(const PsClient&) = delete;

  // Ends all calls with an error, those of other threads too, and those that are yet to come.
  void stop() { post_->stop(); }

  void create_table(std::uint32_t number, const TableConfig& config);
  void create_range(std::uint32_t number, const TableConfig& config, std::size_t count, std::uint32_t server);

  // With `distinct` the ids are known to be; rows then come in their order, not expanded.
  std::uint64_t start_pull(std::uint32_t table, const std::int64_t* ids, std::size_t count, std::uint64_t own,
                           std::uint64_t all, bool distinct);
  std::uint64_t start_pull_range(std::uint32_t number, std::uint64_t own, std::uint64_t all);
  // Waits, and writes the rows (or the range) to `out`. However it ends, the ticket is used up.
  void finish_pull(std::uint64_t ticket, float* out, double timeout_seconds);
  // Waits, and returns where the rows of a pull of distinct ids lie until `release_pull`.
  const float* take_pull(std::uint64_t ticket, double timeout_seconds);
  void release_pull(std::uint64_t ticket);

  // Return when the push is handed over. What becomes of it is told by a later call, if it is an error.
  void push(const PsPushRows& push);
  void push_range(std::uint32_t number, const float* gradients, const float* pulled, float compensation,
                  float lr_factor, std::uint64_t sequence);
  // `may_be_late`: not all workers are waited for, and servers must agree on who was in time.
  void done(std::uint64_t step, double weight, std::uint64_t batches = 1, bool may_be_late = false);
  void flush(double timeout_seconds);  // until all is acknowledged
  void leave(double timeout_seconds);
  void rest(double timeout_seconds);

  void set_rows(std::uint32_t table, const std::int64_t* ids, std::size_t count, const float* values);
  void set_range(std::uint32_t number, const float* values);
  void end_day(std::uint32_t table, float decay);
  std::uint64_t shrink(std::uint32_t table, float score_below, std::uint32_t unseen_days, float click_weight);
  Scanned scan(std::uint32_t table, std::uint32_t server, std::uint64_t cursor, std::size_t room);
  std::string stats(std::uint32_t server);

  std::uint64_t global_step() const { return post_->global_step(); }
  std::uint64_t steps_over() const { return post_->steps_over(); }
  bool is_pushing() const { return !post_->is_quiet(); }  // some push is not acknowledged yet
  std::uint64_t bytes_sent() const { return post_->bytes_sent(); }
  std::uint64_t bytes_received() const { return post_->bytes_received(); }
  std::vector<bool> shared() const { return shared_; }  // where the memory could be mapped
  const TableConfig& config(std::uint32_t table) const { return tables_.at(table).config; }

 private:
  using Deadline = PsPost::Clock::time_point;

  struct TableState {
    TableConfig config;
    std::vector<std::uint64_t> basis;  // of the pull that the caller has last got, by server
  };
  struct RangeState {
    std::size_t count = 0;
    std::uint32_t server = 0;
    std::uint64_t basis = 0;
  };

  // Ids in the order of their servers.
  struct Division {
    std::vector<std::uint32_t> server, order;  // of each id: its server, and its place in the new order
    std::vector<std::size_t> begin;            // of each server's part; the last one is the end
    void divide(const std::int64_t* ids, std::size_t count, std::size_t servers);
  };

  // A pull under way. Used again when it is over, as its parts are large.
  struct Pull {
    bool range = false, distinct = false;
    std::uint32_t number = 0;
    std::size_t given = 0, dim = 1;
    Distinct finder;
    Division division;
    std::vector<std::uint32_t> places;  // of what was given, in the order of the servers
    PsBlocks::Block ids, rows, ordered;
    std::vector<PsRequestPtr> requests;  // by server; null where none
  };

  std::uint64_t remember(const std::shared_ptr<Pull>& pull);
  std::shared_ptr<Pull> wait_pull(std::uint64_t ticket, double timeout_seconds);
  std::shared_ptr<Pull> fresh_pull();
  void recycle(std::shared_ptr<Pull> pull);
  void request_rows(const std::shared_ptr<Pull>& pull, std::size_t server, PsHead head);

  PsHead head(PsKind kind, std::uint32_t number = 0) const;
  PsRequestPtr make(const PsHead& head) const;
  void tell_all(PsKind kind, double timeout_seconds);
  void send(std::size_t lane, const PsRequestPtr& request);
  PsRequestPtr ask(std::uint32_t server, const PsRequestPtr& request);  // on the push lane, and waits
  PsRequestPtr make_with(const PsHead& head, const void* payload, std::size_t bytes);
  void attach(std::size_t server);
  struct Part;
  Part begin_part(const PsHead& head);
  void end_part(std::size_t server, const Part& part);
  template <class T, class Begin>
  void scatter(const T* from, std::size_t count, std::size_t width, Begin begin) const;
  void add_rows(const PsPushRows& push, std::size_t dim, const std::vector<Part>& parts);
  void send_push(std::size_t server, const PsRequestPtr& request, std::uint64_t bytes);
  TableState& table(std::uint32_t number);
  RangeState& range(std::uint32_t number);
  PsValues values_to(std::size_t server) const { return shared_[server] ? PsValues::fp32 : values_; }
  static Deadline after(double seconds);

  const std::uint32_t client_;
  const std::size_t servers_;
  const PsValues values_;
  const double timeout_seconds_;
  std::vector<bool> shared_;
  std::shared_ptr<PsBlocks> blocks_;
  std::unique_ptr<PsPost> post_;
  std::map<std::uint32_t, TableState> tables_;
  std::map<std::uint32_t, RangeState> ranges_;
  std::mutex mutex_;  // of the tickets
  std::uint64_t next_ticket_ = 1;
  std::map<std::uint64_t, std::shared_ptr<Pull>> pulls_, taken_;
  std::vector<std::shared_ptr<Pull>> spare_;
  Division push_division_;
  std::vector<std::uint32_t> push_places_;  // in the order of the servers
  std::vector<float> push_sums_;
};

}  // namespace argosy
