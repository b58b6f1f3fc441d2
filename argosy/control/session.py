"""One authenticated connection to the coordinator: read a request, answer it, again.

A request is a message with an `op` and that op's fields; values are base64 text. The reply carries the result, or
`error` (a kind) and `message` (for people). A bad request is answered with an error and the connection goes on;
only broken framing ends it, because then nobody knows where the next message starts.

There is one request at a time per connection: a byte that comes before the reply was sent breaks the framing. That
keeps memory bounded, and lets the session watch for the peer's end while a request waits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from argosy.control import wire
from argosy.control.barriers import BarrierMismatchError, Barriers
from argosy.control.leases import Holder, LeaseError, Leases, Range, Shape
from argosy.control.limits import ByteBudget, Limits
from argosy.control.table import Table, TableError

MAX_KEY_BYTES: Final = 4096
MAX_WHO_CHARACTERS: Final = 256
_KEYS_SHOWN: Final = 8
_REPLY_ROOM_BYTES: Final = 1024

Reply = Mapping[str, object]


class _RefusedError(Exception):
    """A request that gets an error for a reply."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _PeerGoneError(Exception):
    """The peer closed the connection while its request waited."""


class Session:
    """Serves one peer until it goes; then it carries out the wills that the peer left, and returns its leases."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        table: Table,
        barriers: Barriers,
        leases: Leases,
        budget: ByteBudget,
        limits: Limits,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._table = table
        self._barriers = barriers
        self._leases = leases
        self._holder = Holder()
        self._budget = budget
        self._limits = limits
        self._wills: dict[str, bytes] = {}
        self._instant: dict[str, Callable[[wire.Message], Reply]] = {
            "set": self._set,
            "multi_set": self._multi_set,
            "add": self._add,
            "append": self._append,
            "check": self._check,
            "compare_set": self._compare_set,
            "delete": self._delete,
            "num_keys": self._num_keys,
            "will": self._will,
            "withdraw": self._withdraw,
            "lease_open": self._lease_open,
            "lease_done": self._lease_done,
            "lease_give_back": self._lease_give_back,
            "lease_ledger": self._lease_ledger,
        }
        self._waiting: dict[str, Callable[[wire.Message], Awaitable[Reply]]] = {
            "get": self._get,
            "multi_get": self._multi_get,
            "wait": self._wait,
            "barrier": self._barrier,
            "lease_take": self._lease_take,
        }

    async def run(self) -> None:
        """Answer requests until the peer goes; raise `WireError` or `OSError` if it does not behave."""
        try:
            while (length := await wire.read_length(self._reader, self._limits.max_message_bytes)) is not None:
                async with self._budget.hold(length), asyncio.timeout(self._limits.message_seconds):
                    request = await wire.read_body(self._reader, length)
                await self._send(await self._answer(request))
        except _PeerGoneError:
            return
        except wire.WireError as error:
            await self._send({"error": "broken-framing", "message": str(error)})
            raise

    def carry_out_wills(self, *, execute: bool) -> None:
        """Set the keys of wills not withdrawn, unless present; with `execute` false, only forget the wills."""
        for key, value in self._wills.items():
            self._table.release(key, value)
            if execute and key not in self._table:
                self._table.set(key, value)
        self._wills.clear()

    def return_leases(self) -> None:
        """Give ranges of samples back that the peer held."""
        self._leases.give_back(self._holder)

    async def _answer(self, request: wire.Message) -> Reply:
        op = request.get("op")
        try:
            if isinstance(op, str) and op in self._instant:
                return self._instant[op](request)
            if isinstance(op, str) and op in self._waiting:
                return await self._waiting[op](request)
            shown = repr(op)[:64]
            known = ", ".join([*self._instant, *self._waiting])
            raise _RefusedError("bad-request", f"unknown op {shown}; known: {known}")
        except (_RefusedError, TableError, LeaseError) as error:
            return {"error": error.kind, "message": str(error)}
        except BarrierMismatchError as error:
            return {"error": "barrier-mismatch", "message": str(error)}

    async def _send(self, reply: Reply) -> None:
        limit_bytes = self._limits.max_message_bytes
        try:
            frame = wire.encode(reply, limit_bytes)
        except wire.WireError as error:
            frame = wire.encode({"error": "too-large", "message": f"the reply is {error}"}, limit_bytes)
        async with self._budget.hold(len(frame)), asyncio.timeout(self._limits.message_seconds):
            self._writer.write(frame)
            await self._writer.drain()

    async def _settles(self, event: asyncio.Future[None], seconds: float) -> bool:
        """Wait for an event; false if the time passed first. Ends early if the peer goes."""
        if event.done() or seconds == 0:
            return event.done()
        hangup = asyncio.ensure_future(self._reader.read(1))
        either: set[asyncio.Future[Any]] = {event, hangup}
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hangup.cancel()
            # The stream allows one reader at a time: let this one leave before the next comes.
            await asyncio.wait({hangup})
        if not hangup.cancelled():
            if hangup.exception() is None and hangup.result():
                raise wire.WireError("a second request came before the first was answered")
            raise _PeerGoneError
        return event.done()

    # The operations. Those that wait come last.

    def _set(self, request: wire.Message) -> Reply:
        self._table.set(_key(request), _value(request, "value"))
        return {}

    def _multi_set(self, request: wire.Message) -> Reply:
        keys, values = _keys(request), request.get("values")
        if not isinstance(values, list) or len(values) != len(keys):
            raise _RefusedError("bad-request", "values must be a list as long as keys")
        decoded = [_decode(value, "values") for value in values]
        for key, value in zip(keys, decoded, strict=True):
            self._table.set(key, value)
        return {}

    def _add(self, request: wire.Message) -> Reply:
        return {"result": self._table.add(_key(request), _integer(request, "amount"))}

    def _append(self, request: wire.Message) -> Reply:
        self._table.append(_key(request), _value(request, "value"))
        return {}

    def _check(self, request: wire.Message) -> Reply:
        return {"result": all(key in self._table for key in _keys(request))}

    def _compare_set(self, request: wire.Message) -> Reply:
        expected, desired = _value(request, "expected"), _value(request, "desired")
        return {"value": wire.pack(self._table.compare_set(_key(request), expected, desired))}

    def _delete(self, request: wire.Message) -> Reply:
        return {"result": self._table.delete(_key(request))}

    def _num_keys(self, request: wire.Message) -> Reply:
        return {"result": len(self._table)}

    def _will(self, request: wire.Message) -> Reply:
        key, value = _key(request), _value(request, "value")
        if key in self._wills:
            raise _RefusedError("bad-request", f"this connection has left a will for key {key!r} already")
        self._table.reserve(key, value)
        self._wills[key] = value
        return {}

    def _withdraw(self, request: wire.Message) -> Reply:
        key = _key(request)
        value = self._wills.pop(key, None)
        if value is not None:
            self._table.release(key, value)
        return {"result": value is not None}

    def _lease_open(self, request: wire.Message) -> Reply:
        shape = Shape(*(_integer(request, field) for field in Shape._fields))
        if shape.samples < 0 or min(shape.batch, shape.largest, shape.workers) < 1:
            raise _RefusedError("bad-request", f"no queue can have {shape._asdict()}")
        self._leases.open(_key(request, "name"), shape)
        return {}

    def _lease_done(self, request: wire.Message) -> Reply:
        done = Range(_integer(request, "begin"), _integer(request, "end"))
        self._leases.done(_key(request, "name"), done, self._holder)
        return {}

    def _lease_give_back(self, request: wire.Message) -> Reply:
        self._leases.give_back(self._holder, _key(request, "name"))
        return {}

    def _lease_ledger(self, request: wire.Message) -> Reply:
        return self._leases.summary(_key(request, "name"))

    async def _get(self, request: wire.Message) -> Reply:
        values = await self._values([_key(request)], _seconds(request))
        return {"value": wire.pack(values[0])}

    async def _multi_get(self, request: wire.Message) -> Reply:
        keys = _keys(request)
        values = await self._values(keys, _seconds(request))
        # Summed before any text is made: a request may name one large key many times.
        total_bytes = sum(len(value) * 4 // 3 + 8 for value in values)
        if total_bytes + _REPLY_ROOM_BYTES > self._limits.max_message_bytes:
            raise _RefusedError("too-large", f"the values of these {len(keys)} keys do not fit into one message")
        return {"values": [wire.pack(value) for value in values]}

    async def _wait(self, request: wire.Message) -> Reply:
        seconds = _seconds(request)
        await self._seen(_keys(request), seconds, asyncio.get_running_loop().time() + seconds)
        return {}

    async def _seen(self, keys: list[str], seconds: float, deadline: float) -> None:
        watch = self._table.watch(keys)
        try:
            remaining = max(deadline - asyncio.get_running_loop().time(), 0.0)
            if not await self._settles(watch.settled, remaining):
                raise _RefusedError("deadline", _missed(sorted(watch.missing), len(set(keys)), seconds))
        finally:
            self._table.unwatch(watch)

    async def _values(self, keys: list[str], seconds: float) -> list[bytes]:
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            await self._seen(keys, seconds, deadline)
            values = [value for key in keys if (value := self._table.get(key)) is not None]
            if len(values) == len(keys):
                return values
            # Somebody deleted a key between its coming and our turn: wait for it to come again.

    async def _barrier(self, request: wire.Message) -> Reply:
        name, seconds, who = _key(request, "name"), _seconds(request), _who(request)
        size = _integer(request, "size")
        if size < 1:
            raise _RefusedError("bad-request", f"size must be at least 1, got {size}")
        arrival = self._barriers.arrive(name, size, who)
        try:
            if await self._settles(arrival.released, seconds):
                return {}
            raise _RefusedError("deadline", f"barrier {name!r} waited {seconds:g} s: {arrival.describe()}")
        finally:
            self._barriers.withdraw(arrival)

    async def _lease_take(self, request: wire.Message) -> Reply:
        name, seconds, self._holder.who = _key(request, "name"), _seconds(request), _who(request) or "somebody"
        deadline = asyncio.get_running_loop().time() + seconds
        while (taken := self._leases.take(name, self._holder)) is None and not self._leases.finished(name):
            change = self._leases.change(name)
            try:
                if not await self._settles(change, max(deadline - asyncio.get_running_loop().time(), 0.0)):
                    why = f"waited {seconds:g} s for samples of {name!r}: {self._leases.describe(name)}"
                    raise _RefusedError("deadline", why)
            finally:
                self._leases.give_up(name, change)
        return {"range": taken}


def _missed(missing: list[str], asked: int, seconds: float) -> str:
    names = ", ".join(repr(key) for key in missing[:_KEYS_SHOWN])
    if len(missing) > _KEYS_SHOWN:
        names += f" and {len(missing) - _KEYS_SHOWN} more"
    if asked == 1:
        return f"waited {seconds:g} s for key {names}, which nobody set"
    return f"waited {seconds:g} s for {asked} keys; nobody set {len(missing)} of them: {names}"


def _checked_key(key: object, field: str) -> str:
    if not isinstance(key, str):
        raise _RefusedError("bad-request", f"{field} must be text, got {type(key).__name__}")
    try:
        size_bytes = len(key.encode("utf-8"))
    except UnicodeEncodeError:
        raise _RefusedError("bad-request", f"{field} is not valid Unicode") from None
    if not 1 <= size_bytes <= MAX_KEY_BYTES:
        raise _RefusedError("bad-request", f"{field} must have 1 to {MAX_KEY_BYTES} bytes, got {size_bytes}")
    return key


def _key(request: wire.Message, field: str = "key") -> str:
    return _checked_key(request.get(field), field)


def _keys(request: wire.Message) -> list[str]:
    keys = request.get("keys")
    if not isinstance(keys, list):
        raise _RefusedError("bad-request", f"keys must be a list, got {type(keys).__name__}")
    return [_checked_key(key, "keys") for key in keys]


def _who(request: wire.Message) -> str:
    who = request.get("who", "")
    if not isinstance(who, str) or len(who) > MAX_WHO_CHARACTERS:
        raise _RefusedError("bad-request", f"who must be text of at most {MAX_WHO_CHARACTERS} characters")
    return who


def _decode(text: object, field: str) -> bytes:
    try:
        return wire.unpack(text)
    except ValueError as error:
        raise _RefusedError("bad-request", f"{field}: {error}") from None


def _value(request: wire.Message, field: str) -> bytes:
    return _decode(request.get(field), field)


def _integer(request: wire.Message, field: str) -> int:
    number = request.get(field)
    # JSON's true and false would pass for Python's 1 and 0.
    if not isinstance(number, int) or isinstance(number, bool) or not -(2**63) <= number < 2**63:
        raise _RefusedError("bad-request", f"{field} must be a 64-bit integer")
    return number


def _seconds(request: wire.Message) -> float:
    number = request.get("timeout_seconds")
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise _RefusedError("bad-request", "timeout_seconds must be a number")
    if not math.isfinite(number) or not 0 <= number <= wire.MAX_WAIT_SECONDS:
        raise _RefusedError("bad-request", f"timeout_seconds must be from 0 to {wire.MAX_WAIT_SECONDS:g}")
    return float(number)
