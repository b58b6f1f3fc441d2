"""The manifest of a checkpoint: which tensors it holds, in which pieces and files, and everything that is no tensor.

It is JSON with a SHA-256 of its own content and of every file: a checkpoint is what was saved, or it is refused. Files
have a CRC32C too, which notices what disks and networks do to bytes, and takes a tenth of the time: `load` goes by it,
`argosy inspect` by both. What the manifest says is checked here, once: those who use it need not doubt it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Final

from argosy.checkpoint import tree
from argosy.checkpoint.boxes import Box, tile
from argosy.checkpoint.errors import CheckpointError, reason
from argosy.checkpoint.shard import DTYPES

FORMAT: Final = "argosy-checkpoint-3"
_READABLE: Final = ("argosy-checkpoint-2", FORMAT)  # the earlier one has no CRC32C
_FILE_NAME: Final = re.compile(r"rank[0-9]+(-[0-9a-f]+)?\.safetensors")


@dataclass(frozen=True)
class FileEntry:
    """A file: how long it is, and what it hashes to. Earlier versions wrote no CRC32C."""

    size_bytes: int
    sha256: str
    crc32c: int | None = None


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, the file that holds it, and its name there."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as a whole, and its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Of all pieces."""
        return sum(piece.box.elements for piece in self.pieces) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is. `parts` holds the form (see `tree.py`) of each saved object."""

    step: int
    saved: str
    world: int
    strategy: str
    versions: dict[str, str]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    parts: dict[str, Any]

    @cached_property
    def pieces(self) -> dict[str, list[tuple[str, Piece]]]:
        """The type and place of all that each file holds."""
        found: dict[str, list[tuple[str, Piece]]] = {name: [] for name in self.files}
        for entry in self.tensors.values():
            for piece in entry.pieces:
                found[piece.file].append((entry.dtype, piece))
        return found

    def to_bytes(self) -> bytes:
        """The manifest's file."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["files"] = {name: asdict(entry) for name, entry in self.files.items()}
        plain["tensors"] = {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "pieces": [[piece.box.offsets, piece.box.sizes, piece.file, piece.key] for piece in entry.pieces],
            }
            for name, entry in self.tensors.items()
        }
        content = json.loads(json.dumps(plain))
        return json.dumps({"format": FORMAT, "sha256": _digest(content), "content": content}).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """The manifest that a file holds; `where` names the file."""
        try:
            outer = json.loads(data)
            if outer["format"] not in _READABLE:
                raise CheckpointError(f"{where} has the format {outer['format']!r:.40}; this version reads {FORMAT!r}")
            content = outer["content"]
            if outer["sha256"] != _digest(content):
                raise CheckpointError(f"{where} is damaged: it is not what was saved")
            files = {name: _file(name, entry) for name, entry in content.pop("files").items()}
            tensors = {name: _tensor(name, entry, files) for name, entry in content.pop("tensors").items()}
            manifest = cls(files=files, tensors=tensors, **content)
            manifest._check()
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} is not the manifest of a checkpoint: {reason(error)}") from error

    def _check(self) -> None:
        _number(self.step, "step", 0)
        _number(self.world, "world", 1)
        for name, text in (("saved", self.saved), ("strategy", self.strategy), *self.versions.items()):
            if not isinstance(text, str):
                raise ValueError(f"{name} is no text")
        named: set[str] = set()
        for form in self.parts.values():
            tree.join(form, named.add)
        if odd := sorted(named ^ set(self.tensors)):
            raise ValueError(f"the tensor {odd[0]} is {'not there' if odd[0] in named else 'no part of anything'}")


def _file(name: str, entry: dict[str, Any]) -> FileEntry:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"it names the file {name!r}, which Argosy did not write")
    file = FileEntry(**entry)
    _number(file.size_bytes, name, 0)
    if file.crc32c is not None and _number(file.crc32c, name, 0) >= 1 << 32:
        raise ValueError(f"{name}: {file.crc32c} is no CRC32C")
    return file


def _tensor(name: str, entry: dict[str, Any], files: dict[str, FileEntry]) -> TensorEntry:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name}: the type {entry['dtype']!r} is unknown")
    shape = tuple(_number(size, name, 0) for size in entry["shape"])
    pieces = []
    for offsets, sizes, file, key in entry["pieces"]:
        if file not in files:
            raise ValueError(f"{name}: the file {file!r} is not listed")
        box = Box(tuple(_number(at, name, 0) for at in offsets), tuple(_number(size, name, 1) for size in sizes))
        if any(at + size > length for at, size, length in zip(box.offsets, box.sizes, shape, strict=True)):
            raise ValueError(f"{name}: {box} is not within {list(shape)}")
        if not isinstance(key, str):
            raise ValueError(f"{name}: it has no name in {file}")
        pieces.append(Piece(box, file, key))
    if not tile([piece.box for piece in pieces], shape):
        raise ValueError(f"{name}: its pieces do not make up {list(shape)}")
    return TensorEntry(entry["dtype"], shape, tuple(pieces))


def _number(value: Any, name: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}: {value!r:.40} is no whole number from {least} on")
    return value


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
