"""`argosy inspect`: look into a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer


def inspect(
    path: Annotated[str, typer.Argument(help="A folder of checkpoints, or one step's; a path or a URL.")],
    all_tensors: Annotated[bool, typer.Option("--all", help="List every tensor, not only the largest.")] = False,
) -> None:
    """Show what is in a checkpoint, and verify every file. The status is 1 if anything is damaged."""
    from argosy.cli.contents import show  # loads torch, which takes seconds that other commands need not wait

    show(path, all_tensors)
