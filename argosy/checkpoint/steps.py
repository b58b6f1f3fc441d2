"""The steps in a folder of checkpoints: `step-00000120`, newest first, and which of them are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.manifest import Manifest
from argosy.checkpoint.storage import MANIFEST, REPLACED, Storage, parent, storage_at

_STEP: Final = re.compile(r"step-([0-9]{8,})(" + re.escape(REPLACED) + r")?")


def step_name(step: int) -> str:
    """The folder of a step.

    >>> step_name(120)
    'step-00000120'
    """
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step that a folder is named for.

    >>> step_of("step-00000120"), step_of("notes")
    (120, None)
    """
    found = _STEP.fullmatch(folder)
    return int(found[1]) if found else None


def steps_in(storage: Storage) -> list[str]:
    """The folders of steps, newest first. One that was being replaced counts if its replacement did not come."""
    names = storage.names()
    found = [name for name in names if step_of(name) is not None and storage.finished(name)]
    current = [
        name for name in found if name.removesuffix(REPLACED) == name or name.removesuffix(REPLACED) not in names
    ]
    return sorted(current, key=lambda name: step_of(name) or 0, reverse=True)


def find(path: str | Path) -> tuple[Storage, list[str], bool]:
    """What a path names: the storage, folders in it, newest first, and whether the path is that of one checkpoint."""
    try:
        storage = storage_at(path)
        if MANIFEST in storage.names():
            return storage, [""], True
        folder, name = parent(path)
        if step_of(name) is not None:
            above = storage_at(folder)
            there = [each for each in (name, name + REPLACED) if each in above.names()]
            if not there:
                raise CheckpointError(f"no checkpoint at {path}: there is no such folder")
            return above, there[:1], True
        if folders := steps_in(storage):
            return storage, folders, False
    except OSError as error:
        raise CheckpointError(f"no checkpoint at {path}: {error}") from error
    raise CheckpointError(f"no checkpoint at {path}: it holds no step-00000000 folder or the like, and no {MANIFEST}")


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
    """Remove all but the last `keep` whole checkpoints, of which the one just saved is one."""
    kept = 1
    for folder in steps_in(storage):
        if folder == saved or not looks_whole(storage, folder):
            continue
        if kept < keep:
            kept += 1
        else:
            storage.remove(folder)
