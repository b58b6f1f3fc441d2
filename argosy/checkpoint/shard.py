"""A shard: one safetensors file, written as a stream that is hashed on the way, and read in boxes.

The format is eight bytes of length, a JSON header that says each tensor's type, shape and place, and then the bytes. It
is written here, and not by the safetensors package, so that a file is hashed while it is written, is never in memory as
a whole, and may go to a disk, a URL or another rank. Any reader of safetensors reads it.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from argosy._native import crc32c_at
from argosy.checkpoint.boxes import Box, whole
from argosy.checkpoint.errors import CheckpointError, reason

CHUNK_BYTES: Final = 8 << 20
_MAX_HEADER_BYTES: Final = 100_000_000  # safetensors' own limit
DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: memoryview, /) -> Any:
        """Take all of the bytes."""


class Source(Protocol):
    """Where bytes come from: a file that was opened for reading."""

    def seek(self, offset: int, /) -> Any:
        """Go to a place."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill a buffer, or as much of it as there is."""


@dataclass(frozen=True)
class Entry:
    """A tensor under the name that it has in a file."""

    key: str
    tensor: Tensor


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """What safetensors calls a type."""
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{where} has the type {dtype}, which safetensors files cannot hold; convert it before saving"
        )
    return _NAMES[dtype]


def layout(entries: Sequence[Entry]) -> tuple[bytes, list[Entry], int]:
    """The beginning of a file, its tensors in the order in which they follow, and how many bytes it has in all."""
    # Large elements first, so that each begins at a multiple of its own size.
    ordered = sorted(entries, key=lambda entry: (-entry.tensor.element_size(), entry.key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in ordered:
        size_bytes = entry.tensor.numel() * entry.tensor.element_size()
        header[entry.key] = {
            "dtype": dtype_name(entry.tensor.dtype, entry.key),
            "shape": list(entry.tensor.shape),
            "data_offsets": [position, position + size_bytes],
        }
        position += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ordered, 8 + len(text) + position


def stream(entries: Sequence[Entry]) -> Iterator[memoryview]:
    """The bytes of a file, in chunks. A tensor that is not in one stretch on the CPU is copied when its turn comes."""
    beginning, ordered, _ = layout(entries)
    yield memoryview(beginning)
    for entry in ordered:
        data = memory(entry.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        for position in range(0, len(data), CHUNK_BYTES):
            yield data[position : position + CHUNK_BYTES]


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, where they are."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


class Hashed:
    """Writes to a sink, and hashes in a thread beside it. The bytes must stay as they are until `finish`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._sums = Sums(thorough=True)
        self._failure: Exception | None = None
        self._chunks: queue.Queue[memoryview | None] = queue.Queue(8)
        self._thread = threading.Thread(target=self._work, name="argosy checkpoint hash", daemon=True)
        self._thread.start()

    def write(self, data: memoryview) -> None:
        """Pass bytes on."""
        self._chunks.put(data)
        self._sink.write(data)

    def finish(self) -> Sums:
        """The sums of all that was written."""
        self._chunks.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._sums

    def _work(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            try:
                self._sums.add(chunk)
            except Exception as error:  # whoever writes must not wait for this thread
                self._failure = error


class Sums:
    """What tells a file from another: its length, its CRC32C and, if it is to be `thorough`, its SHA-256."""

    def __init__(self, *, thorough: bool) -> None:
        self.size_bytes, self.crc32c = 0, 0
        self._sha256 = hashlib.sha256() if thorough else None

    @classmethod
    def of(cls, source: Source, *, thorough: bool) -> Sums:
        """Those of a file."""
        sums = cls(thorough=thorough)
        buffer = memoryview(bytearray(1 << 20))  # it stays in the processor's cache
        while count := source.readinto(buffer):
            sums.add(buffer[:count])
        return sums

    def add(self, data: memoryview) -> None:
        """More bytes of the file."""
        self.size_bytes += len(data)
        if data:
            self.crc32c = crc32c_at(np.frombuffer(data, np.uint8).ctypes.data, len(data), self.crc32c)
        if self._sha256 is not None:
            self._sha256.update(data)

    @property
    def sha256(self) -> str | None:
        """In digits; None if it was not asked for."""
        return self._sha256.hexdigest() if self._sha256 is not None else None


@dataclass(frozen=True)
class Place:
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def places(source: Source, name: str, size_bytes: int) -> dict[str, Place]:
    """What the header of a file of so many bytes says; an odd one is refused, even if it is what was saved."""
    try:
        length = int.from_bytes(_exactly(source, 8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(_exactly(source, length))
        found = {}
        for key, entry in header.items():
            if key != "__metadata__":
                shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
                place = Place(DTYPES[entry["dtype"]], shape, 8 + length + begin)
                if end - begin != whole(shape).elements * place.dtype.itemsize:
                    raise ValueError(f"{key} has {end - begin} bytes")
                if begin < 0 or 8 + length + end > size_bytes:
                    raise ValueError(f"{key} is not within the file")
                found[key] = place
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a safetensors file: {reason(error)}") from error


def read_box(source: Source, place: Place, box: Box, into: Tensor) -> None:
    """Fill `into`, of the file's type and contiguous, with a box of a stored tensor (offsets within what is stored)."""
    # Bytes are read in stretches: the box's whole rows of the last dimensions that it takes whole, at least.
    shape, size = place.shape, place.dtype.itemsize
    inner = len(shape)
    while inner > 0 and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    # Dimensions from `inner` on are whole; the one before it is a stretch of them.
    outer = max(inner - 1, 0)
    strides = [whole(shape[dim + 1 :]).elements for dim in range(len(shape))]
    stretch_bytes = whole(box.sizes[outer:]).elements * size
    target = memory(into)
    for number in range(whole(box.sizes[:outer]).elements):
        at, rest = 0, number
        for dim in reversed(range(outer)):
            rest, index = divmod(rest, box.sizes[dim])
            at += (box.offsets[dim] + index) * strides[dim]
        if shape:
            at += box.offsets[outer] * strides[outer]
        source.seek(place.begin + at * size)
        _fill(source, target[number * stretch_bytes : (number + 1) * stretch_bytes])


def _exactly(source: Source, count: int) -> bytes:
    data = bytearray(count)
    _fill(source, memoryview(data))
    return bytes(data)


def _fill(source: Source, target: memoryview) -> None:
    while target:
        count = source.readinto(target[: 64 << 20])
        if not count:
            raise ValueError("the file ends too early")
        target = target[count:]
