"""The `argosy` command: its subcommands and how their errors are shown."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from argosy.cli import doctor, inspect, run, secret, simulate
from argosy.config import ConfigError

app = typer.Typer(
    help="Distributed PyTorch training of any kind, with a few changed lines.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command()(doctor.doctor)
app.command()(inspect.inspect)
app.command()(secret.secret)
app.command()(simulate.simulate)


@app.callback()
def commands(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Distributed PyTorch training of any kind, with a few changed lines."""
    if version:
        typer.echo(f"argosy {importlib.metadata.version('argosy')}")
        raise typer.Exit


def main() -> None:
    """Run the command line; a mistake of the user's is one line on stderr and status 2."""
    try:
        app()
    except (ConfigError, run.LaunchError) as error:
        print(f"argosy: error: {error}", file=sys.stderr)
        sys.exit(2)
