"""Seconds against work: what a step costs as its tokens grow, beside the floor's growth.

    python benchmarks/growth.py --json growth.json
    python benchmarks/growth.py --part causal

step    seconds of the encoder's step (``encoder_step.py``) and of its floor for several numbers of clips at the
        recipe's token drop, a line fitted to each (milliseconds a thousand tokens, and a step's cost before its first
        token); then other drop rates, held against that line: longer views pay more for attention.
causal  seconds of the causal objective's packed step and of the matrix products of its Linear layers, for several
        numbers of samples of unequal length (those of ``batching.py``, 8x8).

All points of a part take turns; the fastest round of each is kept, since a line through medians would carry the other
programs' work. Memory against clips is in ``memory.py``, planning against clips in ``planner.py``, ingest against
workers in ``ingest.py``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import numpy as np
import torch

import batching
from encoder_step import build_encoder_objective, make_batch
from floor import block_products, make_floor, recorded_products
from machine import describe_machine, remark
from marey.batching.transport import LatentBatch, collate
from marey.config.compose import load_config
from marey.core.files import write_json
from marey.objectives.invariance import InvarianceObjective
from tables import markdown, number

DROP = 0.95


class Line(NamedTuple):
    """``fixed + slope * tokens``."""

    slope: float
    fixed: float


def fit(tokens: Sequence[float], values: Sequence[float]) -> Line:
    """Least squares."""
    slope, fixed = np.polyfit(tokens, values, 1)
    return Line(float(slope), float(fixed))


class Point(NamedTuple):
    """An amount of work: what it is called, its tokens, its step and the step's floor."""

    name: dict[str, Any]
    tokens: int
    step: Callable[[], object]
    floor: Callable[[], object]


def fastest(points: Sequence[Point], rounds: int) -> list[dict[str, Any]]:
    """Seconds of step and floor of each point: one round of warming up, then the fastest of ``rounds`` in turns."""
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in points]
    for _ in range(1 + rounds):
        for point, kept in zip(points, times, strict=True):
            for work, seconds in zip((point.floor, point.step), kept, strict=True):
                start = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - start)
    return [
        {**point.name, "tokens": point.tokens, "floor_seconds": min(floor[1:]), "step_seconds": min(step[1:])}
        for point, (floor, step) in zip(points, times, strict=True)
    ]


def encoder_point(objective: InvarianceObjective, size: str, clips: int, drop: float) -> Point:
    config = load_config([f"model.name={size}", f"model.token_drop_rate={drop}"])
    chunk, _ = make_batch(config, clips, whole=False)

    def step() -> None:
        objective.zero_grad(set_to_none=True)
        torch.autograd.backward(objective.forward_train_batch([chunk], micro_step=0).loss)

    groups = (chunk.views_global, chunk.views_local)
    tokens = sum(g.patches.shape[0] * (1 + g.patches.shape[1]) for g in groups)
    floor = make_floor(block_products(objective.encoder.embed_dim, objective.encoder.depth, tokens))
    return Point({"encoder": size, "clips": clips, "drop": drop}, tokens, step, floor)


def measure_step(quick: bool) -> dict[str, Any]:
    """The encoder's step against kept tokens."""
    sizes = {"vit_tiny": (1, 2, 4, 8)} if quick else {"vit_tiny": (1, 2, 4, 8, 16), "vit_base": (1, 2, 4)}
    rows, lines = [], {}
    for size, clips in sizes.items():
        objective = build_encoder_objective(size)
        other = [(1, 0.9), (1, 0.8)] if quick or size == "vit_base" else [(2, 0.9), (2, 0.8), (2, 0.6)]
        points = [encoder_point(objective, size, *at) for at in [*((n, DROP) for n in clips), *other]]
        found = fastest(points, rounds=2 if quick else 4)
        usual = [row for row in found if row["drop"] == DROP]
        line, floor = (
            fit([row["tokens"] for row in usual], [row[key] for row in usual])
            for key in ("step_seconds", "floor_seconds")
        )
        for row in found:
            row["line_seconds"] = line.fixed + line.slope * row["tokens"]
        rows += found
        lines[size] = _lines(line, floor)
    return {"rows": rows, "lines": lines}


