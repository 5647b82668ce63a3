"""Running benchmarks: each in a process of its own, its table on the screen, its numbers in a file.

    python -m benchmarks all --quick             every table in minutes, JSON in build/benchmarks/
    python -m benchmarks encoder_step            one benchmark, thoroughly
    python -m benchmarks list                    what there is
    python -m benchmarks tables build/benchmarks the tables of an earlier run, as Markdown

A benchmark that fails is named at the end with its last lines, the others still run, and the exit status is 1; one
that this machine lacks something for says so and is no failure. ``--quick`` gives every script its own --quick: fewer
repeats and sizes, which its table says. The folder gets NAME.json of each benchmark, with the machine it ran on, and
index.json: how each was started, how it ended, what it printed, and every aim held against what was measured.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aims import AIMS, Aim, judge
from catalogue import BENCHMARKS, HERE, Benchmark
from machine import CANNOT_RUN, describe_machine
from marey.core.files import write_json
from tables import markdown, number

OUT = Path("build/benchmarks")
LIMIT_S = 3600.0
"""Seconds after which a benchmark is stopped and counts as failed, so that one that hangs does not keep the others."""
LAST_LINES = 8


@dataclass
class Outcome:
    """How one benchmark went; ``status`` is done, failed or cannot run here."""

    name: str
    about: str
    command: str
    quick: bool
    started: str
    status: str = "done"
    reason: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """of it and of what it started: what it would come to on an idle core"""
    printed: str = ""


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the benchmark and whatever it started, unless its end was waited for.

    Until then its number, which is its group's, is nobody else's; what it left behind may still hold its output open.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(benchmark: Benchmark, out: Path, *, quick: bool, cuda: bool, limit: float = LIMIT_S) -> Outcome:
    """One benchmark in a process of its own, its output passed on as it comes; its JSON replaces ``out``'s."""
    words = benchmark.quick if quick else benchmark.arguments
    shown = f"{os.path.relpath(benchmark.script)} {' '.join(words)}".strip()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    outcome = Outcome(benchmark.name, benchmark.about, f"python {shown}", quick, started)
    result = out.resolve() / f"{benchmark.name}.json"
    result.unlink(missing_ok=True)
    if benchmark.cuda and not cuda:
        outcome.status, outcome.reason = "cannot run here", "it needs a CUDA device, and there is none"
        return outcome
    start, cpu, late = time.perf_counter(), _children_cpu(), threading.Event()
    lines = []
    with subprocess.Popen(
        [sys.executable, "-u", str(benchmark.script), *words, "--json", str(result)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
        start_new_session=True,  # so that it can be ended together with the processes it starts
    ) as process:

        def stop() -> None:
            if process.returncode is None:
                late.set()
                _end(process)

        timer = threading.Timer(limit, stop)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)  # an interrupted run leaves nothing behind
    outcome.seconds, outcome.cpu_seconds = round(time.perf_counter() - start, 1), round(_children_cpu() - cpu, 1)
    outcome.printed = "".join(lines)
    outcome.status, outcome.reason = _verdict(code, lines, result, late=limit if late.is_set() else None)
    return outcome


def _verdict(code: int, lines: Sequence[str], result: Path, *, late: float | None) -> tuple[str, str]:
    """Status and reason of a process that has ended."""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    if late is not None:
        return "failed", f"not done within {number(late)} s"
    if code == CANNOT_RUN:
        return "cannot run here", last.removeprefix("cannot run here: ")
    if code:
        return "failed", f"exit status {code}"
    if "machine" not in read_result(result):
        return "failed", f"it wrote no {result.name} with the machine's description"
    return "done", ""


def read_result(path: Path) -> dict[str, Any]:
    """A benchmark's JSON; empty where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def summary(outcomes: Sequence[Mapping[str, Any]], out: Path, aims: Sequence[Aim]) -> list[dict[str, str]]:
    """Every aim of these benchmarks' kind against what their JSON says."""
    done = {o["name"]: read_result(out / f"{o['name']}.json") for o in outcomes if o["status"] == "done"}
    reasons = {o["name"]: f"{o['status']}: {o['reason']}" for o in outcomes if o["status"] != "done"}
    return [verdict._asdict() for verdict in judge(aims, done, reasons)]


def show_aims(verdicts: Sequence[Mapping[str, str]]) -> str:
    keys = ("what", "aim", "measured", "verdict")
    return markdown(["", "aim", "measured", "met or not"], [[verdict[key] for key in keys] for verdict in verdicts])


