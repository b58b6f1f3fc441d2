"""Argosy's native core (`csrc/`): what must not wait for the interpreter.

Buffers are passed as addresses (`tensor.data_ptr()`) and element counts; the caller vouches that they are valid,
contiguous and stay alive during the call.
"""

from collections.abc import Sequence
from typing import Any

def reduce(op: str, dtype: str, out: int, sources: list[int], count: int, isa: str | None = None) -> None:
    """Reduce the buffers at the addresses `sources`, element by element, into the one at `out`.

    Sources are combined in their order, 16-bit floats in f32 and rounded once (to nearest even) at the end, so the
    result has the same bits on every CPU; a NaN leaves as the canonical one. Integers wrap, and their average
    truncates toward zero. The GIL is released.

    Args:
        op: "sum", "avg", "min", "max" or "prod"; for integers also "band", "bor" or "bxor" (bitwise and, or, exclusive
            or). A NaN in any source makes the result NaN.
        dtype: "f32", "f64", "bf16", "f16", "i32", "i64", "i8", "u8" or "i16". The other types that the core knows
            ("boolean", "c64", "c128", "raw1", "raw2", "raw4", "raw8") can be moved, but not reduced.
        out: address of the result; may be one of `sources`, but not overlap one otherwise.
        sources: one or more addresses, of any alignment.
        count: elements in each buffer.
        isa: one of `instruction_sets()`, for tests; the default is the best of this CPU.

    Raises:
        ValueError: an argument is none of the above; the message says which, and what is allowed.
    """

def instruction_sets() -> list[str]:
    """The instruction sets that `reduce` can use on this CPU, best first. All give the same bits."""

def tiles_are_hidden() -> bool:
    """Whether this CPU has tiles (AMX) whose shape it does not tell, as in some virtual machines."""

def quantised_record(bits: int) -> tuple[int, int]:
    """The numbers in a block that is quantised with `bits` (8, 4 or 1), and the bytes of its record."""

def quantise(bits: int, records: int, values: int, residual: int, count: int, isa: str | None = None) -> None:
    """Add `values` to `residual`, write the records of the sums, and leave in `residual` what they do not say.

    Values and residual are `count` floats; the last block may be short, its record is not. A block with a number that
    is not finite is NaN when it is read, and its residual zero. The GIL is released.
    """

def dequantise(bits: int, out: int, sources: list[int], count: int, add: bool = False, isa: str | None = None) -> None:
    """Set `out`, of `count` floats, to what the records of all sources say, added up in their order.

    With `add`, what `out` holds comes first. The result has the same bits on every CPU. The GIL is released.
    """

def low_rank_project(
    p: int,
    matrix: int,
    sent_p: int,
    sent_q: int,
    values: int,
    weight: float,
    q: int,
    shape: tuple[int, int, int],
    isa: str | None = None,
) -> None:
    """matrix += weight * values - sent_p sent_q^T, and p = matrix q.

    `shape` is (rows, columns, rank). p and q are kept as `rank` rows each, of `rows` and of `columns` numbers.
    """

def low_rank_settle(matrix: int, sent_p: int, sent_q: int, shape: tuple[int, int, int], isa: str | None = None) -> None:
    """matrix -= sent_p sent_q^T, with the bits that `low_rank_project` makes of it."""

def low_rank_project_back(q: int, matrix: int, p: int, shape: tuple[int, int, int], isa: str | None = None) -> None:
    """Make the rows of p orthonormal, with the same bits on every CPU, and q = matrix^T p.

    A row of p that depends on those before it becomes zero.
    """

def low_rank_expand(out: int, p: int, q: int, shape: tuple[int, int, int], isa: str | None = None) -> None:
    """out = p q^T, with the same bits on every CPU."""

def low_rank_restart(start: int, q: int, shape: tuple[int, int, int]) -> None:
    """Rows of q that are not all zeros replace those of `start`, brought to a largest magnitude of one."""

def sparse_entries(count: int, k: int) -> int:
    """How many entries (a float32 and 16 bits) `sparse_compress` writes for a tensor of which `k` elements are sent.

    Raises:
        ValueError: `k` is not from 1 to `count`, or `count` not below 2^32.
    """

