"""`argosy run`: start a script on many workers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from argosy.control.client import CoordinatorError
from argosy.control.handshake import HandshakeError
from argosy.control.secret import Secret
from argosy.launch.launch import Launch
from argosy.launch.launcher import Launcher
from argosy.launch.nodes import NodesDisagree
from argosy.launch.screen import Screen
from argosy.strategy import ConfigError, Strategy

_HURRIED_SECONDS = 1.0


class LaunchError(RuntimeError):
    """A run that could not be started."""


def run(
    script: Annotated[str, typer.Argument(help="The training script.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed to the script.", show_default=False)] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", help="Workers on this node.")] = 1,
    servers: Annotated[int, typer.Option(help="Parameter servers on this node, for ps= in the strategy.")] = 0,
    nodes: Annotated[int, typer.Option(help="Machines in the job; start the same command on each.")] = 1,
    node_rank: Annotated[int, typer.Option(help="This machine's number, from 0.")] = 0,
    coordinator: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="An address of node 0.")] = None,
    strategy: Annotated[str | None, typer.Option(help='A line such as "data=4 batch=global", or a .toml file.')] = None,
    secret_file: Annotated[Path | None, typer.Option(help="The job's secret, the same on all nodes.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of each worker; by default its part of the cores.")
    ] = None,
    run_folder: Annotated[Path | None, typer.Option(help="For logs and events; by default a new one in runs/.")] = None,
) -> None:
    """Start SCRIPT on many workers.

    The script's own options follow it: argosy run --workers 4 train.py --epochs 3
    """
    try:
        launch = Launch(
            script=script,
            arguments=arguments or [],
            workers=workers,
            servers=servers,
            nodes=nodes,
            node_rank=node_rank,
            coordinator=coordinator,
            strategy=None if strategy is None else Strategy.load(strategy),
            secret=_secret(secret_file),
            threads=threads,
            run_folder=run_folder,
        )
        status = _run(launch)
    except ConfigError:
        raise
    except (OSError, ValueError, NodesDisagree, HandshakeError, CoordinatorError) as error:
        raise LaunchError(str(error)) from error
    raise typer.Exit(status)


def _run(launch: Launch) -> int:
    launch.check()
    screen = Screen()
    status = 2
    try:
        status = asyncio.run(Launcher(launch, screen).run())
    finally:
        # No worker is left: waiting for a slow reader harms nobody, unless the user wants to see the end of it.
        try:
            screen.close(_HURRIED_SECONDS if status > 128 else None)
        except KeyboardInterrupt:
            os._exit(130)
    return status


def _secret(file: Path | None) -> Secret | None:
    """The secret that the user gave, in a file or in ARGOSY_SECRET."""
    if file is not None:
        return Secret.read(file)
    if "ARGOSY_SECRET" in os.environ:
        return Secret.from_hex(os.environ["ARGOSY_SECRET"])
    return None
