"""The manifest of a checkpoint: which tensors it holds, in which pieces and files, and everything that is no tensor.

It is JSON with a SHA-256 of its own content and of every file: a checkpoint is what was saved, or it is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from argosy.checkpoint import tree
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.shard import DTYPES

FORMAT: Final = "argosy-checkpoint-2"
_FILE_NAME: Final = re.compile(r"rank[0-9]+(-[0-9a-f]+)?\.safetensors")


@dataclass(frozen=True)
class FileEntry:
    """A file: how long it is, and what it hashes to."""

    size_bytes: int
    sha256: str


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
            if outer["format"] != FORMAT:
                raise CheckpointError(f"{where} has the format {outer['format']!r}; this version reads {FORMAT!r}")
            content = outer["content"]
            if outer["sha256"] != _digest(content):
                raise CheckpointError(f"{where} is damaged: it is not what was saved; use an earlier checkpoint")
            files = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
            tensors = {name: _tensor(entry, files) for name, entry in content.pop("tensors").items()}
            for form in content["parts"].values():
                tree.join(form, tensors.__getitem__)
            for name in files:
                if not _FILE_NAME.fullmatch(name):
                    raise CheckpointError(f"{where} names the file {name!r}, which Argosy did not write")
            return cls(files=files, tensors=tensors, **content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} is not the manifest of a checkpoint: {error!r}") from error


def _tensor(entry: dict[str, Any], files: dict[str, FileEntry]) -> TensorEntry:
    pieces = []
    for offsets, sizes, file, key in entry["pieces"]:
        if file not in files:
            raise ValueError(f"the file {file!r} is not listed")
        pieces.append(Piece(Box(tuple(offsets), tuple(sizes)), file, key))
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"the type {entry['dtype']!r} is unknown")
    return TensorEntry(entry["dtype"], tuple(entry["shape"]), tuple(pieces))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
