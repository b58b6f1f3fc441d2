"""The steps in a folder of checkpoints: `step-00000120`, newest first, and which of them are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from argosy.checkpoint.errors import CheckpointError, NoCheckpoint
from argosy.checkpoint.manifest import Manifest
from argosy.checkpoint.storage import MANIFEST, REPLACED, Storage, parent, storage_at

_STEP: Final = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})(" + re.escape(REPLACED) + r")?")


def step_name(step: int) -> str:
    """The folder of a step.

    >>> step_name(120)
    'step-00000120'
    """
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step that a folder is named for, also one that is being replaced.

    >>> step_of("step-00000120"), step_of("step-00000120.replaced"), step_of("notes")
    (120, 120, None)
    """
    found = _STEP.fullmatch(folder)
    return int(found[1]) if found else None


def steps_in(storage: Storage) -> list[str]:
    """The folders of steps, newest first."""
    by_step = _by_step(storage)
    return [by_step[step] for step in sorted(by_step, reverse=True) if storage.finished(by_step[step])]


def _by_step(storage: Storage) -> dict[int, str]:
    """The folder of each step. One that was being replaced counts if its replacement did not come."""
    found: dict[int, str] = {}
    for name in sorted(storage.names(), key=lambda name: name.endswith(REPLACED)):
        step = step_of(name)
        if step is not None:
            found.setdefault(step, name)
    return found


def find(path: str | Path) -> tuple[Storage, list[str], bool]:
    """What a path names: the storage, folders in it, newest first, and whether the path is that of one checkpoint."""
    try:
        storage = storage_at(path)
        if MANIFEST in storage.names():
            return storage, [""], True
        folder, name = parent(path)
        if (step := step_of(name)) is not None:
            above = storage_at(folder)
            if (there := _by_step(above).get(step)) is None:
                raise NoCheckpoint(f"no checkpoint at {path}: there is no such folder")
            return above, [there], True
        if folders := steps_in(storage):
            return storage, folders, False
    except OSError as error:
        raise CheckpointError(f"no checkpoint at {path}: {error}") from error
    raise NoCheckpoint(f"no checkpoint at {path}: it holds no step-00000000 folder or the like, and no {MANIFEST}")


def is_there(path: str | Path) -> bool:
    """Whether a path names a checkpoint, or a folder with any; whole or damaged."""
    try:
        find(path)
    except NoCheckpoint:
        return False
    return True


def read_manifest(storage: Storage, folder: str) -> tuple[bytes, Manifest]:
    """The manifest of a checkpoint, as bytes and as what they say."""
    name = f"{folder}/{MANIFEST}" if folder else MANIFEST
    try:
        data = storage.read(name)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {storage.path(folder)}: {MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{storage.path(name)} cannot be read: {error}") from error
    return data, Manifest.from_bytes(data, storage.path(name))


def looks_whole(storage: Storage, folder: str) -> bool:
    """Whether a checkpoint's manifest is right and its files are there; their content is not read."""
    try:
        _, manifest = read_manifest(storage, folder)
        sizes = {name: storage.size_bytes(f"{folder}/{name}") for name in manifest.files}
    except (CheckpointError, OSError):
        return False
    return all(sizes[name] == entry.size_bytes for name, entry in manifest.files.items())


def prune(storage: Storage, keep: int, saved: str) -> None:
    """Keep the last `keep` whole checkpoints, of which the one just saved is one; remove what is earlier than these.

    A damaged one among those that are kept stays: it counts for nothing, but may be all there is of its step.
    """
    kept = 1
    for folder in steps_in(storage):
        if folder == saved:
            continue
        if kept == keep:
            storage.remove(folder)
        elif looks_whole(storage, folder):
            kept += 1
