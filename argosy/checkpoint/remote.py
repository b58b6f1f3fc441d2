"""Checkpoints at a URL, through fsspec: `s3://bucket/run`, `hdfs://...`, `gs://...`, `memory://...`.

Such stores have no rename that is atomic, but a file is there when it is closed, whole. So the files of a checkpoint
are written under names of their own, and the manifest last: a folder without one is no checkpoint, and writing a new
manifest over an old one replaces that checkpoint in an instant.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.shard import Sink, Source
from argosy.checkpoint.storage import MANIFEST, Storage


class Remote(Storage):
    """A folder that fsspec reaches."""

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/")
        try:
            core = importlib.import_module("fsspec.core")
            self._system, self._root = cast("tuple[Any, str]", core.url_to_fs(self.address))
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url} cannot be reached: {error}; install argosy[remote], and what fsspec needs for such URLs"
            ) from error
        self._root = self._root.rstrip("/")

    def names(self, folder: str = "") -> list[str]:
        """What is in a folder; nothing if there is none."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def size_bytes(self, name: str) -> int:
        """How long a file is."""
        return int(self._system.size(self._at(name)))

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """A new file to write; it is there when the block ends, and not if it fails."""
        stream = self._system.open(self._at(name), "wb")
        try:
            yield stream
        except BaseException:
            with suppress(Exception):  # the first failure is the one to tell
                stream.discard() if hasattr(stream, "discard") else stream.close()
            raise
        stream.close()

    @contextmanager
    def open(self, name: str) -> Iterator[Source]:
        """A file to read."""
        with self._system.open(self._at(name), "rb") as stream:
            yield stream

    def read(self, name: str) -> bytes:
        """All of a small file."""
        return bytes(self._system.cat_file(self._at(name)))

    def begin(self, folder: str, nonce: str) -> str:
        """Files go where they stay."""
        self._system.makedirs(self._at(folder), exist_ok=True)
        return folder

    def publish(self, aside: str, folder: str, manifest: bytes) -> None:
        """Write the manifest over the earlier one, if there was one, and then remove the files that only that named."""
        earlier = [name for name in self.names(folder) if name != MANIFEST and name.encode() not in manifest]
        self._system.pipe_file(self._at(f"{folder}/{MANIFEST}"), manifest)
        for name in earlier:
            with suppress(Exception):  # the new checkpoint is whole: what is left over does no harm
                self._system.rm_file(self._at(f"{folder}/{name}"))

    def discard(self, aside: str, nonce: str) -> None:
        """Remove the files of this save."""
        with suppress(Exception):
            for name in self.names(aside):
                if nonce in name:
                    self._system.rm_file(self._at(f"{aside}/{name}"))

    def delete(self, name: str) -> None:
        """Remove a file."""
        self._system.rm_file(self._at(name))

    def finished(self, folder: str) -> bool:
        """Whether its manifest is there."""
        return MANIFEST in self.names(folder)

    def remove(self, folder: str) -> None:
        """Remove the manifest, then the files."""
        with suppress(Exception):
            self._system.rm_file(self._at(f"{folder}/{MANIFEST}"))
            self._system.rm(self._at(folder), recursive=True)

    def shard_name(self, rank: int, nonce: str) -> str:
        """Files of different saves have different names, so that one never spoils another."""
        return f"rank{rank}-{nonce}.safetensors"

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root