def sparse_compress(
    gradient: int,
    velocity: int,
    kept: int,
    parameter: int,
    count: int,
    scale: float,
    decay: float,
    momentum: float,
    nesterov: bool,
    k: int,
    values: int,
    gaps: int,
    isa: str | None = None,
) -> int:
    """Take the `k` largest elements, by magnitude, out of what is kept of a tensor's gradients; returns how many.

    First the gradient is added: g = scale * gradient + decay * parameter; velocity = momentum * velocity + g; kept +=
    velocity. With `nesterov`, velocity = momentum * (velocity + g); kept += velocity + g. Where there is no velocity,
    kept += g. The gradient is then zero. Of equal elements the first are taken; zeros never are. Velocity and kept are
    zero where an element was taken. If something is not finite, it is zeroed in both, and a NaN is all that is taken.

    Args:
        gradient, kept: addresses of `count` float32.
        velocity, parameter: the same, or 0 for none.
        k: from 1 to `count`.
        values: address of `sparse_entries(count, k)` float32, to be filled. Those of no use are zero.
        gaps: address of as many unsigned 16-bit numbers: how far each element is from the one before.
        isa: one of `instruction_sets()`, for tests.
    """

def sparse_drain(
    gradient: int,
    velocity: int,
    kept: int,
    parameter: int,
    count: int,
    scale: float,
    decay: float,
    momentum: float,
    nesterov: bool,
    isa: str | None = None,
) -> None:
    """Add the gradient as `sparse_compress` does, then move all that is kept into it, and nothing out of velocity.

    `kept` may be 0 too. What is not finite stays in the gradient, and is zeroed in velocity.
    """

def sparse_add(out: int, count: int, values: int, gaps: int, entries: int) -> None:
    """Add what `sparse_compress` wrote to the tensor at `out`.

    Raises:
        ValueError: an entry is for an element beyond the end.
    """

def sparse_descend(
    parameter: int, gradient: int, count: int, rate: float, gaps: int, entries: int, messages: int
) -> bool:
    """Subtract `rate` times the gradient where entries lead that `sparse_compress` wrote, once in each place.

    Args:
        parameter: address of `count` float32, to be changed.
        gradient: address of `count` float32: the sum of all messages' values, or what became of it since.
        rate: the learning rate.
        gaps: address of the gaps of all messages, `entries` of each, one message behind the other.
        entries: of each message.
        messages: how many there are.

    Returns:
        Whether it was done: not if the gradient has numbers elsewhere, as far as every 509th tells.
    """

def guard(fd: int) -> None:
    """Kill this process's whole group (SIGKILL) when the other end of `fd` is closed.

    `fd` is a pipe or stream socket whose other end belongs to the launcher. However the launcher dies, the kernel
    closes that end, so no worker outlives it. A native thread waits for it, whatever Python is doing; it reads nothing
    from `fd`, which can still carry messages, and it keeps working when `fd` is closed on this side.

    Call it from a process that leads a group of its own, and see that no other process holds the launcher's end.

    Raises:
        OSError: `fd` is not open.
        ValueError: `fd` is of a kind whose other end cannot be seen closing, such as a file or a datagram socket.
    """

class EngineError(RuntimeError):
    """An operation failed. Its `args`: the kind (lost, timeout, mismatch, aborted, corrupt), the rank to blame or -1,
    the operation's number, what it was, and the reason."""

class Ticket:
    """An operation that was started."""

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""

class Delivery:
    """A message that was posted."""

    @property
    def source(self) -> int:
        """Who sent it, once it is there."""

