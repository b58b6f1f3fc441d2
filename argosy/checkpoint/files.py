"""A checkpoint on disk: a folder that is whole or absent, at every instant.

`manifest.json` names one safetensors file for each saved object, with its size and SHA-256, and holds what is not a
tensor. Files are written aside, synced, and named after their content; renaming the new manifest over the old one
is the moment at which the new checkpoint exists. Until then the old one is untouched, and afterwards its files,
which no manifest names any more, are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from argosy.checkpoint import tree

FORMAT = "argosy-checkpoint-1"
_FILE_NAME = re.compile(r"[A-Za-z0-9_]+-[0-9a-f]{16}\.safetensors")
_LEFT_OVER = re.compile(r"\.([A-Za-z0-9_]+\.safetensors|manifest\.json)\.tmp")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read: which one, why, and what to do."""


def write(folder: Path, states: dict[str, Any]) -> None:
    """Write the state of each named object, replacing the checkpoint that the folder held."""
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            _sync(folder.parent)
        parts = {name: _write_part(folder, name, state) for name, state in states.items()}
        manifest = json.dumps({"format": FORMAT, "sha256": _digest(parts), "parts": parts}, indent=1)
        aside = folder / ".manifest.json.tmp"
        aside.write_text(manifest, encoding="utf-8")
        _sync(aside)
        _sync(folder)  # the names in the manifest, before it counts
        aside.replace(folder / "manifest.json")
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written: {error}; what was there before is still whole"
        ) from error
    try:
        _sync(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} was written, but may not survive a crash of this machine: {error}") from error
    kept = {part["file"] for part in parts.values()}
    for file in folder.iterdir():
        if _LEFT_OVER.fullmatch(file.name) or (_FILE_NAME.fullmatch(file.name) and file.name not in kept):
            with suppress(OSError):  # the new checkpoint is whole: what is left over does no harm
                file.unlink()


def _write_part(folder: Path, name: str, state: Any) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    try:
        form = tree.split(state, tensors, "")
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    aside = folder / f".{name}.safetensors.tmp"
    aside.unlink(missing_ok=True)
    aside.touch()
    mode = aside.stat().st_mode  # as the user's umask has it; safetensors would keep the file from all others
    try:
        save_file(tree.storable(tensors), aside)
    except Exception as error:  # safetensors reports a full disk with an error of its own, not an OSError
        raise CheckpointError(f"{aside} could not be written: {error}; what was there before is still whole") from error
    aside.chmod(mode)
    _sync(aside)
    digest = _sha256(aside)
    file = f"{name}-{digest[:16]}.safetensors"
    aside.replace(folder / file)
    return {"file": file, "bytes": (folder / file).stat().st_size, "sha256": digest, "form": form}


def read(folder: Path) -> dict[str, Any]:
    """The state of each object in a checkpoint, after every byte was verified."""
    manifest = folder / "manifest.json"
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(f"{manifest} has the format {content['format']!r}; this version reads {FORMAT!r}")
        if content["sha256"] != _digest(content["parts"]):
            raise CheckpointError(f"{manifest} is damaged: it is not what was saved; use an earlier checkpoint")
        return {name: _read_part(folder, part) for name, part in content["parts"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint at {folder}: {error.filename} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{manifest} is not the manifest of a checkpoint: {error!r}") from error


def _read_part(folder: Path, part: dict[str, Any]) -> Any:
    if not _FILE_NAME.fullmatch(part["file"]):
        raise CheckpointError(f"{folder}/manifest.json names the file {part['file']!r}, which Argosy did not write")
    file = folder / part["file"]
    if file.stat().st_size != part["bytes"] or _sha256(file) != part["sha256"]:
        raise CheckpointError(f"{file} is damaged: it is not what was saved; use an earlier checkpoint")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error
    return tree.join(part["form"], tensors)


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
