"""Writing a checkpoint that was planned: every rank its file, then the manifest, then it exists.

Ranks that see the folder of rank 0 write into it. Whether they do is found by trying: rank 0 leaves a file with a nonce
there. Those that do not see it send their file to rank 0, which writes it for them: no shared file system is assumed,
and one that is there is used. All workers return when the checkpoint is whole, or all of them raise the same error.
"""

from __future__ import annotations

import importlib.metadata
import platform
import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, cast

import torch
from torch import Tensor

from argosy._native import copy_around
from argosy.checkpoint import shard
from argosy.checkpoint.agree import on_first, patiently, together
from argosy.checkpoint.boxes import Box, whole
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.manifest import FileEntry, Manifest, Piece, TensorEntry
from argosy.checkpoint.plan import Planned
from argosy.checkpoint.steps import prune, step_name, step_of, steps_in
from argosy.checkpoint.storage import Storage
from argosy.comm.engine import EngineGroup
from argosy.comm.group import Group

_MESSAGE_BYTES: Final = 32 << 20
_ROUND: Final = 16  # messages between two signs of life to those that wait


@dataclass(frozen=True)
class Planning:
    """A checkpoint that is to be written: what it says, and what of it this rank writes."""

    storage: Storage
    step: int
    strategy: str
    keep: int | None
    parts: dict[str, Any]
    tensors: dict[str, Planned]
    mine: list[shard.Entry]


