"""What `argosy inspect` shows: what a checkpoint holds, and whether it is what was saved."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from argosy.checkpoint import tree
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.manifest import Manifest
from argosy.checkpoint.read import damage
from argosy.checkpoint.steps import find, read_manifest
from argosy.checkpoint.storage import MANIFEST, Storage
from argosy.cli.simulate import in_bytes

_LARGEST: Final = 20
_THREADS: Final = 4  # files are hashed beside each other; a disk has no use for more


def show(path: str, all_tensors: bool) -> None:
    """Show a folder of checkpoints, or one of them, and verify every file; exit with 1 if anything is damaged."""
    console = Console()
    try:
        storage, folders, alone = find(path)
        if not alone:
            _show_steps(console, storage, folders)
            return
        _, manifest = read_manifest(storage, folders[0])
    except CheckpointError as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    _show(console, storage.path(folders[0]), manifest, all_tensors)
    wrong = _damage(storage, folders[0], manifest)
    _tell(console, wrong)
    _tell_others(console, storage, folders[0], manifest)
    if wrong:
        raise typer.Exit(1)
    console.print(f"whole: the SHA-256 of {_count(len(manifest.files), 'file')} is right", highlight=False)


def _show_steps(console: Console, storage: Storage, folders: list[str]) -> None:
    """All checkpoints of a folder, and which of them are whole."""
    table = Table(title=escape(storage.address))
    for name in ("checkpoint", "saved (UTC)", "workers", "size", "state"):
        table.add_column(name, overflow="fold", no_wrap=True)
    wrong: list[str] = []
    read: list[tuple[str, Manifest]] = []
    for folder in folders:
        try:
            _, manifest = read_manifest(storage, folder)
        except CheckpointError as error:
            wrong.append(str(error))
            table.add_row(folder, "", "", "", "[red]damaged[/red]")
            continue
        found = _damage(storage, folder, manifest)
        wrong += found
        read.append((folder, manifest))
        table.add_row(
            folder,
            _time(manifest),
            str(manifest.world),
            in_bytes(_size_bytes(manifest)),
            "[red]damaged[/red]" if found else "whole",
        )
    console.print(table)
    _tell_strategies(console, read)
    _tell(console, wrong)
    for folder, manifest in read:
        _tell_others(console, storage, folder, manifest)
    if wrong:
        raise typer.Exit(1)


def _tell_strategies(console: Console, read: list[tuple[str, Manifest]]) -> None:
    """Below the table: in a pipe there are 80 columns, and a strategy may fill them."""
    for strategy, those in itertools.groupby(read, key=lambda one: one[1].strategy):
        first, *more = [folder for folder, _ in those]
        which = f"{first} to {more[-1]}" if more else first
        said = escape(f"strategy of {which}: {strategy or 'the defaults'}")
        console.print(said, highlight=False, soft_wrap=True)


def _show(console: Console, address: str, manifest: Manifest, all_tensors: bool) -> None:
    facts = Table(title=escape(address), show_header=False)
    facts.add_row("step", str(manifest.step))
    facts.add_row("saved", f"{_time(manifest)} UTC")
    facts.add_row("workers", str(manifest.world))
    facts.add_row("strategy", escape(manifest.strategy) or "the defaults")
    facts.add_row("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    facts.add_row("parts", escape(", ".join(manifest.parts)))
    for role in manifest.parts:
        if cursor := _cursor(manifest.parts[role]):
            facts.add_row(escape(role), cursor)
    facts.add_row("in all", f"{_count(len(manifest.tensors), 'tensor')}, {in_bytes(_size_bytes(manifest))}")
    console.print(facts)
    largest = sorted(manifest.tensors.items(), key=lambda each: (-each[1].size_bytes, each[0]))
    shown = largest if all_tensors else largest[:_LARGEST]
    table = Table(
        title="tensors" if len(shown) == len(largest) else f"the largest {len(shown)} tensors (--all for all)"
    )
    for name in ("name", "shape", "type"):
        table.add_column(name, overflow="fold")
    for name in ("pieces", "size"):
        table.add_column(name, justify="right")
    for name, entry in shown:
        shape = " x ".join(map(str, entry.shape)) or "a number"
        table.add_row(escape(name), shape, entry.dtype, str(len(entry.pieces)), in_bytes(entry.size_bytes))
    console.print(table)


def _damage(storage: Storage, folder: str, manifest: Manifest) -> list[str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda file: damage(storage, folder, manifest, [file], thorough=True), sorted(manifest.files))
        return [problem for problems in found for problem in problems]


def _tell(console: Console, wrong: list[str]) -> None:
    for line in wrong:
        console.print(f"[red]{escape(line)}[/red]", highlight=False, soft_wrap=True)


def _tell_others(console: Console, storage: Storage, folder: str, manifest: Manifest) -> None:
    """Files beside those of the checkpoint, which nobody has verified."""
    if others := [name for name in storage.names(folder) if name != MANIFEST and name not in manifest.files]:
        told = f"{storage.path(folder)} also holds what is no part of the checkpoint: {', '.join(others)}"
        console.print(escape(told), highlight=False, soft_wrap=True)


def _time(manifest: Manifest) -> str:
    return manifest.saved.removesuffix("+00:00").replace("T", " ")


def _cursor(form: Any) -> str | None:
    """Where a loader is, if it is one that was saved."""
    state = tree.join(form, lambda _: None)
    if not (isinstance(state, dict) and {"epoch", "samples"} <= state.keys()):
        return None
    all_of_it = f" of {state['dataset']}" if "dataset" in state else ""
    return f"epoch {state['epoch']}, {state['samples']}{all_of_it} samples trained"


def _size_bytes(manifest: Manifest) -> int:
    return sum(entry.size_bytes for entry in manifest.files.values())


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
