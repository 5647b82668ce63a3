"""What the rows of ``gpu.py`` have in common: where they run, what they find, and a clock over each of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Status = Literal["PASS", "FAIL", "ERROR", "LATE", "ABSENT", "MEASURED", "NEEDS CUDA"]
FAILED: tuple[Status, ...] = ("FAIL", "ERROR", "LATE")

SLOWER_CPU = 10
"""How many times its budget a row may take in a rehearsal."""


class Place(NamedTuple):
    """Where a row runs. ``small``: sizes at which a CPU rehearses it in a second or two."""

    device: torch.device
    small: bool

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def bf16(self) -> torch.autocast:
        """What ``trainer.precision=bf16-mixed`` does."""
        return torch.autocast(self.device.type, torch.bfloat16)

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def start_peak(self) -> None:
        if self.on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """The most memory allocated since ``start_peak``; None where nobody counts it."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.on_cuda else None

    def seconds(self, work: Callable[[], Any]) -> float:
        """Wall seconds until the device is done."""
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - start

    def taking_turns(self, works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
        """Median seconds of each, after one round to warm up; they take turns, so that all see the same device."""
        for work in works.values():
            self.seconds(work)
        found: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                found[name].append(self.seconds(work))
        return {name: sorted(values)[len(values) // 2] for name, values in found.items()}


class Found(NamedTuple):
    """``passed`` None: a measurement, which nobody can fail."""

    numbers: dict[str, Any]
    passed: bool | None = None


class Row(NamedTuple):
    name: str
    work: Callable[[Place], Found]
    seconds: float
    """budget; it is stopped there"""
    check: bool = True
    """whether the exit code depends on it"""
    on_cpu: bool = True
    """whether what it looks at exists on a CPU"""


class Result(NamedTuple):
    row: Row
    status: Status
    seconds: float
    numbers: dict[str, Any]
    said: str


def within(errors: dict[str, float], limit: float) -> Found:
    """Errors, all of which must be at most ``limit`` (NaN is not)."""
    return Found({**errors, "limit": limit}, all(error <= limit for error in errors.values()))


def worst(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest entry of ``b``."""
    a, b = (x.detach().double().cpu() for x in (a, b))
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))


def worst_gradient(a: torch.nn.Module, b: torch.nn.Module) -> float:
    """The largest difference of two models' gradients, over the largest entry of all of ``b``'s."""
    pairs = [(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True)]
    assert all((x is None) == (y is None) for x, y in pairs)
    both = [(x.double().cpu(), y.double().cpu()) for x, y in pairs if x is not None and y is not None]
    return float(max((x - y).abs().max() for x, y in both) / max(y.abs().max() for _, y in both))


class LateError(BaseException):
    """A row's time is up. Nothing that catches errors of its own kind catches this one."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def stop(_signal: int, _frame: Any) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_row(row: Row, place: Place, *, seconds: float) -> Result:
    """One row, whatever happens in it; stopped after ``seconds`` or its own budget."""
    if not (place.on_cuda or row.on_cpu):
        return Result(row, "NEEDS CUDA", 0.0, {}, "needs CUDA")
    budget, start = min(row.seconds if place.on_cuda else SLOWER_CPU * row.seconds, seconds), time.perf_counter()
    status: Status
    numbers: dict[str, Any] = {}
    said = ""
    try:
        if budget <= 0:
            raise LateError
        with _at_most(budget):
            found = row.work(place)
        numbers = found.numbers
        status = "MEASURED" if found.passed is None else "PASS" if found.passed else "FAIL"
    except LateError:
        status, said = "LATE", f"not done within {budget:.0f} s"
    except ModuleNotFoundError as error:
        status, said = "ABSENT", f"needs the package {error.name}"
    except Exception as error:
        status, said = "ERROR", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    if place.on_cuda:
        torch.cuda.empty_cache()
    return Result(row, status, time.perf_counter() - start, numbers, said)


def run_rows(rows: Sequence[Row], place: Place, *, limit: float, show: Callable[[Result], None]) -> list[Result]:
    """All rows in turn within ``limit`` seconds together, each shown when it is done."""
    start, results = time.perf_counter(), []
    for row in rows:
        result = run_row(row, place, seconds=limit - (time.perf_counter() - start))
        show(result)
        results.append(result)
    return results
