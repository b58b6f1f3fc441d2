"""`argosy secret`: make the secret that the nodes of a job share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.control.secret import Secret


def secret(path: Annotated[Path, typer.Argument(help="The file to make; only its owner can read it.")]) -> None:
    """Write a new secret into a file, for `argosy run --secret-file` on every node of a job."""
    try:
        Secret.new().write(path)
    except OSError as error:
        typer.echo(f"argosy: error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"wrote {path}: copy it to each node, and keep it readable by its owner only")
