"""What a worker process runs first: it ties itself to the launcher, then runs the user's script as `__main__`.

Started as `python -m argosy.launch.bootstrap script.py args...`. Two things differ from plain Python: the process
group dies when the launcher does, and an uncaught exception is told to the launcher, whole, before anything else
happens, so that the first failure can be shown first.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from argosy import _native
from argosy.observe.channel import Channel


def main() -> None:
    """Run the script named by the first argument."""
    script, *arguments = sys.argv[1:]
    channel = socket.socket(fileno=int(os.environ["ARGOSY_CHANNEL"]))
    channel.set_inheritable(False)
    _native.guard(channel.fileno())
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt as interrupt:
        sys.last_value = interrupt
        sys.exit(130)
    except SystemExit as request:
        if request.code:
            sys.last_value = request
            status = request.code if isinstance(request.code, int) else 1
            Channel(channel, time.monotonic).failure(f"it called sys.exit({request.code!r})", "", status)
        raise
    except Exception as error:
        sys.last_value = error
        report = "".join(traceback.format_exception(type(error), error, _from_script(error.__traceback__, script)))
        message = traceback.format_exception_only(error)[-1].strip()
        # Whoever misses a server tells it, but why it is gone, the server's own end says.
        echo = getattr(error, "echo", isinstance(error, _native.PsError))
        if not Channel(channel, time.monotonic).failure(message, report, status=1, secondary=echo):
            print(report, file=sys.stderr)
        sys.exit(1)
    finally:
        channel.detach()  # the descriptor lives as long as the process: the guard watches it


def _from_script(at: TracebackType | None, script: str) -> TracebackType | None:
    """The part of a traceback that begins in the script; all of the others' frames stay."""
    while at is not None and at.tb_frame.f_code.co_filename != script:
        at = at.tb_next
    return at


if __name__ == "__main__":
    main()