class Engine:
    """Runs the operations of one group in this process. `EngineGroup` is the face of it that checks its arguments."""

    def __init__(self, rank: int, size: int) -> None: ...
    def card(self) -> tuple[int, int, int, bytes]:
        """Where peers find this rank's heap: process, descriptor, bytes, and a nonce that is also in the heap."""

    def map_peer(self, rank: int, pid: int, fd: int, bytes: int, nonce: bytes) -> bool:
        """Map the heap of a peer; False if it cannot be reached, or is not the one with this nonce."""

    def set_hosts(self, host_numbers: list[int], host_names: list[str]) -> None:
        """Say which ranks share a host."""

    def add_sockets(self, rank: int, fds: list[int]) -> None:
        """Take over the connected sockets to a peer on another host: control, collectives (one or more), messages."""

    def start(self) -> None:
        """Begin, after all peers are mapped or connected."""

    def allocate(self, bytes: int) -> int:
        """The address of zeroed memory that all ranks of the host map."""

    def release(self, address: int) -> None:
        """Give back what `allocate` returned."""

    def heap_of(self, rank: int) -> int:
        """Where this process sees the memory from which a rank of this host allocates."""

    def set_plan(
        self,
        collective: int,
        algorithm: int,
        root: int,
        slots: int,
        owners: int,
        steps: Sequence[tuple[int, int, int, int]],
    ) -> None:
        """Say what this rank does in a collective by an algorithm: steps of (kind, peer, first slot, slots)."""

    def run(
        self,
        collective: int,
        dtype: int,
        op: int,
        algorithm: int,
        root: int,
        source: int,
        target: int,
        count: int,
        timeout_seconds: float,
        /,
    ) -> None:
        """Run an operation. Algorithm 0 is direct, in shared memory. Raises `EngineError`."""

    def submit(
        self,
        collective: int,
        dtype: int,
        op: int,
        algorithm: int,
        root: int,
        source: int,
        target: int,
        count: int,
        timeout_seconds: float,
        in_bytes: list[int],
        out_bytes: list[int],
        keep: object,
        /,
    ) -> Ticket:
        """Start an operation; `keep` owns its memory, and lives until it is done."""

    def wait(self, ticket: Ticket, timeout_seconds: float | None) -> None:
        """Return when a started operation is done; run it here if nobody does yet."""

    def post(
        self,
        sending: bool,
        peer: int,
        tag: int,
        dtype: int,
        address: int,
        bytes: int,
        timeout_seconds: float,
        keep: object,
        /,
    ) -> Delivery:
        """Send a message, or ask for one, from `peer` or, if it is -1, from anybody; `keep` owns the memory."""

    def wait_message(self, delivery: Delivery, timeout_seconds: float | None) -> None:
        """Return when a message has been handed over, or has come."""

    def message_done(self, delivery: Delivery, /) -> bool:
        """Whether a message has been handed over, or has come."""

    def drop(self) -> None:
        """Leave the group at once: what was started, and what waits, fails."""

    def forsake(self) -> None:
        """In a forked child: let go of descriptors that the parent's peers watch."""

    def abort(self, reason: str) -> None:
        """Fail all operations, here and at the peers."""

    def close(self) -> None:
        """Leave the group."""

    def write_around(self, around: bool) -> None:
        """Whether what others read is written around the caches, for tests; the engine decides by itself otherwise."""

    @property
    def broken(self) -> bool:
        """Whether an operation has failed, so that all later ones will."""

class Failure(RuntimeError):
    """Why an operation did not end well."""

    kind: str
    """"lost", "timeout", "mismatch", "aborted" or "corrupt"."""
    peer: int
    """The rank to blame, or -1."""

def copy_around(to: int, source: int, bytes: int) -> None:
    """Copy bytes around the caches, without the GIL: what is copied is not read soon."""

def samples_at(size: int, half: int, keys: list[int], positions: int, count: int, samples: int) -> None:
    """The samples at some positions of an epoch, by a Feistel network with these keys over halves of `half` bits.

    Positions and samples are addresses of `count` 64-bit integers. Runs without the GIL. Raises IndexError for a
    position that is not below the size.
    """

def crc32c(data: bytes, seed: int = 0, way: str | None = None) -> int:
    """The CRC32C of `data`, going on from `seed`: `crc32c(b, crc32c(a)) == crc32c(a + b)`.

    `way` is one of `crc32c_ways()`, for tests; the default is the first of them.
    """

def crc32c_at(address: int, bytes: int, seed: int = 0) -> int:
    """The same of bytes in memory, without the GIL."""

def crc32c_ways() -> list[str]:
    """The ways in which this CPU can compute it, best first. All give the same value."""

