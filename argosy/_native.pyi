"""Argosy's native core (`csrc/`): what must not wait for the interpreter.

Buffers are passed as addresses (`tensor.data_ptr()`) and element counts; the caller vouches that they are valid,
contiguous and stay alive during the call.
"""

from collections.abc import Sequence

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
    """Copy bytes around the caches, as the engine does where ranks share none: here for tests."""

def crc32c(data: bytes, seed: int = 0, way: str | None = None) -> int:
    """The CRC32C of `data`, going on from `seed`: `crc32c(b, crc32c(a)) == crc32c(a + b)`.

    `way` is one of `crc32c_ways()`, for tests; the default is the first of them.
    """

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
