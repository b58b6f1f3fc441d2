"""Reading a checkpoint: found, verified byte for byte, and then read in boxes, each rank what it needs and no more.

Ranks that see the files of rank 0 verify some of them each, and read for themselves. For the others rank 0 reads; what
most of the ranks want is sent once to all. All workers return, or all of them raise the same error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from argosy.checkpoint import shard
from argosy.checkpoint.agree import gather, on_first, patiently, together
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.manifest import FileEntry, Manifest
from argosy.checkpoint.pieces import Pieces
from argosy.checkpoint.steps import find, read_manifest
from argosy.checkpoint.storage import MANIFEST, Storage, storage_at
from argosy.comm.engine import EngineGroup
from argosy.comm.group import Group

_MESSAGE_BYTES: Final = 32 << 20


@dataclass(frozen=True)
class Opened:
    """A verified checkpoint: where it is, what it says, and which ranks see its files."""

    storage: Storage
    folder: str
    manifest: Manifest
    group: Group
    sees: list[bool]

    @property
    def address(self) -> str:
        """Its full name."""
        return self.storage.path(self.folder)


def damage(storage: Storage, folder: str, manifest: Manifest, files: list[str], *, thorough: bool = False) -> list[str]:
    """What is wrong with some of a checkpoint's files: a line for each that is not what was saved.

    `thorough` compares their SHA-256, too.
    """
    wrong = []
    for file in files:
        name = f"{folder}/{file}" if folder else file
        entry = manifest.files[file]
        try:
            with storage.open(name) as source:
                found = shard.Sums.of(source, thorough=thorough or entry.crc32c is None)
                if difference := _difference(found, entry):
                    wrong.append(f"{storage.path(name)} is damaged: {difference}")
                else:
                    wrong += _misplaced(source, storage.path(name), manifest, file)
        except FileNotFoundError:
            wrong.append(f"{storage.path(name)} is missing")
        except OSError as error:
            wrong.append(f"{storage.path(name)} cannot be read: {error}")
    return wrong


def _difference(found: shard.Sums, saved: FileEntry) -> str:
    if found.size_bytes != saved.size_bytes:
        return f"it has {found.size_bytes} bytes, and {saved.size_bytes} were saved"
    if saved.crc32c is not None and found.crc32c != saved.crc32c:
        return "its CRC32C is not that of what was saved"
    if found.sha256 is not None and found.sha256 != saved.sha256:
        return "its SHA-256 is not that of what was saved"
    return ""


def _misplaced(source: shard.Source, path: str, manifest: Manifest, file: str) -> list[str]:
    """Whether a file that is what was saved holds what the manifest says."""
    source.seek(0)
    try:
        found = shard.places(source, path, manifest.files[file].size_bytes)
    except CheckpointError as error:
        return [str(error)]
    for dtype, piece in manifest.pieces[file]:
        place = found.get(piece.key)
        if place is None or (place.dtype, place.shape) != (shard.DTYPES[dtype], piece.box.sizes):
            return [f"{path} does not hold {piece.key} as the manifest says"]
    return []


def open_checkpoint(path: str | Path, group: Group) -> Opened:
    """The checkpoint at a path, or the newest whole one in a folder of checkpoints."""
    address, folders, alone = on_first(group, lambda: _found(path))
    storage = storage_at(address)
    wrong: list[str] = []
    for folder in folders:
        opened, problems = _open(storage, folder, group)
        if opened is not None:
            return opened
        if alone:
            raise CheckpointError(f"{problems[0]}; use an earlier checkpoint")
        wrong.append(problems[0])
        if group.rank == 0:
            warnings.warn(f"{problems[0]}; the checkpoint before it is tried", stacklevel=2)
    raise CheckpointError(f"no whole checkpoint at {path}: {'; '.join(wrong)}")


def _found(path: str | Path) -> tuple[str, list[str], bool]:
    storage, folders, alone = find(path)
    return storage.address, folders, alone


def _open(storage: Storage, folder: str, group: Group) -> tuple[Opened | None, list[str]]:
    """A verified checkpoint, or what is wrong with it."""
    mine: list[bytes] = []

    def first() -> str:
        try:
            mine.append(read_manifest(storage, folder)[0])
        except CheckpointError as error:
            return str(error)
        return ""

    if problem := on_first(group, first):
        return None, [problem]
    data = group.broadcast_bytes(mine[0] if group.rank == 0 else None)
    name = f"{folder}/{MANIFEST}" if folder else MANIFEST

    def sees() -> bool:
        try:
            return group.rank == 0 or storage.read(name) == data
        except OSError:
            return False

    seen = together(group, sees)
    manifest = Manifest.from_bytes(data, storage.path(name))
    seeing = [rank for rank in range(group.size) if seen[rank]]
    loads = dict.fromkeys(seeing, 0)
    files: dict[int, list[str]] = {rank: [] for rank in range(group.size)}
    for file, entry in sorted(manifest.files.items(), key=lambda each: (-each[1].size_bytes, each[0])):
        rank = min(seeing, key=lambda rank: (loads[rank], rank))
        files[rank].append(file)
        loads[rank] += entry.size_bytes
    told = patiently(group, lambda: damage(storage, folder, manifest, files[group.rank]))
    if problems := [problem for problems in told for problem in problems]:
        return None, sorted(problems)
    return Opened(storage, folder, manifest, group, seen), []


@dataclass(frozen=True)
class Request:
    """A tensor of the checkpoint, and where it is to be put."""

    name: str
    target: Pieces


def fill(opened: Opened, requests: list[Request]) -> None:
    """Read what every rank asks for into its place."""
    group, blind = opened.group, [rank for rank, sees in enumerate(opened.sees) if not sees]

    def read() -> None:
        if opened.sees[group.rank]:
            with Reader(opened) as reader:
                for request in sorted(requests, key=lambda request: reader.position(request.name)):
                    for box, view in request.target.parts:
                        reader.read(request.name, box, view)

    patiently(group, read)
    if blind:
        asked = [
            [request.name, box.offsets, box.sizes]
            for request in requests
            for box, _ in request.target.parts
            if group.rank in blind
        ]
        _serve(opened, requests, gather(group, asked))


class Reader:
    """The files of a checkpoint, open."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._stack = ExitStack()
        self._files: dict[str, tuple[shard.Source, dict[str, shard.Place]]] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def position(self, name: str) -> tuple[str, int]:
        """Where a tensor's first piece is: files are read from front to back."""
        pieces = self._opened.manifest.tensors[name].pieces
        if not pieces:
            return "", 0
        return pieces[0].file, self._file(pieces[0].file)[1][pieces[0].key].begin

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Fill a tensor with a box of a stored one. Types are converted as `copy_` does."""
        for piece in self._opened.manifest.tensors[name].pieces:
            part = box.overlap(piece.box)
            if part is None:
                continue
            source, places = self._file(piece.file)
            place = places[piece.key]
            target = into[part.within(box)] if box.sizes else into
            inner = Box(tuple(a - b for a, b in zip(part.offsets, piece.box.offsets, strict=True)), part.sizes)
            direct = target.dtype == place.dtype and target.device.type == "cpu" and target.is_contiguous()
            direct = direct and not (target.is_conj() or target.is_neg())  # whose bytes are not its values
            room = target if direct else torch.empty(part.sizes, dtype=place.dtype)
            try:
                shard.read_box(source, place, inner, room)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self._opened.address}/{piece.file} cannot be read: {error}") from error
            if not direct:
                target.copy_(room)

    def _file(self, file: str) -> tuple[shard.Source, dict[str, shard.Place]]:
        if file not in self._files:
            name = f"{self._opened.folder}/{file}" if self._opened.folder else file
            try:
                source = self._stack.enter_context(self._opened.storage.open(name))
            except OSError as error:
                raise CheckpointError(f"{self._opened.storage.path(name)} cannot be read: {error}") from error
            size_bytes = self._opened.manifest.files[file].size_bytes
            self._files[file] = source, shard.places(source, self._opened.storage.path(name), size_bytes)
        return self._files[file]


def _serve(opened: Opened, requests: list[Request], asked: list[Any]) -> None:
    """Rank 0 reads for the ranks that do not see the files."""
    group = cast(EngineGroup, opened.group)
    wanted: dict[tuple[str, Box], list[int]] = {}
    for rank, boxes in enumerate(asked):
        for name, offsets, sizes in boxes:
            wanted.setdefault((name, Box(tuple(offsets), tuple(sizes))), []).append(rank)
    mine = {(request.name, box): view for request in requests for box, view in request.target.parts}
    failure: Exception | None = None
    moved_bytes = 0
    with Reader(opened) as reader:
        for (name, box), ranks in wanted.items():
            data = torch.empty(box.sizes, dtype=shard.DTYPES[opened.manifest.tensors[name].dtype])
            if group.rank == 0 and failure is None:
                try:
                    reader.read(name, box, data)
                except Exception as error:  # the others must not wait for it
                    failure = error
            _spread(group, data, ranks)
            if group.rank in ranks:
                mine[name, box].copy_(data)
            moved_bytes += data.numel() * data.element_size()
            if moved_bytes > 16 * _MESSAGE_BYTES:  # a sign of life to those that wait
                group.barrier()
                moved_bytes = 0
    together(group, _raising(failure))


def _spread(group: EngineGroup, data: Tensor, ranks: list[int]) -> None:
    flat = data.reshape(-1).view(torch.uint8)
    for message in flat.split(_MESSAGE_BYTES):
        if 2 * len(ranks) > group.size:
            group.broadcast(message)
        elif group.rank == 0:
            for rank in ranks:
                group.send(message, rank)
        elif group.rank in ranks:
            group.receive(message, 0)


def _raising(failure: Exception | None) -> Callable[[], None]:
    def check() -> None:
        if failure is not None:
            raise failure

    return check