def check_frame(data: bytes, peer: int) -> dict[str, int]:
    """The fields of a frame's head, 64 bytes that came from rank `peer`.

    Raises:
        Failure: `data` is not what that rank would send; the message names the field.
        ValueError: `data` does not have 64 bytes.
    """

def ring_bytes(slots: int, slot_bytes: int) -> int:
    """The memory that a ring for `slots` frames with up to `slot_bytes` of payload takes."""

class Links:
    """One rank's links to its peers, to run programs over. For tests and measurements: the engine has its own.

    After a `Failure` nothing more can be done with the links but `abort` and `close`.
    """

    def __init__(self, rank: int, size: int) -> None: ...
    def add_tcp(self, peer: int, fds: list[int]) -> None:
        """Link to `peer` by connected stream sockets, a lane each. They are taken over, unless this raises."""

    def add_shm(self, peer: int, out_address: int, in_address: int, slots: int, slot_bytes: int) -> None:
        """Link to `peer` by two rings of `ring_bytes`, zeroed at first; the peer's `out` is our `in`."""

    def run(
        self,
        steps: list[tuple[int, int, int, int]],
        sequence: int,
        operation: int,
        count: int,
        dtype: str,
        op: str,
        timeout_seconds: float,
        chunk_bytes: int = 0,
    ) -> None:
        """Run a program: steps are (kind, peer, address, bytes), kinds as in `argosy.comm.schedule`.

        All ranks give the same `sequence`, which grows from call to call, `operation`, `count` and `chunk_bytes` (0
        is the default). The GIL is released.

        Raises:
            Failure: a peer is lost or disagrees, the deadline passed, or bytes were corrupted.
            ValueError: a step is none, or has a peer without a link.
        """

    def abort(self, peer: int, blamed: int, text: str) -> bool:
        """Tell a peer why this rank gives up, and which rank it blames; False if a lane must first be flushed."""

    def flush(self, peer: int) -> bool:
        """Go on sending what is under way to a peer; whether anything moved."""

    def close(self) -> None:
        """Close all links."""

def table_config(
    dim: int,
    rule: str,
    *,
    lr: float = 0.01,
    momentum: float = 0.0,
    nesterov: bool = False,
    beta1: float = 0.0,
    beta2: float = 0.0,
    alpha: float = 0.0,
    eps: float = 0.0,
    weight_decay: float = 0.0,
    l1: float = 0.0,
    l2: float = 0.0,
    lr_power: float = -0.5,
    initial_accumulator: float = 0.0,
    initializer: str = "zeros",
    low_or_mean: float = 0.0,
    high_or_std: float = 0.0,
    seed: int = 0,
    admission: str = "always",
    count: int = 0,
    probability: float = 0.0,
) -> bytes:
    """A table's configuration as it crosses the wire; equal ones have equal bytes. `argosy.ps.table_config` makes it.

    Args:
        rule: "sgd", "momentum", "adagrad", "adagrad_row", "rmsprop", "adam", "adamw", "ftrl" (its beta is `beta1`), or
            "add". Numbers that a rule does not use are ignored.
        initializer: "zeros", "constant" (`low_or_mean`), "uniform" or "normal".
        admission: "always", "count" or "probability".

    Raises:
        ValueError: a name or a number is none that is allowed; the message says which.
    """

