// What a worker and a parameter server say to each other: fixed heads, then raw ids and numbers.
//
// A request is a PsHead and a payload, its answer a PsReply and a payload; answers come in the order of the requests.
// Where both ends map the worker's memory, payloads lie there and only heads cross the socket.
//
// [Note: what a peer sends is not believed]
// A head is sealed by a CRC; if that does not hold, nothing says where the next one begins, and the connection ends.
// A head that holds may still ask for nonsense: every size is computed from its fields, compared with a cap and with
// its length, and only then is memory taken. Such a request is passed over and answered with an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "heap.h"
#include "ps_values.h"

namespace argosy {

enum class PsKind : std::uint8_t {
  attach = 1,    // payload PsAttach: the server maps the client's memory
  create_table,  // payload TableConfig
  create_range,  // payload TableConfig, of which only the rule counts; `count` floats
  pull_rows,     // payload ids; answer: rows, encoded
  push_rows,     // payload as PushLayout says
  set_rows,      // payload ids, then fp32 rows
  pull_range,    // answer: `count` floats, encoded
  push_range,    // payload as PushLayout says, without ids
  set_range,     // payload `count` fp32
  done,  // `sequence` is the step, `weight` its samples, `count` its batches; answer: count of 1, or 0 if it is late
  leave,
  stats,    // answer: JSON
  end_day,  // `decay_or_score`
  shrink,   // `decay_or_score`, `click_weight`, `unseen_days`; answer: count of rows
  scan,     // from `cursor`, at most `count` rows; answer: ids, values, state, counters, and where to go on
  rest,     // nobody is to wait for this client until it goes on
  last = rest,
};
const char* name(PsKind kind);

struct PsHead {
  static constexpr std::uint32_t kMagic = 0x53505241;  // "ARPS"
  static constexpr std::uint16_t kVersion = 1;
  static constexpr std::uint32_t kShared = 1, kShows = 2, kClicks = 4, kPulled = 8;  // flags: what the payload has
  static constexpr std::uint32_t kLate = 16;  // of a step that is done: another server has found it to be late

  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  PsKind kind = PsKind::stats;
  PsValues values = PsValues::fp32;
  std::uint32_t client = 0, number = 0;  // who asks, and for which table or range
  std::uint64_t sequence = 0;            // of a push; a repeated one is not applied again
  std::uint64_t count = 0;               // ids, floats of a range, or batches of a step
  std::uint64_t own = 0, all = 0;        // a pull waits for both: see ps_steps.h
  std::uint64_t basis = 0;               // of a push: what the answer to its pull told
  std::uint64_t cursor = 0;
  std::uint32_t dim = 1, flags = 0;
  float lr_factor = 1, compensation = 0;
  double weight = 0;
  float decay_or_score = 0, click_weight = 0;
  std::uint32_t unseen_days = 0, reserved = 0;
  std::uint64_t length = 0;             // of the payload on the socket: 0 if it lies in shared memory
  std::uint64_t at = 0, answer_at = 0;  // offsets of payload and answer in shared memory
  std::uint32_t payload_crc = 0;
  std::uint32_t head_crc = 0;  // of all before
};
static_assert(sizeof(PsHead) == 136 && offsetof(PsHead, weight) == 80 && offsetof(PsHead, head_crc) == 132);

enum class PsWrong : std::uint8_t {
  none,
  malformed,      // a request that no client makes
  too_large,      // beyond a cap
  version,        // another release
  unknown_table,  // or range
  mismatch,       // tables or clients that do not agree
  not_finite,     // a gradient with a NaN or an infinity
  too_few,        // so many clients are gone that a step cannot end
  unmapped,       // shared memory that cannot be mapped
  internal,
  last = internal,
};
const char* name(PsWrong wrong);

struct PsReply {
  std::uint32_t magic = PsHead::kMagic;
  std::uint16_t version = PsHead::kVersion;
  PsWrong wrong = PsWrong::none;  // if some: the payload is text
  std::uint8_t reserved = 0;
  std::uint64_t sequence = 0;     // the request's
  std::uint64_t count = 0;        // rows in the payload, rows removed, or whether a step is in time
  std::uint64_t cursor = 0;       // where a scan goes on
  std::uint64_t global_step = 0;  // steps that were applied: what learning-rate schedules count
  std::uint64_t basis = 0;        // see PsSteps::basis
  std::uint64_t length = 0;
  std::uint32_t payload_crc = 0;
  std::uint32_t head_crc = 0;
};
static_assert(sizeof(PsReply) == 64 && offsetof(PsReply, head_crc) == 60);

struct PsAttach {
  std::uint64_t pid = 0, fd = 0, bytes = 0;
  Nonce nonce = {};
};
static_assert(sizeof(PsAttach) == 40);

constexpr std::uint64_t kPsMostPayload = std::uint64_t{1} << 30;
constexpr std::uint64_t kPsMostCount = std::uint64_t{1} << 28;
constexpr std::uint64_t kPsMostScan = std::uint64_t{64} << 20;  // bytes of one answer
constexpr std::size_t kPsMostText = 2000;
constexpr std::size_t kPsRangeWidth = 256;  // numbers of a range that share a scale, where one is needed

// What a server answers to a request that it does not do.
struct PsRefusal : std::runtime_error {
  PsRefusal(PsWrong wrong, const std::string& text) : std::runtime_error(text), wrong(wrong) {}
  PsWrong wrong;
};

// Where the parts of a push's payload begin, each at a multiple of 8.
struct PushLayout {
  std::uint64_t ids = 0, gradients = 0, shows = 0, clicks = 0, pulled = 0, total = 0;
};
PushLayout layout_of(const PsHead& head);  // of push_rows or push_range whose count and dim are checked

void seal(PsHead& head, std::uint32_t payload_crc);
void seal(PsReply& reply, std::uint32_t payload_crc);

// Whether this is a head at all. What follows one that is not cannot be read.
bool is_sealed(const PsHead& head);
bool is_sealed(const PsReply& reply);

// The bytes of payload that a request has, in its buffer or in shared memory. Throws PsRefusal if its fields contradict
// each other or are beyond the caps.
std::uint64_t payload_bytes(const PsHead& head);
// The bytes of the rows or the range that answers a pull; checked as above.
std::uint64_t answer_bytes(const PsHead& head);

// "push_rows of table 3 by client 1, sequence 7"
std::string describe(const PsHead& head);

}  // namespace argosy