def run_all(benchmarks: Sequence[Benchmark], out: Path, *, quick: bool, aims: Sequence[Aim]) -> int:
    """The exit status: 1 when a benchmark failed, 130 when stopped by Ctrl-C.

    The index is written after each benchmark; entries of others, from other runs into the same folder, stay in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    start, outcomes, stopped = time.perf_counter(), list[Outcome](), False
    own = {benchmark.name for benchmark in benchmarks}
    verdicts: list[dict[str, str]] = []
    for benchmark in benchmarks:
        print(f"\n## {benchmark.name}: {benchmark.about}\n", flush=True)
        try:
            outcome = run(benchmark, out, quick=quick, cuda=machine["accelerator"] is not None)
        except KeyboardInterrupt:
            stopped = True
            break
        if outcome.status == "cannot run here" and not outcome.printed:
            print(f"cannot run here: {outcome.reason}")
        outcomes.append(outcome)
        entries = [asdict(outcome) for outcome in outcomes]
        verdicts = summary(entries, out, [aim for aim in aims if aim.benchmark in own])
        others = [e for e in read_result(out / "index.json").get("benchmarks", []) if e["name"] not in own]
        everything = [*others, *entries]
        index = {"machine": machine, "benchmarks": everything, "aims": summary(everything, out, aims)}
        write_json(out / "index.json", index)
    if verdicts:
        print(f"\n## Aims\n\n{show_aims(verdicts)}")
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        print(f"\nFAILED {outcome.name}: {outcome.reason}; its command: {outcome.command}; its last lines:")
        print("".join(f"    {line}\n" for line in deque(outcome.printed.splitlines(), LAST_LINES)), end="")
    if stopped:
        print("\nstopped: the benchmark under way was ended and has no result")
    where = shlex.quote(str(out / "index.json"))
    took = f"{time.perf_counter() - start:.0f} s ({sum(outcome.cpu_seconds for outcome in outcomes):.0f} s of CPU)"
    print(f"\n{len(outcomes)} benchmark(s) in {took}; numbers in {where}", flush=True)
    return 130 if stopped else int(bool(failed))


def show_list(benchmarks: Sequence[Benchmark]) -> str:
    rows = []
    for benchmark in benchmarks:
        part = f"not in all: {benchmark.apart}" if benchmark.apart else "in all"
        rows.append([benchmark.name, benchmark.about, f"{part}; needs CUDA" if benchmark.cuda else part])
    return markdown(["name", "what", "part"], rows)


def show_tables(out: Path, aims: Sequence[Aim]) -> str:
    """What the run in ``out`` printed, as Markdown, and its aims read from its JSON files again."""
    index = read_result(out / "index.json")
    if not index:
        raise SystemExit(f"{out} has no index.json of a run; name the folder that `python -m benchmarks all` wrote")
    parts: list[str] = []
    for entry in index["benchmarks"]:
        ended = "" if entry["status"] == "done" else f"{entry['status']}: {entry['reason']}"
        said = [f"## {entry['name']}: {entry['about']}", f"`{entry['command']}`", ended, _as_markdown(entry["printed"])]
        parts += filter(None, said)
    verdicts = summary(index["benchmarks"], out, aims)
    return "\n\n".join([*parts, f"## Aims\n\n{show_aims(verdicts)}"])


def _as_markdown(printed: str) -> str:
    """With an empty line around each table, as a page wants it; output without tables as it stands."""
    lines = printed.strip().splitlines()
    if not any(line.startswith("|") for line in lines):
        return "\n".join(["```text", *lines, "```"]) if lines else ""
    spaced: list[str] = []
    for line in lines:
        if spaced and spaced[-1] and line and line.startswith("|") != spaced[-1].startswith("|"):
            spaced.append("")
        spaced.append(line)
    return "\n".join(spaced)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", help="all, list, tables, or the name of a benchmark")
    parser.add_argument("folder", nargs="?", type=Path, help="for tables: the folder of a run")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes: everything in under ten minutes")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"for the JSON (default {OUT})")
    return parser


def _stop(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main(words: Sequence[str] | None = None, *, table: Sequence[Benchmark] = BENCHMARKS) -> int:
    signal.signal(signal.SIGTERM, _stop)  # as Ctrl-C: the benchmark under way is ended with this process
    parser = build_parser()
    options = parser.parse_args(words)
    names = {benchmark.name: benchmark for benchmark in table}
    if options.folder is not None and options.what != "tables":
        parser.error(f"{options.what} takes no folder; --out {options.folder} says where the JSON goes")
    if options.what == "list":
        print(show_list(table))
        return 0
    if options.what == "tables":
        print(show_tables(options.folder or options.out, AIMS))
        return 0
    if options.what == "all":
        return run_all([b for b in table if not b.apart], options.out, quick=options.quick, aims=AIMS)
    if options.what not in names:
        near = difflib.get_close_matches(options.what, [*names, "all", "list", "tables"], n=1)
        hint = f"did you mean {near[0]}?" if near else "`python -m benchmarks list` names them"
        parser.error(f"there is no benchmark {options.what} in {os.path.relpath(HERE)}; {hint}")
    if names[options.what].command:
        parser.error(f"{options.what} measures no speed; run it by its own command: {names[options.what].command}")
    return run_all([names[options.what]], options.out, quick=options.quick, aims=AIMS)