def key_of(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """What a piece is called in its file: the tensor's name, with the box if it is not the whole tensor."""
    return name if box == whole(shape) else f"{name}{box}"


def write(planning: Planning, group: Group) -> str:
    """Write a checkpoint; returns its folder's full name."""
    storage, folder = planning.storage, step_name(planning.step)
    told = on_first(group, lambda: _begin(storage, folder, group.size))
    aside, nonce = told["aside"], told["nonce"]
    try:
        seen = together(group, lambda: _sees(storage, aside, nonce, group))
        name = storage.shard_name(group.rank, nonce)

        def write_mine() -> Any:
            if not planning.mine:
                return None
            if not seen[group.rank]:
                return {"bytes": shard.layout(planning.mine)[2]}
            return _written(storage, f"{aside}/{name}", lambda sink: _pour(shard.stream(planning.mine), sink))

        files = patiently(group, write_mine)
        for rank in range(group.size):
            if not seen[rank] and files[rank] is not None:
                target = f"{aside}/{storage.shard_name(rank, nonce)}"
                entry = _relay(group, rank, files[rank]["bytes"], planning, storage, target)
                files[rank] = on_first(group, entry)
        on_first(group, lambda: _publish(planning, storage, aside, folder, nonce, files, group.size))
    except Exception:
        if group.rank == 0:
            storage.discard(aside, nonce)
        raise
    return storage.path(folder)


def _begin(storage: Storage, folder: str, size: int) -> dict[str, str]:
    nonce = secrets.token_hex(8)
    try:
        aside = storage.begin(folder, nonce)
        if size > 1:
            with storage.create(f"{aside}/probe-{nonce}") as sink:
                sink.write(memoryview(nonce.encode()))
    except OSError as error:
        raise _not_written(storage.path(folder), error) from error
    return {"aside": aside, "nonce": nonce}


def _sees(storage: Storage, aside: str, nonce: str, group: Group) -> bool:
    """Whether this rank has before it what rank 0 has."""
    if group.rank == 0:
        return True
    try:
        return storage.read(f"{aside}/probe-{nonce}") == nonce.encode()
    except OSError:
        return False


def _written(storage: Storage, name: str, pour: Callable[[shard.Hashed], None]) -> dict[str, Any]:
    """Write a file, and say how long it is and what it hashes to."""
    try:
        with storage.create(name) as sink:
            hashed = shard.Hashed(sink)
            try:
                pour(hashed)
            finally:
                sums = hashed.finish()
    except OSError as error:
        raise _not_written(storage.path(name), error) from error
    return {"bytes": sums.size_bytes, "sha256": sums.sha256, "crc32c": sums.crc32c}


def _pour(chunks: Any, sink: shard.Hashed) -> None:
    for chunk in chunks:
        sink.write(chunk)


def _relay(
    group: Group, source: int, size_bytes: int, planning: Planning, storage: Storage, target: str
) -> Callable[[], Any]:
    """Bring a file to rank 0, which writes it, from a rank that does not; returns what tells how that went."""
    engine = cast(EngineGroup, group)
    lengths = [min(_MESSAGE_BYTES, size_bytes - at) for at in range(0, size_bytes, _MESSAGE_BYTES)]
    result: dict[str, Any] = {}
    failure: Exception | None = None

    def receive(sink: shard.Hashed) -> None:
        for number, length in enumerate(lengths):
            data = torch.empty(length, dtype=torch.uint8)  # a new one each: the last may still be hashed
            _move(engine, number, lambda data=data: engine.receive(data, source))  # type: ignore[misc]
            received.append(number)
            sink.write(shard.memory(data))

    received: list[int] = []
    if group.rank == 0:
        try:
            result = _written(storage, target, receive)
        except CheckpointError as error:  # the sender goes on: take what it sends
            failure = error
            for number in range(len(received), len(lengths)):
                rest = torch.empty(lengths[number], dtype=torch.uint8)
                _move(engine, number, lambda rest=rest: engine.receive(rest, source))  # type: ignore[misc]
    elif group.rank == source:
        for number, message in enumerate(_messages(planning.mine)):
            _move(engine, number, lambda message=message: engine.send(message, 0))  # type: ignore[misc]
    else:
        for number in range(len(lengths)):
            _move(engine, number, lambda: None)

    def outcome() -> dict[str, Any]:
        if failure is not None:
            raise failure
        return result

    return outcome


def _move(group: EngineGroup, number: int, message: Callable[[], Any]) -> None:
    message()
    if number % _ROUND == _ROUND - 1:
        group.barrier()


def _messages(entries: list[shard.Entry]) -> Any:
    """A file's bytes in messages of one size, but the last."""
    buffer = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8)
    view, filled = shard.memory(buffer), 0
    for chunk in shard.stream(entries):
        while chunk:
            count = min(len(chunk), _MESSAGE_BYTES - filled)
            view[filled : filled + count] = chunk[:count]
            chunk, filled = chunk[count:], filled + count
            if filled == _MESSAGE_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _publish(
    planning: Planning, storage: Storage, aside: str, folder: str, nonce: str, files: list[Any], world: int
) -> None:
    names = [storage.shard_name(rank, nonce) for rank in range(world)]
    tensors = {
        name: TensorEntry(
            planned.dtype,
            planned.shape,
            tuple(Piece(box, names[rank], key_of(name, box, planned.shape)) for box, rank in planned.boxes),
        )
        for name, planned in planning.tensors.items()
    }
    manifest = Manifest(
        step=planning.step,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        world=world,
        strategy=planning.strategy,
        versions={
            "argosy": importlib.metadata.version("argosy"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        files={
            names[rank]: FileEntry(each["bytes"], each["sha256"], each["crc32c"])
            for rank, each in enumerate(files)
            if each is not None
        },
        tensors=tensors,
        parts=planning.parts,
    )
    try:
        if world > 1:
            storage.delete(f"{aside}/probe-{nonce}")
        storage.publish(aside, folder, manifest.to_bytes())
    except OSError as error:
        raise _not_written(storage.path(folder), error) from error
    later = [name for name in steps_in(storage) if (step_of(name) or 0) > planning.step]
    if later:
        warnings.warn(
            f"{storage.address} holds {', '.join(later)} beside the {folder} that was saved now: load() takes the "
            f"highest step; remove them, or save into another folder",
            stacklevel=2,
        )
    if planning.keep is not None:
        prune(storage, planning.keep, folder)


def _not_written(path: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} could not be written: {error}; checkpoints that were there before are still whole")


def snapshot(entries: list[shard.Entry], buffer: Tensor) -> tuple[list[shard.Entry], Tensor]:
    """Copies of tensors in one buffer, which is made anew only if it is too small."""
    sizes = [entry.tensor.numel() * entry.tensor.element_size() for entry in entries]
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // 64) * 64)  # each at a multiple of any element's size
    if buffer.numel() < places[-1]:
        buffer = torch.empty(places[-1], dtype=torch.uint8)
    copies = []
    for entry, place, size in zip(entries, places, sizes, strict=False):
        copy = buffer[place : place + size].view(entry.tensor.dtype).view(entry.tensor.shape)
        _copy(copy, entry.tensor)
        copies.append(shard.Entry(entry.key, copy))
    return copies, buffer


def _copy(copy: Tensor, tensor: Tensor) -> None:
    """Training waits for this: around the caches it takes half as long, and leaves them what training has there."""
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if plain:
        copy_around(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        copy.copy_(tensor)
