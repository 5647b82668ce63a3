"""Ctrl-C, SIGTERM and SIGUSR1 as a request: finish the step, save, end. A second Ctrl-C means now."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

FROM_SCHEDULERS = (signal.SIGTERM, *((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()))
"""SIGTERM when a job is ended; SIGUSR1 where it asked to be told some time before (SLURM's ``--signal=USR1@120``)."""
SIGNALS = (signal.SIGINT, *FROM_SCHEDULERS)
ABORTED = "stopped at once by a second request; work since the last checkpoint is lost"


class StopRequest:
    """Whether someone asked the run to stop. ``with StopRequest(say):`` listens; leaving restores what listened.

    Lightning installs handlers of its own when training begins, one of which broadcasts from inside the handler;
    ``listen`` is called again then, and its own are the ones that stay. One inside another takes over what that one
    has heard: a process that a scheduler stops while it is still importing and opening data is no failed one.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        forward: Callable[[int], None] | None = None,
        *,
        signals: Sequence[signal.Signals] = SIGNALS,
    ) -> None:
        self.requested: str | None = None
        self.before_training = False
        """Ctrl-C came to the one around this one: a person waits, and no step has been made."""
        self.aborted = False
        self.forward = forward
        """Passes the signal on to the ranks this process started."""
        self._say, self._signals = say, signals
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if _in_main_thread():
            self._before = {number: signal.getsignal(number) for number in self._signals}
        self.listen()
        for handler in self._before.values():
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, StopRequest) and outer.requested is not None:
                self.requested = outer.requested
                self.before_training = outer.requested == signal.SIGINT.name
        return self

    def listen(self) -> None:
        """Handle the signals from here on (only the main thread may)."""
        if _in_main_thread():
            for number in self._signals:
                signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is not None and number == signal.SIGINT:
            self.aborted = True
            raise KeyboardInterrupt(ABORTED)
        if self.requested is None:
            self.requested = name
            what = "Ctrl-C" if number == signal.SIGINT else name
            self._say(f"{what}: finishing this step and saving; once more Ctrl-C stops at once")
            if self.forward is not None and number != signal.SIGINT:
                # A terminal sends Ctrl-C to every process; what a scheduler sends reaches this one alone.
                self.forward(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
