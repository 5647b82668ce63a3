"""A request to end (SIGTERM) as Ctrl-C, for commands whose work is safe to leave at any point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt within; what handled it before does so again after. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
