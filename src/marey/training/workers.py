"""How loader workers start. They import this module, so it stays light and without Lightning."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path

from marey.core import now

PRELOADED = ("torch", "marey.training.workers")
CLIP_MODULES = ("marey.pixels.dataset",)
"""What a worker that reads clips imports."""
LATENT_MODULES = ("marey.training.latent_batch", "marey.latents.dataset")
"""What a worker that reads latents imports."""
LEFT_TO_MAIN = (signal.SIGINT, signal.SIGTERM, *((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()))
"""A terminal, and a scheduler that ends a job, send these to every process of a run."""


def init_worker(worker: int, notes: Path | None = None) -> None:
    """Leave requests to stop to the main process, which finishes its step and then ends the workers.

    ``notes``: the folder where each worker tells, in a file of its number, what it is reading.
    """
    if notes is not None:
        now.tell(notes / str(worker))
    for number in LEFT_TO_MAIN:
        signal.signal(number, signal.SIG_IGN)


def worker_context(preload: Sequence[str]) -> BaseContext:
    """Processes that inherit no locks and no open readers: a fork server where there is one, else spawn.

    The server imports the heavy modules (``preload`` too) once; each worker then starts in milliseconds. A process
    has one such server: called before it is needed, it imports beside whatever this process does meanwhile.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *preload])
    _start_server()
    return context


def _start_server() -> None:
    """Start multiprocessing's own two processes with the signals blocked, which what they fork inherits.

    Were the server to die of one, its workers would count as dead. Blocked here and not ignored: one that arrives
    meanwhile reaches this process afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_MAIN)
    try:
        resource_tracker.ensure_running()  # it unblocks the two that it knows of
        signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_MAIN)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
