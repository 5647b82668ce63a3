"""Everything that only a GPU can show, in one run of under 8 minutes: checks with their errors, timings with floors.

    python benchmarks/gpu.py --json gpu.json          # on one CUDA device
    python benchmarks/gpu.py --rehearse               # the same lines on a CPU, as small as they go
    python benchmarks/gpu.py --only attention --only resume

PASS and FAIL are of checks, each against the limit in its row; MEASURED rows cannot fail. A row that breaks (ERROR),
outlasts its budget (LATE) or lacks a package (ABSENT) does not stop the others. Exit code 1: a check failed, broke or
was late; 2: no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # as trainer.deterministic=true sets it, before cuBLAS starts

import torch

from gpu_attention import ATTENTION
from gpu_checks import CHECKS
from gpu_rows import FAILED, Place, Result, Row, run_rows
from gpu_runs import RUNS
from gpu_timings import TIMINGS
from machine import describe_machine, remark

LIMIT_S = 470.0
ROWS: list[Row] = [*ATTENTION, *CHECKS, *RUNS, *TIMINGS]


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value is None else str(value)


def line(result: Result) -> str:
    """One row of the table, on one line."""
    facts = ", ".join(f"{name} {shown(value)}" for name, value in result.numbers.items())
    return f"| {result.status} | {result.row.name} | {facts or result.said} | {result.seconds:.1f} |"


def chosen(names: Sequence[str]) -> list[Row]:
    """The rows whose name holds one of ``names`` (none given: all)."""
    return [row for row in ROWS if not names or any(name in row.name for name in names)]


def summary(results: Sequence[Result], seconds: float) -> str:
    """Counts by status, and the time of all."""
    counts = {status: sum(r.status == status for r in results) for status in dict.fromkeys(r.status for r in results)}
    return ", ".join(f"{count} {status}" for status, count in counts.items()) + f"; {seconds:.0f} s in all"


def failed(results: Sequence[Result]) -> list[Result]:
    """The checks that did not pass. A row for which a package is absent has shown nothing, good or bad."""
    return [result for result in results if result.row.check and result.status in FAILED]


def as_json(results: Sequence[Result], machine: dict[str, Any], seconds: float) -> str:
    rows = [
        {"name": r.row.name, "check": r.row.check, "status": r.status, "seconds": r.seconds, "numbers": r.numbers}
        | ({"said": r.said} if r.said else {})
        for r in results
    ]
    return json.dumps({"machine": machine, "seconds": seconds, "rows": rows}, indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU what exists there, at small sizes")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="rows whose name holds TEXT")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds for all rows together (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine's description")
    given = parser.parse_args(arguments)
    rows = chosen(given.only)
    if not rows:
        parser.error(f"no row's name holds {' or '.join(given.only)}")
    if not given.rehearse and not torch.cuda.is_available():
        print("gpu.py: this machine has no CUDA device; run it where there is one, or with --rehearse", file=sys.stderr)
        return 2
    place = Place(torch.device("cpu" if given.rehearse else "cuda"), small=given.rehearse)
    machine = describe_machine()
    device = "rehearsal on the CPU" if given.rehearse else machine["accelerator"]
    print(
        f"{device}; torch {machine['torch']}, float32 products {torch.get_float32_matmul_precision()}; {machine['cpu']}"
    )
    if note := remark(machine):
        print(note)
    print("\n| | row | numbers | s |\n|---|---|---|---|", flush=True)
    start = time.perf_counter()
    limit = given.limit if not given.rehearse else float("inf")
    results = run_rows(rows, place, limit=limit, show=lambda result: print(line(result), flush=True))
    seconds = time.perf_counter() - start
    print(f"\n{summary(results, seconds)}")
    for result in failed(results):
        print(f"{result.status}: {result.row.name}: {result.said or line(result)}")
    if given.json is not None:
        given.json.write_text(as_json(results, machine, seconds))
    return 1 if failed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
