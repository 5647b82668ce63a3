"""What a check found, when a run would have found it out, and how both are put into lines."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import TracebackType
from typing import Any

from marey.core.progress import duration

PLAIN_WIDTH = 80
NAME_WIDTH = 14


class Status(Enum):
    """How a check ended; the value is what is printed."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


class Cost(IntEnum):
    """When a run would find out by itself. In order: what would cost the most time comes first."""

    LATE = 0
    THROUGHOUT = 1
    FIRST_BATCHES = 2
    START = 3

    @property
    def says(self) -> str:
        """The same in words."""
        return (
            "would show hours into a run",
            "would cost a run at every step",
            "would show at a run's first batches",
            "would show at a run's start",
        )[self]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    status: Status
    found: str
    """What is the case, in a line."""
    cost: Cost
    remedy: str | None = None
    """What to do about it; given exactly where ``status`` is not OK."""
    subject: str = ""
    """Which of several data it is about; ``found`` says it too."""

    def __post_init__(self) -> None:
        assert (self.remedy is None) == (self.status is Status.OK), self


def ok(name: str, found: str, cost: Cost) -> Finding:
    """A finding that asks for nothing."""
    return Finding(name=name, status=Status.OK, found=found, cost=cost)


def warn(name: str, found: str, cost: Cost, remedy: str) -> Finding:
    """A run would go on, and not as it could."""
    return Finding(name=name, status=Status.WARN, found=found, cost=cost, remedy=remedy)


def fail(name: str, found: str, cost: Cost, remedy: str) -> Finding:
    """A run would stop."""
    return Finding(name=name, status=Status.FAIL, found=found, cost=cost, remedy=remedy)


def refused(name: str, sentence: str, cost: Cost, *, remedy: str) -> Finding:
    """A refusal's own sentence as a finding: ``what is wrong; what to do``, else ``remedy``."""
    found, mark, advice = " ".join(sentence.split()).rpartition("; ")
    return fail(name, found if mark else advice, cost, advice.rstrip(".") if mark else remedy)


def by_cost(findings: Sequence[Finding]) -> list[Finding]:
    """What asks for something: failures first, then warnings, each with the costliest to find out late first."""
    asking = [finding for finding in findings if finding.status is not Status.OK]
    return sorted(asking, key=lambda finding: (finding.status is Status.WARN, finding.cost))


def finding_text(finding: Finding, *, width: int) -> str:
    """``FAIL  cache         what was found``, wrapped with a hanging indent."""
    start = f"{finding.status.value:<6}{finding.name:<{NAME_WIDTH}}"
    return _wrapped(start, finding.found, width=width)


def remedy_text(finding: Finding, *, width: int) -> str:
    """``FAIL  cache         would show hours into a run; what to do``."""
    start = f"{finding.status.value:<6}{finding.name:<{NAME_WIDTH}}"
    about = f"{finding.subject}: " if finding.subject else ""
    return _wrapped(start, f"{about}{finding.cost.says}; {finding.remedy}", width=width)


def summary(findings: Sequence[Finding], *, seconds: float) -> str:
    """One sentence over all findings."""
    failing = [finding.name for finding in findings if finding.status is Status.FAIL]
    warning = sum(finding.status is Status.WARN for finding in findings)
    took = f"{len(findings)} {'check' if len(findings) == 1 else 'checks'} in {duration(seconds)}"
    warns = f"{warning} {'warning' if warning == 1 else 'warnings'}"
    if failing:
        names = ", ".join(dict.fromkeys(failing))
        count = f"{len(failing)} of {len(findings)} checks {'fails' if len(failing) == 1 else 'fail'} ({names})"
        return f"{count}{f', with {warns}' if warning else ''}; what to do stands above, costliest first"
    return f"{took}: nothing fails, {warns}." if warning else f"{took}: nothing stands in the way."


def _wrapped(start: str, text: str, *, width: int) -> str:
    lines = textwrap.wrap(
        text,
        width=width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


class Report:
    """Prints findings as they come, then what to do, costliest first: in colour on a terminal, plain elsewhere."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._start = time.monotonic()
        self._console: Any = None
        self._status: Any = None
        self._width = PLAIN_WIDTH

    def __enter__(self) -> Report:
        if sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False, soft_wrap=True)
            self._width = max(40, min(100, self._console.width))
            self._status = self._console.status("")
            self._status.start()
        return self

    def checking(self, name: str) -> None:
        """Say what is looked at now, where the line can be taken back."""
        if self._status is not None:
            self._status.update(f"checking {name}")

    def add(self, finding: Finding) -> None:
        """Print a finding at once."""
        self.findings.append(finding)
        self._print(finding, finding_text(finding, width=self._width))

    def close(self) -> str:
        """Print what to do about all that was found, and return the summary."""
        if self._status is not None:
            self._status.stop()
        asking = by_cost(self.findings)
        if asking:
            print("\nTo do, costliest first", flush=True)
            for finding in asking:
                self._print(finding, remedy_text(finding, width=self._width))
        print(flush=True)
        return summary(self.findings, seconds=time.monotonic() - self._start)

    def _print(self, finding: Finding, text: str) -> None:
        if self._console is None:
            print(text, flush=True)
            return
        from rich.text import Text

        styled = Text(text)
        colour = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}[finding.status]
        styled.stylize(colour, 0, len(finding.status.value))
        self._console.print(styled)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