class Table:
    """A map from any 64-bit id to a row of value, optimizer state and counters. Many threads may use it at once."""

    def __init__(self, config: bytes, isa: str | None = None) -> None: ...
    def pull(self, ids_at: int, count: int, out_at: int) -> None:
        """Write count x dim values. Ids may repeat; one without a row has its initial value, and gets no row."""

    def push(
        self,
        ids_at: int,
        count: int,
        gradients_at: int,
        shows_at: int = 0,
        clicks_at: int = 0,
        pulled_at: int = 0,
        compensation: float = 0.0,
        scale: float = 1.0,
        lr_factor: float = 1.0,
        sequence: int = 0,
    ) -> dict[str, int]:
        """Apply count x dim gradients, of distinct ids; returns how many rows were "updated", "admitted" (made),
        "waiting" (of ids that are not admitted), and "not_finite" (nothing is done with those).

        Args:
            shows_at: address of unsigned 32-bit numbers, or 0 for 1 each. What `count` admission counts.
            clicks_at: address of floats, or 0 for none.
            pulled_at: what the gradients were computed from, or 0; for delay compensation, g += compensation * g * g *
                (value - pulled).
            scale: gradients are multiplied by this.
            lr_factor: the learning rate is multiplied by this.
            sequence: what `probability` admission draws from, with seed and id.
        """

    def set(self, ids_at: int, count: int, values_at: int) -> None:
        """Set values. Rows are made, admitted or not; the optimizer state of those that are there stays."""

    @property
    def rows(self) -> int:
        """How many rows there are."""

    @property
    def waiting(self) -> int:
        """How many ids are counted, but not admitted yet."""

    @property
    def bytes(self) -> int:
        """All memory."""

    @property
    def payload_bytes(self) -> int:
        """Ids, counters, values and state of all rows."""

    @property
    def followed(self) -> int:
        """Pushes that went where a pull of the same ids had found the rows."""

    @property
    def dim(self) -> int:
        """Columns of a value."""

    @property
    def state_floats(self) -> int:
        """Floats of a row's optimizer state."""

    def end_day(self, decay: float) -> None:
        """Multiply shows and clicks by `decay`, and count a day without a push for each row."""

    def shrink(self, score_below: float, unseen_days: int = 0, click_weight: float = 1.0) -> int:
        """Remove rows with show + click_weight * click < score_below, or without a push for so many days (0: however
        long); returns how many."""

    def scan(
        self, cursor: int, room: int, ids_at: int, values_at: int = 0, state_at: int = 0, counters_at: int = 0
    ) -> tuple[int, int]:
        """Read up to `room` rows from a cursor, 0 to begin; returns the next cursor, 0 at the end, and how many.

        Arrays at 0 are left out. Counters are two floats for each row, show and click.
        """

class DenseRange:
    """A flat range of float32 parameters with an optimizer: the rule of a table's configuration."""

    def __init__(self, config: bytes, count: int, isa: str | None = None) -> None: ...
    def set(self, values_at: int) -> None:
        """Set all values; optimizer state is initial then."""

    def pull(self, out_at: int) -> None:
        """Read all values."""

    def push(
        self,
        gradients_at: int,
        pulled_at: int = 0,
        compensation: float = 0.0,
        scale: float = 1.0,
        lr_factor: float = 1.0,
    ) -> bool:
        """Apply gradients as `Table.push` does; False if something is not finite: nothing is applied then."""

    @property
    def count(self) -> int:
        """How many parameters."""

class Distinct:
    """Makes ids distinct. For one thread; addresses are valid until the next `find`."""

    def __init__(self) -> None: ...
    def find(self, ids_at: int, count: int) -> int:
        """Returns how many distinct ids there are."""

    @property
    def ids_at(self) -> int:
        """The distinct ids, in order of their first appearance."""

    @property
    def places_at(self) -> int:
        """For each given id, its place among them, as an unsigned 32-bit number."""

    @property
    def counts_at(self) -> int:
        """For each distinct id, how often it was given, as an unsigned 32-bit number."""

def mix(id: int) -> int:
    """The hash of an id, as an unsigned 64-bit number; the server of an id is this modulo the number of servers."""

def expand(rows_at: int, places_at: int, count: int, dim: int, out_at: int, isa: str | None = None) -> None:
    """out[i] = rows[places[i]], of `count` rows."""

def add_up(
    gradients_at: int,
    in_a_row: int,
    pitch: int,
    places_at: int,
    count: int,
    dim: int,
    rows_at: int,
    isa: str | None = None,
) -> None:
    """rows[places[i]] += gradients[i], of `count` gradients; they stand `in_a_row` in lines `pitch` numbers apart."""

def expand_bags(
    rows_at: int, places_at: int, offsets_at: int, bags: int, dim: int, mean: bool, out_at: int, isa: str | None = None
) -> None:
    """out[b] = the sum or mean of rows[places[i]], for i from offsets[b] to offsets[b + 1]; an empty bag is zeros."""