def _lines(line: Line, floor: Line) -> dict[str, float]:
    return {
        "ms_per_1000_tokens": 1e6 * line.slope,
        "floor_ms_per_1000_tokens": 1e6 * floor.slope,
        "slope_over_floor": line.slope / floor.slope,
        "fixed_ms": 1e3 * line.fixed,
    }


def measure_causal(quick: bool) -> dict[str, Any]:
    """The packed causal step against tokens."""
    counts = (2, 4, 8, 16) if quick else (2, 4, 8, 16, 32)
    samples = batching.make_samples("8x8", max(counts), text=True)
    objective = batching.build_objective("packed", text=True)
    points = []
    for count in counts:
        batch = collate(samples[:count], mode="packed")

        def step(batch: LatentBatch = batch) -> int:
            objective.zero_grad(set_to_none=True)
            output = objective.forward_train_batch(batch, micro_step=0)
            torch.autograd.backward(output.loss)
            return output.tokens

        tokens = step()
        points.append(Point({"samples": count}, tokens, step, make_floor(recorded_products(objective, step))))
    rows = fastest(points, rounds=2 if quick else 4)
    line, floor = (
        fit([r["tokens"] for r in rows], [r[key] for r in rows]) for key in ("step_seconds", "floor_seconds")
    )
    return {"rows": rows, "lines": {"packed": _lines(line, floor)}}


def _report_step(found: dict[str, Any]) -> str:
    rows = [
        [
            *(str(row[key]) for key in ("encoder", "clips", "drop", "samples") if key in row),
            f"{row['tokens']:,}",
            *(number(row[key]) for key in ("step_seconds", "floor_seconds")),
            number(row["step_seconds"] / row["floor_seconds"]),
            *([number(row["step_seconds"] / row["line_seconds"])] if "line_seconds" in row else []),
        ]
        for row in found["rows"]
    ]
    kinds = ["encoder", "clips", "token drop"] if "encoder" in found["rows"][0] else ["samples"]
    last = ["step / line"] if "encoder" in found["rows"][0] else []
    lines = [
        f"{name}: {number(line['ms_per_1000_tokens'])} ms a thousand tokens and {number(line['fixed_ms'])} ms a step; "
        f"floor {number(line['floor_ms_per_1000_tokens'])} ms a thousand tokens; slope / floor "
        f"{number(line['slope_over_floor'])}"
        for name, line in found["lines"].items()
    ]
    return "\n".join([markdown([*kinds, "tokens", "step, s", "floor, s", "step / floor", *last], rows), "", *lines])


PARTS: dict[str, tuple[str, Callable[[bool], dict[str, Any]], Callable[[dict[str, Any]], str]]] = {
    "step": ("Encoder step against kept tokens", measure_step, _report_step),
    "causal": ("Packed causal step against tokens", measure_causal, _report_step),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append", help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer points and rounds; seconds for ViT-Tiny alone")
    parser.add_argument("--json", type=Path, help="also write everything there, with the machine's description")
    arguments = parser.parse_args()
    machine = describe_machine()
    rounds = 2 if arguments.quick else 4
    print(f"{machine['cpu']}, {machine['torch_threads']} thread(s), float32, fastest of {rounds} rounds")
    if note := remark(machine):
        print(note)
    found: dict[str, Any] = {"machine": machine, "quick": arguments.quick}
    for part in arguments.part or PARTS:
        title, measure, report = PARTS[part]
        found[part] = measure(arguments.quick)
        print(f"\n{title}\n\n{report(found[part])}", flush=True)
    if arguments.json is not None:
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
