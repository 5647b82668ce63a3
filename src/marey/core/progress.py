"""Progress with a rate and a time left: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

PLAIN_INTERVAL_S = 10.0


def duration(seconds: float) -> str:
    """``75`` -> ``1m15s``; for people, not for parsing."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def amount(value: float, unit: str) -> str:
    """``1234567.0, "files"`` -> ``1,234,567``; megabytes keep one decimal."""
    return f"{value:,.1f}" if unit == "MB" else f"{value:,.0f}"


class Progress:
    """Count work done. ``with Progress("ingest", total=12, unit="files") as p: p.advance()``.

    ``total=None`` shows a count and a rate without a time left. Everything goes to stderr, so that
    stdout stays for results.
    """

    def __init__(self, label: str, *, total: float | None, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0.0
        self.note = ""
        self._start = self._last = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total, rate="", note="")
        return self

    def rate(self) -> float:
        """Units per second since the start."""
        return self.done / max(time.monotonic() - self._start, 1e-9)

    def advance(self, amount: float = 1, *, note: str | None = None) -> None:
        """Record ``amount`` more units done, with an optional short remark."""
        self.done += amount
        if note is not None:
            self.note = note
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, rate=f"{self.rate():.1f} {self.unit}/s", note=self.note)
        elif time.monotonic() - self._last >= PLAIN_INTERVAL_S:
            self._last = time.monotonic()
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """One plain line: how far, how fast, how long still."""
        rate = self.rate()
        text = f"{self.label}: {amount(self.done, self.unit)}"
        if self.total is not None:
            text += f" of {amount(self.total, self.unit)}"
        text += f" {self.unit}, {rate:.1f} {self.unit}/s"
        if self.total is not None and rate > 0:
            text += f", {duration((self.total - self.done) / rate)} left"
        return text + (f" ({self.note})" if self.note else "")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            print(
                f"{self.label}: {amount(self.done, self.unit)} {self.unit} "
                f"in {duration(time.monotonic() - self._start)}" + (f" ({self.note})" if self.note else ""),
                file=sys.stderr,
                flush=True,
            )
