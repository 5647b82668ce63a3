"""Work on files that may hang or crash the decoder: child processes that are killed when they stall.

Children are started as ``python -m marey.pixels.child`` rather than through multiprocessing, so they never import
the user's main module, and begin in about a third of a second.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import marey
from marey.core.errors import MachineError, UserError

START_LIMIT_S = 120.0
FEWER = "try again with fewer at a time (--workers, or loader.num_workers)"
ASLEEP = 0.02
"""Share of a core below which a silent child counts as waiting for something, not for its turn on the CPU."""
MEASURABLE_S = 0.05
"""CPU seconds below which a count is no evidence: systems count in steps of a hundredth."""
STARVED = 4
"""How many times the stall limit a silent child that gets too little of the CPU may take."""


class Progressed(NamedTuple):
    """A file is being read: frames decoded so far, and the fraction of its bytes."""

    task: int
    frames: int
    fraction: float


class Finished(NamedTuple):
    """A job returned ``result``."""

    task: int
    result: Any


class Refused(NamedTuple):
    """A file gives nothing. ``lasting``: the file itself says so (else the decoder hung, died or tripped)."""

    task: int
    reason: str
    lasting: bool


Event = Progressed | Finished | Refused


def default_workers() -> int:
    """The CPUs this process may use."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@dataclass
class Child:
    """A decoding process and what it was last heard to do."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    ready: bool = False
    task: int | None = None
    since: float = field(default_factory=time.monotonic)
    """When it was last heard of, and the CPU seconds it had used by then."""
    used: float = 0.0

    def heard(self) -> None:
        """Its time without a word starts anew."""
        self.since, self.used = time.monotonic(), _cpu_seconds(self.process.pid)


def run_tasks(
    job: str, tasks: Iterable[tuple[int, dict[str, Any]]], *, workers: int, stall_s: float
) -> Iterator[Event]:
    """Run ``job`` (``"module:function"``, called as ``function(payload, tick)``) on every task.

    Events come as they happen, results in no particular order. A child from which no new frame is heard for
    ``stall_s`` seconds is killed, one that dies is noticed; either refuses its file and a new child takes over.
    On a busy machine a child that computes may take longer: until it has had ``stall_s`` seconds of the CPU, or
    ``STARVED`` times as long by the clock. A job's ``UserError`` (nothing to do with the file: a full disk, say)
    ends everything. However the iteration ends, no child outlives it.
    """
    waiting = iter(tasks)
    upcoming = deque(itertools.islice(waiting, workers))
    children: list[Child] = []
    try:
        while upcoming or any(child.task is not None for child in children):
            idle = sum(child.task is None for child in children)
            # All that have work to do start at once: each takes a third of a second before it is ready.
            for _ in range(min(len(upcoming) - idle, workers - len(children))):
                children.append(start_child(job))
            for child in children:
                if child.ready and child.task is None and upcoming:
                    child.task, payload = upcoming.popleft()
                    child.heard()
                    # A child that has just died is noticed below, and its task refused there.
                    with contextlib.suppress(OSError):
                        child.pipe.send(payload)
                    upcoming.extend(itertools.islice(waiting, 1))
            heard = {id(pipe) for pipe in wait([child.pipe for child in children], timeout=0.1)}
            for child in list(children):
                if id(child.pipe) in heard:
                    event = hear(child)
                elif child.ready:
                    event = stalled(child, stall_s)
                else:
                    event = late(child)
                if event is not None:
                    yield event
                if child.process.returncode is not None:
                    children.remove(child)
    finally:
        for child in children:
            end_child(child)


def start_child(job: str, *, inherit: Sequence[int] = ()) -> Child:
    """A new process for ``job``; it inherits the file descriptors ``inherit`` under the same numbers."""
    ours, theirs = multiprocessing.Pipe()
    home = str(Path(marey.__file__).parents[1])
    path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # -P: the current folder may hold an av.py. A session of its own: Ctrl-C is for the parent to handle.
    command = [sys.executable, "-P", "-m", "marey.pixels.child", str(theirs.fileno()), str(os.getpid()), job]
    with theirs:
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno(), *inherit],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return Child(process=process, pipe=ours)


def end_child(child: Child) -> int:
    """Kill it if it still runs; its exit code."""
    child.pipe.close()
    if child.process.poll() is None:
        child.process.kill()
    try:
        return child.process.wait(timeout=10)
    except subprocess.TimeoutExpired:  # stuck inside the kernel (a dead network disk): leave it behind
        child.process.returncode = -signal.SIGKILL
        return child.process.returncode


def hear(child: Child) -> Event | None:
    """Take one message. None where it is no event.

    Raises ``UserError`` for one that the job raised, ``MachineError`` where the child died before it was ready.
    """
    try:
        kind, value = child.pipe.recv()
    except (EOFError, OSError):
        code = end_child(child)
        if not child.ready:
            raise MachineError(
                f"a decoding process ended while it was starting ({_how(code)}); look at what it wrote above, or "
                f"whether memory ran out, and {FEWER}"
            ) from None
        if child.task is None:
            return None
        return Refused(child.task, f"the decoder died ({_how(code)})", lasting=False)
    child.heard()
    if kind == "ready":
        child.ready = True
        return None
    if kind == "fatal":
        raise UserError(value)
    assert child.task is not None
    task = child.task
    if kind == "tick":
        return Progressed(task, *value)
    child.task = None
    if kind == "refused":
        reason, lasting = value
        return Refused(task, reason, lasting)
    assert kind == "done"
    return Finished(task, value)


def stalled(child: Child, stall_s: float) -> Event | None:
    """The refusal of its file, the child being killed, where it has been silent for too long; else None."""
    silent = time.monotonic() - child.since
    if child.task is None or silent < stall_s:
        return None
    used = _cpu_seconds(child.process.pid) - child.used
    if max(ASLEEP * silent, MEASURABLE_S) < used < stall_s and silent < STARVED * stall_s:
        return None  # it computes and other programs take its time: the machine is slow, not the file
    end_child(child)
    return Refused(child.task, f"no new frame for {stall_s:g} s, so the decoder was stopped", lasting=False)


def late(child: Child) -> Event | None:
    """``MachineError`` where a child that is starting takes too long."""
    if time.monotonic() - child.since > START_LIMIT_S:
        end_child(child)
        raise MachineError(
            f"a decoding process did not start within {START_LIMIT_S:g} s: the machine is too busy, or its disk too "
            f"slow; {FEWER}"
        )
    return None


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _cpu_seconds(pid: int) -> float:
    """CPU time a process has used; 0 where the system does not say, which leaves the clock to decide."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time
    except (OSError, IndexError, ValueError):
        return 0.0
