"""A decoding process: takes one file at a time from its parent, and says how far it is. See ``pixels.pool``."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import av

from marey.core.errors import UserError
from marey.pixels.media import Unreadable

TICK_S = 0.25
ORPHAN_CHECK_S = 0.5


def _follow(parent: int) -> None:
    """End with the parent, even inside a decoder that never returns (it holds no lock of Python's)."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Ticker:
    """Forwards progress at most every ``TICK_S`` seconds."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._last = pipe, 0.0

    def __call__(self, frames: int, fraction: float) -> None:
        now = time.monotonic()
        if now - self._last >= TICK_S:
            self._last = now
            self._pipe.send(("tick", (frames, fraction)))


def main(fd: int, parent: int, job: str) -> None:
    """Serve tasks from the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _follow(parent)
    # FFmpeg's log holds the particular reason ("moov atom not found"); it belongs in the report, not on stderr.
    logger = logging.getLogger("libav")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    av.logging.set_level(av.logging.ERROR)
    module, name = job.split(":")
    function = getattr(importlib.import_module(module), name)
    # A pipe that breaks means that the parent is gone: nobody is left to tell.
    with Connection(fd) as pipe, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        pipe.send(("ready", None))
        while True:
            pipe.send(_answer(function, pipe.recv(), _Ticker(pipe)))


def _answer(function: Callable[..., Any], payload: Any, tick: Callable[[int, float], None]) -> tuple[str, Any]:
    try:
        return "done", function(payload, tick)
    except Unreadable as error:
        return "refused", (str(error), True)
    except UserError as error:
        return "fatal", str(error)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # a file odd enough to trip our own code is refused like any other
        return "refused", (f"reading it failed with {type(error).__name__}: {error}", False)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
