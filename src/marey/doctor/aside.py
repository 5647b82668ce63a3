"""Work that may hang, crash or take seconds to import, in a process beside this one that can be killed."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import marey
from marey.core.errors import UserError

ORPHAN_CHECK_S = 0.5
ASLEEP = 0.02
"""Share of a core below which a silent process waits for something else than its turn."""
STARVED = 4
DYING_S = 10.0
"""Seconds between closing its pipe and having an exit code, for a process that dies on a busy machine."""
WORDS = 300
"""Characters of an error that are passed on."""


class Broken(Exception):  # noqa: N818 (an answer, not a failure of ours)
    """The job raised; the text is its error, in a line."""


class Gone(Exception):  # noqa: N818
    """No answer: the process was killed at its time limit, or died. The text says which."""


class Aside:
    """Runs jobs one after another in a child process; a child that is killed or dies is replaced for the next job.

    A job is ``"module:function"``, called with one argument; argument and result are pickled. What it prints goes
    nowhere, except that the last line before a death is quoted.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._words: IO[bytes] | None = None

    def __enter__(self) -> Aside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, job: str, argument: Any = None, *, limit_s: float) -> Any:
        """The job's result. Raises ``Broken``, ``Gone``, or the job's own ``UserError``.

        A process that computes while other programs take its cores may take longer than ``limit_s``: until it has
        had as much time of a core, or ``STARVED`` times as long by the clock.
        """
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((job, argument))
            if not self._answers(limit_s):
                self._end()
                raise Gone(f"did not answer within {limit_s:g} s, so it was stopped")
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise Gone(self._last_words()) from None
        if kind == "refused":
            raise UserError(value)
        if kind == "broken":
            raise Broken(value)
        return value

    def _answers(self, limit_s: float) -> bool:
        assert self._pipe is not None
        assert self._process is not None
        start, before = time.monotonic(), _cpu_seconds(self._process.pid)
        if self._pipe.poll(limit_s):
            return True
        while (silent := time.monotonic() - start) < STARVED * limit_s:
            used = _cpu_seconds(self._process.pid) - before
            if not ASLEEP * silent < used < limit_s:
                return False
            if self._pipe.poll(min(1.0, limit_s)):
                return True
        return False

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        home = str(Path(marey.__file__).parents[1])
        path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)
        # -P: the current folder may hold a torch.py. A session of its own: Ctrl-C is for the parent to handle, and
        # what the child starts can be killed with it.
        command = [sys.executable, "-P", "-m", "marey.doctor.aside", str(theirs.fileno()), str(os.getpid())]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _end)
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                start_new_session=True,
            )
        self._pipe = ours

    def _last_words(self) -> str:
        said, self._words = self._words, None
        code = self._end(dying_s=DYING_S)  # first: an interpreter says why it ends after its pipes are closed
        words = ""
        if said is not None:
            with said:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
            words = f": {lines[-1].strip()[:WORDS]}" if lines else ""
        return f"ended its process ({signal.Signals(-code).name if code < 0 else f'exit code {code}'}){words}"

    def _end(self, *, dying_s: float = 0.0) -> int:
        """Kill the child and return its exit code; one that dies by itself has ``dying_s`` seconds to get its own."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if self._pipe is not None:
            self._pipe.close()
        if dying_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=dying_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # stuck inside the kernel (a dead network disk): leave it behind
            process.returncode = code = -signal.SIGKILL
        if self._words is not None:
            self._words.close()
        return code


def _cpu_seconds(pid: int) -> float:
    """Time of a core that a process has had; 0 where the system does not say, which leaves the clock to decide."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time
    except (OSError, IndexError, ValueError):
        return 0.0


def _follow(parent: int) -> None:
    """End with the parent, even inside a decoder that never returns."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _answer(job: str, argument: Any) -> tuple[str, Any]:
    try:
        module, name = job.split(":")
        return "done", getattr(importlib.import_module(module), name)(argument)
    except UserError as error:
        return "refused", str(error)
    except Exception as error:  # whatever a broken installation raises is the finding
        return "broken", f"{type(error).__name__}: {' '.join(str(error).split())}"[:WORDS]


def serve(fd: int, parent: int) -> None:
    """Answer jobs from the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _follow(parent)
    with Connection(fd) as pipe, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            pipe.send(_answer(*pipe.recv()))


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