def add_up_bags(
    gradients_at: int,
    places_at: int,
    offsets_at: int,
    bags: int,
    dim: int,
    mean: bool,
    rows_at: int,
    isa: str | None = None,
) -> None:
    """rows[places[i]] += gradients[b], or its share in a mean, for i from offsets[b] to offsets[b + 1]."""

def random_access_limit(
    rows: int, head_floats: int, dim: int, state_floats: int, count: int, repeats: int
) -> tuple[float, float]:
    """The seconds that this machine takes to read the values of `count` rows at random places of an array, and to read
    and write all of as many rows: the limit of any table."""

class PsError(RuntimeError):
    """A request to a parameter server failed.

    `kind` is "lost", "timeout", "corrupt", or what the server answered: "malformed", "too_large", "version",
    "unknown_table", "mismatch", "not_finite", "too_few", "unmapped" or "internal". `server` is its number, or -1.
    """

    kind: str
    server: int

class PsServer:
    """A parameter server's tables and ranges, and a native thread for each connection of a worker.

    Args:
        workers: how many clients there are, numbered from 0.
        aggregate: 0: pushes are applied at once. Else they are gathered until so many clients have done a step, and
            applied as sum(weight x gradient) / sum(weight); those who come later are dropped and counted.
        reject_not_finite: a push with a gradient that is not finite is answered with an error, and nothing of it is
            applied. Else only its row is left out, and counted.
    """

    def __init__(self, workers: int, aggregate: int = 0, reject_not_finite: bool = True) -> None: ...
    def add_connection(self, fd: int, client: int, lane: int) -> None:
        """Take over a connected stream socket whose other end has proved to be this client (lane 0 for pulls, 1 for
        pushes). If this raises, the socket is still the caller's."""

    def stop(self) -> None:
        """End all connections and their threads."""

    def stats(self) -> dict[str, Any]:
        """What was counted.

        `clocks` of clients, `version` (steps that were gathered and applied), `global_step`, `lost`; `late_dropped`
        (steps of clients that came too late), `late_by_client`, `late_pushes` and `late_rows` of these; `staleness`:
        how many pushes were made 0, 1, ... 64 or more steps of other clients after their pull, and `stalest`, the most
        such steps; `tables` and `ranges`, each with number and
        counts; `not_finite`, `requests`, `refused`, `repeated`, `dropped_connections`, `bytes_in` and `bytes_out` of
        sockets, `shared_bytes`.
        """

    def lost(self) -> list[int]:
        """The clients whose connections ended before they left, and who are not back."""

    @property
    def connections(self) -> int:
        """How many connections are served."""

