"""Where checkpoints are kept: a folder on a disk. `remote.py` has the same for URLs.

A checkpoint is whole or absent at every instant. On a disk its files are written into a folder aside and synced; then
that folder is renamed, and its parent synced. One that is replaced is moved away first, under a name that readers know
(`step-00000120.replaced`), so that a crash between the two leaves one of them.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Final, cast

from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.shard import Sink, Source

MANIFEST: Final = "manifest.json"
REPLACED: Final = ".replaced"
_ASIDE: Final = ".aside-"
_REMOVED: Final = "-removed"
_SYNC_FILE_RANGE_WRITE: Final = 2
_STRETCH_BYTES: Final = 64 << 20  # shorter ones cost more calls than they gain


class Storage(ABC):
    """A folder of checkpoints. Names in it are relative, with `/` between folder and file. Errors are OSErrors."""

    address: str

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """What is in a folder; nothing if there is none."""

    @abstractmethod
    def size_bytes(self, name: str) -> int:
        """How long a file is."""

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[Sink]:
        """A new file to write; it is safe against a crash of the machine when the block ends."""

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[Source]:
        """A file to read."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All of a small file."""

    @abstractmethod
    def begin(self, folder: str, nonce: str) -> str:
        """Make the folder in which the files of a new checkpoint are written; returns its name."""

    @abstractmethod
    def publish(self, aside: str, folder: str, manifest: bytes) -> None:
        """Let the checkpoint exist: its files are all there, and its manifest is the last thing to be written."""

    @abstractmethod
    def discard(self, aside: str, nonce: str) -> None:
        """Remove what a save that failed has written. Never fails."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Remove a checkpoint: from the first instant on it counts as absent. Its bytes may stay until `sweep`."""

    def sweep(self) -> None:  # noqa: B027 - where nothing is moved out of sight, there is nothing to do
        """Let go of the bytes of what was removed or replaced. Never fails."""

    def finished(self, folder: str) -> bool:
        """Whether a folder with the name of a step is a checkpoint, whole or damaged, and not one being written."""
        return True

    def path(self, name: str) -> str:
        """The full name of something in the folder, for people."""
        return f"{self.address}/{name}" if name else self.address

    def shard_name(self, rank: int, nonce: str) -> str:
        """What the file that a rank writes is called."""
        return f"rank{rank}.safetensors"


class _File:
    """An open file that takes all of what it is given, and lets the disk begin with it before all is there."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begin = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
        self._written = self._begun = 0

    def write(self, data: memoryview) -> None:
        while data:
            count = os.write(self._descriptor, data)
            data, self._written = data[count:], self._written + count
            if self._begin is not None and self._written - self._begun >= _STRETCH_BYTES:
                # Left to itself, the kernel would begin with the sync that ends the file.
                offset, length = ctypes.c_int64(self._begun), ctypes.c_int64(self._written - self._begun)
                self._begin(self._descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)
                self._begun = self._written


class Folder(Storage):
    """Checkpoints on a disk that this process sees."""

    def __init__(self, path: Path) -> None:
        self._root = path
        self.address = str(path)

    def names(self, folder: str = "") -> list[str]:
        """What is in a folder; nothing if there is none."""
        try:
            return sorted(os.listdir(self._root / folder))
        except FileNotFoundError:
            return []

    def size_bytes(self, name: str) -> int:
        """How long a file is."""
        return (self._root / name).stat().st_size

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """A new file to write, synced at the end."""
        descriptor = os.open(self._root / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            yield _File(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def open(self, name: str) -> Iterator[Source]:
        """A file to read."""
        with open(self._root / name, "rb", buffering=0) as stream:
            yield cast(IO[bytes], stream)  # type: ignore[misc]

    def read(self, name: str) -> bytes:
        """All of a small file."""
        return (self._root / name).read_bytes()

    def begin(self, folder: str, nonce: str) -> str:
        """Make the folder aside. Those of earlier saves that were killed are removed: nobody writes them any more."""
        make_folder(self._root)
        self._delete(_ASIDE)
        aside = f"{_ASIDE}{folder}-{nonce}"
        (self._root / aside).mkdir()
        return aside

    def publish(self, aside: str, folder: str, manifest: bytes) -> None:
        """Write the manifest, sync, rename, sync."""
        with self.create(f"{aside}/{MANIFEST}") as sink:
            sink.write(memoryview(manifest))
        sync_folder(self._root / aside)
        final, replaced = self._root / folder, self._root / (folder + REPLACED)
        if final.exists():
            if replaced.exists():
                shutil.rmtree(replaced)
            final.rename(replaced)
        (self._root / aside).rename(final)
        sync_folder(self._root)
        self.remove(replaced.name)

    def discard(self, aside: str, nonce: str) -> None:
        """Remove the folder aside."""
        shutil.rmtree(self._root / aside, ignore_errors=True)

    def delete(self, name: str) -> None:
        """Remove a file."""
        (self._root / name).unlink()

    def remove(self, folder: str) -> None:
        """Move a checkpoint out of sight, if it is there. To delete files takes a disk a while: see `sweep`."""
        with suppress(OSError):
            (self._root / folder).rename(self._root / f"{_ASIDE}{folder}{_REMOVED}")

    def sweep(self) -> None:
        """Delete what was moved out of sight."""
        self._delete(_ASIDE, _REMOVED)

    def _delete(self, begin: str, end: str = "") -> None:
        for name in self.names():
            if name.startswith(begin) and name.endswith(end):
                shutil.rmtree(self._root / name, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, that a crash of the machine does not take away again."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def storage_at(path: str | Path) -> Storage:
    """The storage that a path, or a URL that fsspec knows, names; from now on, whatever folder the script goes to."""
    text = str(path)
    if not text:
        raise CheckpointError("the path of a checkpoint is empty; give the folder that is to hold it")
    if "://" in text and not isinstance(path, Path):
        from argosy.checkpoint.remote import Remote

        return Remote(text)
    if isinstance(path, Path) and re.match(r"[a-z][a-z0-9+]+:/", text):
        raise CheckpointError(f"{text} was a URL before it became a Path; give it as text")
    return Folder(Path(path).absolute())


def parent(path: str | Path) -> tuple[str | Path, str]:
    """A path's folder, and its name there."""
    if "://" in str(path) and not isinstance(path, Path):
        folder, _, name = str(path).rstrip("/").rpartition("/")
        return folder, name
    return Path(path).absolute().parent, Path(path).absolute().name
