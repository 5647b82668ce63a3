"""How loader workers start. They import this module, so it stays light and without Lightning."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.context import BaseContext

PRELOADED = ("torch", "marey.training.workers")


def init_worker(_worker: int) -> None:
    """Leave Ctrl-C and SIGTERM to the main process, which finishes its step and then ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def worker_context(preload: Sequence[str]) -> BaseContext:
    """Processes that inherit no locks and no open readers: a fork server where there is one, else spawn.

    The server imports the heavy modules (``preload`` too) once; each worker then starts in milliseconds.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *preload])
    return context