class PsClient:
    """A worker's connections to all parameter servers. Nothing here holds the GIL while it waits or computes.

    Not for several threads at once, but that one may be in `finish_pull` or `take_pull` while another calls. A call
    raises PsError also for what a push before it came to.

    Args:
        client: this worker's number.
        servers: how many there are; the other lists have an entry for each.
        pull_fds, push_fds: connected sockets, which are taken over.
        values: how values travel by sockets: "fp32", "fp16" or "int8". In shared memory they are fp32.
        shared: whether the server may be able to map this process's memory. If it is not, sockets are used.
        names: what errors call the servers, such as "10.0.0.7:4000".
        timeout_seconds: for calls that have none of their own.
    """

    def __init__(
        self,
        client: int,
        servers: int,
        pull_fds: list[int],
        push_fds: list[int],
        values: str,
        shared: list[bool],
        names: list[str] = ...,
        timeout_seconds: float = 60.0,
    ) -> None: ...
    def create_table(self, number: int, config: bytes) -> None:
        """Have a table on all servers, made by whoever asks first; others must ask with the same `table_config`."""

    def create_range(self, number: int, config: bytes, count: int, server: int = 0) -> None:
        """Have a range of `count` parameters on one server. Of the configuration only the rule counts."""

    def pull(
        self,
        table: int,
        ids_at: int,
        count: int,
        out_at: int,
        own: int = 0,
        all: int = 0,
        timeout_seconds: float = 60.0,
        distinct: bool = False,
    ) -> None:
        """Write the rows of `count` ids to `out_at`, once this client's clock is `own` and that of all clients (or,
        where pushes are gathered, the version) is `all`. `distinct` says that no id repeats, which saves a search."""

    def start_pull(
        self, table: int, ids_at: int, count: int, own: int = 0, all: int = 0, distinct: bool = False
    ) -> int:
        """Ask, and return a ticket. Ids are copied."""

    def finish_pull(self, ticket: int, out_at: int, timeout_seconds: float = 60.0) -> None:
        """Wait for a pull of rows or of a range. However it ends, the ticket is used up."""

    def take_pull(self, ticket: int, timeout_seconds: float = 60.0) -> int:
        """Wait for a pull; return the address of its rows: one for each distinct id, in the order of the ids if they
        were `distinct`, else of their first appearance. They stay until `release_pull`."""

    def release_pull(self, ticket: int) -> None:
        """Give the memory of a pull back that was taken."""

    def push(
        self,
        table: int,
        ids_at: int,
        count: int,
        gradients_at: int,
        shows_at: int = 0,
        clicks_at: int = 0,
        pulled_at: int = 0,
        compensation: float = 0.0,
        lr_factor: float = 1.0,
        sequence: int = 0,
        places_at: int = 0,
        given: int = 0,
    ) -> None:
        """Push gradients of distinct ids; return when they are copied and handed over.

        `sequence` grows with each push to a table: one that is not above the last is taken for its repetition, and not
        applied. With `places_at` there are `given` gradients, one for each place, and those of an id are added up.
        """

    def start_pull_range(self, number: int, own: int = 0, all: int = 0) -> int:
        """Ask for a range, and return a ticket for `finish_pull`."""

    def pull_range(
        self, number: int, out_at: int, own: int = 0, all: int = 0, timeout_seconds: float = 60.0
    ) -> None: ...
    def push_range(
        self,
        number: int,
        gradients_at: int,
        pulled_at: int = 0,
        compensation: float = 0.0,
        lr_factor: float = 1.0,
        sequence: int = 0,
    ) -> None: ...
    def set_range(self, number: int, values_at: int) -> None: ...
    def set_rows(self, table: int, ids_at: int, count: int, values_at: int) -> None:
        """Set rows, and make those that are missing. Ids are distinct."""

    def done(self, step: int, weight: float = 1.0, batches: int = 1, may_be_late: bool = False) -> None:
        """Tell all servers, after the pushes, that this client has done a step, of `weight` samples.

        `batches`: how many steps it is for learning-rate schedules. `may_be_late`: the first server is asked whether
        the step is late, and the others are told, so that they drop it or not as one.
        """

    def flush(self, timeout_seconds: float = 60.0) -> None:
        """Wait until all that was pushed is acknowledged."""

    def leave(self, timeout_seconds: float = 60.0) -> None:
        """Tell all servers that nobody is to wait for this client any more."""

    def rest(self, timeout_seconds: float = 60.0) -> None:
        """Tell all servers that nobody is to wait for this client until it goes on."""

    def end_day(self, table: int, decay: float) -> None: ...
    def shrink(self, table: int, score_below: float = 0.0, unseen_days: int = 0, click_weight: float = 0.0) -> int:
        """Remove rows on all servers, as Table.shrink does; return how many."""

    def scan(self, table: int, server: int, cursor: int, room: int) -> tuple[int, bytes, bytes, bytes, bytes]:
        """Up to `room` rows of one server, from a cursor (0 to begin): the next cursor (0 at the end), ids, values,
        state, and pairs of show and click."""

    def stats(self, server: int = 0) -> dict[str, Any]:
        """What a server has counted: see PsServer.stats."""

    def close(self) -> None:
        """End the connections. A client that has not left is lost."""

    @property
    def global_step(self) -> int:
        """The steps that servers had applied when they last answered: what learning-rate schedules count."""

    @property
    def is_pushing(self) -> bool:
        """Whether some push is not acknowledged yet."""

    @property
    def steps_over(self) -> int:
        """The steps that every server had applied when it last answered."""

    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def shared(self) -> list[bool]:
        """Which servers have mapped this process's memory."""
