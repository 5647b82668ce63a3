"""Filled microbatches and balanced ranks against a fixed number of samples: utilisation, work, planning time.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/packing.py --json packing.json

balance   plans of 8 simulated ranks on the mixes of ``batching.py`` and on the recipe ``long``, 20,000 windows each, by
          the planner that training uses; nothing is read or trained. "fixed" is ``data.train_batch_size``, "fill" is
          ``data.batching.fill_tokens`` at four times the longest window. "full": tokens of the mean microbatch over the
          budget, or over the largest microbatch where there is none: what memory must be there for, and is used.
          "padding": of what heavy layers see. "tokens", "FLOPs": mean rank over busiest rank of a micro-step, by what
          the mode computes (``bucket`` is padded). FLOPs are those of the blocks of the default model, as
          ``marey plan`` counts them. "own order" is bucket with each rank's microbatches in an order of its own, as
          per-rank samplers have it, not as training does it here; "free counts" is longest first where ranks may take
          more or fewer samples than each other, which training does not.
planning  CPU seconds to plan one epoch, by shape and filled, in turns, the fastest of three; bytes kept a draw; then a
          fresh process from opening the manifests to the requests of the first microbatch, in CPU seconds and by the
          clock, and what its memory grew by. 8 ranks, two canvases.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import numpy as np
import pyarrow as pa

import batching
from machine import describe_machine, peak_bytes, remark
from marey.config.causal import CausalConfig
from marey.config.compose import compose_container, validate
from marey.core.files import write_json
from marey.core.keys import permutation
from marey.core.mixing import text_keys
from marey.latents.geometry import Geometry
from marey.latents.manifest import Manifest
from marey.sampling.draws import MixtureDraws, draw_shares
from marey.sampling.flops import SampleCost, sample_cost
from marey.sampling.latent_stream import read_sources, train_stream
from marey.sampling.planner import MicrobatchPlanner
from marey.sampling.windows import Located, SourceWindows, WindowTable
from planner import CANVASES, write_manifest
from tables import NONE, markdown, number

WORLD, PATCH, POOL = 8, 2, 128
WINDOWS, QUICK_WINDOWS = 20_000, 6_000
SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000), (10_000, 100_000)
FILL_PLAN = 5_120


def config_of(*overrides: str) -> CausalConfig:
    return validate(compose_container(list(overrides), config_name="causal_video"), CausalConfig)


class Policy(NamedTuple):
    """How draws become microbatches. ``batch`` None: filled."""

    name: str
    batch: int | None
    mode: str = "packed"
    longest_first: bool = False
    own_order: bool = False
    free_counts: bool = False


POLICIES = (
    Policy("fixed 2, in order", 2),
    Policy("fixed 2, longest first", 2, longest_first=True),
    Policy("fixed 2, free counts", 2, free_counts=True),
    Policy("fixed 8, in order", 8),
    Policy("bucket 8, own order", 8, mode="bucket", own_order=True),
    Policy("bucket 8", 8, mode="bucket"),
    Policy("fixed 8, longest first", 8, longest_first=True),
    Policy("fixed 8, free counts", 8, free_counts=True),
    Policy("fill", None),
    Policy("fill, longest first", None, longest_first=True),
)
AGAINST = ("fixed 8, in order", "fill, longest first")


def windows_of(side: int, buckets: list[tuple[int, int]], count: int) -> WindowTable:
    """``count`` clips, each as long as the longest bucket, so that every bucket is as likely."""
    geometry = Geometry(buckets, seed=0)
    ids = [str(i) for i in range(count)]
    manifest = Manifest(
        path=Path("benchmark.csv"),
        table=pa.table({"clip_id": ids, "path": ids}),
        length_frames=np.full(count, geometry.longest, dtype=np.int64),
        start=np.zeros(count, dtype=np.int64),
        height=np.full(count, side, dtype=np.int64),
        width=np.full(count, side, dtype=np.int64),
        fps=None,
        clip_keys=text_keys(ids),
        ignored_columns=(),
    )
    return WindowTable([SourceWindows("benchmark", manifest, geometry)])


def planner_of(at: WindowTable, policy: Policy, cost: SampleCost) -> MicrobatchPlanner:
    shares = draw_shares(at.names, [1.0], [1.0], meaning="by_draw")
    source = at.sources[0]
    assert source.manifest.height is not None
    longest = source.geometry.longest * (int(source.manifest.height[0]) // PATCH) ** 2
    return MicrobatchPlanner(
        MixtureDraws(at.names, at.sizes, shares, seed=0),
        at,
        seed=0,
        world=WORLD,
        batch=policy.batch or 1,
        mode="bucket" if policy.mode == "bucket" else "packed",
        pool_size=POOL,
        fill_tokens=4 * longest if policy.batch is None else None,
        patch=PATCH,
        cost=cost if policy.longest_first else None,
    )


def balance(loads: np.ndarray[Any, Any]) -> float:
    """Mean over micro-steps of mean rank over busiest rank; loads ``[micro_steps, WORLD]``."""
    return float((loads.mean(axis=1) / loads.max(axis=1)).mean())


def freely(costs: Sequence[float]) -> list[int]:
    """The rank of each sample: the most costly first, each to the one that has least work."""
    loads, ranks = [(0.0, rank) for rank in range(WORLD)], [0] * len(costs)
    for sample in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        ranks[sample] = rank
        heapq.heapreplace(loads, (load + costs[sample], rank))
    return ranks


def measure_policy(at: WindowTable, policy: Policy, cost: SampleCost) -> dict[str, Any]:
    """Walk through the whole epoch of a plan."""
    plan = planner_of(at, policy, cost)
    steps = plan.micro_steps(0)
    tokens, seen, work, samples = (np.zeros((steps, WORLD)) for _ in range(4))
    for step in range(steps):
        parts = [plan.batch_at(0, step, rank).at for rank in range(WORLD)]
        if policy.free_counts:
            whole = Located(*(np.concatenate(column) for column in zip(*parts, strict=True)))
            taken = np.asarray(freely(cost.of(whole).tolist()))
            parts = [Located(*(column[taken == rank] for column in whole)) for rank in range(WORLD)]
        for rank, located in enumerate(parts):
            frames = located.prefix + located.future
            cells = (located.height // PATCH) * (located.width // PATCH)
            padded = np.full_like(frames, frames.max()) if policy.mode == "bucket" else frames
            tokens[step, rank] = (frames * cells).sum()
            seen[step, rank] = (padded * cells).sum()
            work[step, rank] = cost.of(located, frames=padded if policy.mode == "bucket" else None).sum()
            samples[step, rank] = len(frames)
    if policy.own_order:
        for rank in range(WORLD):
            for first in range(0, steps, plan.pooled):
                pool = slice(first, min(first + plan.pooled, steps))
                order = first + permutation(pool.stop - first, 0, "benchmark-order", rank, first)
                for table in (tokens, seen, work):
                    table[pool, rank] = table[order, rank]
    counts = plan.counts(0)
    return {
        "policy": policy.name,
        "microbatches": steps * WORLD,
        "samples": float(samples.mean()),
        "full": float(tokens.mean() / (plan.fill_tokens or seen.max())),
        "padding": float(1 - tokens.sum() / seen.sum()),
        "tokens_mean_over_max": balance(seen),
        "flops_mean_over_max": balance(work),
        "dropped": counts.dropped / counts.drawn,
    }


def measure_balance(quick: bool) -> list[dict[str, Any]]:
    config = config_of("data=demo")
    cost = sample_cost(config.model, config.program)
    recipe = list(config_of("data=demo", "causal_recipe=long").data.buckets)
    mixes = {**batching.MIXES, "long 16x16": (16, recipe)}
    assert sorted(mixes["long"][1]) == sorted(recipe)
    rows = []
    for name, (side, buckets) in mixes.items():
        at = windows_of(side, buckets, QUICK_WINDOWS if quick else WINDOWS)
        rows += [{"mix": name, **measure_policy(at, policy, cost)} for policy in POLICIES]
    return rows


def fastest(work: list[Callable[[], object]], rounds: int) -> list[float]:
    """CPU seconds of each, in turns."""
    best = [float("inf")] * len(work)
    for _ in range(rounds):
        for i, act in enumerate(work):
            start = time.process_time()
            act()
            best[i] = min(best[i], time.process_time() - start)
    return best


def configured(folder: Path, *overrides: str) -> CausalConfig:
    sources = ", ".join(f"{{name: {name}, manifest: {folder}/{name}.csv}}" for name in CANVASES)
    words = ("data.check_files=false", "data.batching.mode=packed", "data.train_batch_size=8", *overrides)
    return config_of(f"data.sources=[{sources}]", *words)


FILLED = (f"data.batching.fill_tokens={FILL_PLAN}", "data.batching.balance=longest_first")


def measure_planning(folder: Path) -> dict[str, float]:
    """Seconds to plan an epoch three ways, on manifests in ``folder``, and bytes kept."""
    made = {}
    for name, overrides in {"shape": (), "fill": FILLED[:1], "fill, longest first": FILLED}.items():
        config = configured(folder, *overrides)
        made[name] = train_stream(config, read_sources(config.data, validates=False).train, world=WORLD)[0].planner
    epochs = iter(range(10**6))

    def act(planner: MicrobatchPlanner) -> Callable[[], object]:
        return lambda: planner.counts(next(epochs))  # an epoch that it has not planned before

    seconds = fastest([act(planner) for planner in made.values()], rounds=3)
    return {
        "draws": made["fill"].draws.epoch_draws,
        **{f"{name}_cpu_s": value for name, value in zip(made, seconds, strict=True)},
        **{f"{name}_bytes_per_draw": p.nbytes / p.draws.epoch_draws for name, p in made.items()},
    }


def measure_first(folder: Path) -> dict[str, float]:
    """In this process: from opening the manifests to the first microbatch of rank 0."""
    config = configured(folder, *FILLED)
    before, start, clock = peak_bytes(), time.process_time(), time.perf_counter()
    sources = read_sources(config.data, validates=False).train
    read, held = time.process_time(), peak_bytes()
    stream, _ = train_stream(config, sources, world=WORLD)
    stream.requests(0, 0, 0)
    end = time.process_time()
    return {
        "read_cpu_s": read - start,
        "first_batch_cpu_s": end - start,
        "first_batch_clock_s": time.perf_counter() - clock,
        "manifest_mib": (held - before) / 2**20,
        "planning_mib": (peak_bytes() - held) / 2**20,
    }


def measure_sizes(quick: bool) -> list[dict[str, float]]:
    rows = []
    for clips in QUICK_SIZES if quick else SIZES:
        with tempfile.TemporaryDirectory() as folder:
            for name in CANVASES:
                write_manifest(Path(folder) / f"{name}.csv", name, clips // 2)
            command = [sys.executable, __file__, "--inside", folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append({"clips": clips, **measure_planning(Path(folder)), **json.loads(done.stdout)})
    return rows


def show_balance(rows: list[dict[str, Any]]) -> None:
    header = ["mix", "policy", "samples each", "full", "padding", "tokens mean/max", "FLOPs mean/max", "dropped"]
    keys = ("samples", "full", "padding", "tokens_mean_over_max", "flops_mean_over_max", "dropped")
    print(markdown(header, [[row["mix"], row["policy"], *(number(row[key]) for key in keys)] for row in rows]))
    print(f"\nA: {AGAINST[0]}; B: {AGAINST[1]}")
    found = {(row["mix"], row["policy"]): row for row in rows}
    compared = []
    for mix in dict.fromkeys(row["mix"] for row in rows):
        a, b = (found[mix, name] for name in AGAINST)
        pairs = [f"{a[key]:.3f} -> {b[key]:.3f}" for key in ("full", "flops_mean_over_max")]
        compared.append([mix, *pairs, f"{b['flops_mean_over_max'] / a['flops_mean_over_max']:.2f}"])
    print(markdown(["mix", "full, A -> B", "FLOPs mean/max, A -> B", "gain"], compared))


def show_planning(rows: list[dict[str, float]]) -> None:
    names = {key: NONE for row in rows for key in row if key != "clips"}
    header = ["", *(f"{row['clips']:,.0f} clips" for row in rows)]
    print(markdown(header, [[key.replace("_", " "), *(number(row.get(key)) for row in rows)] for key in names]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer windows, no plan of a million")
    parser.add_argument("--part", choices=["balance", "planning"], action="append")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine's description")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        print(json.dumps(measure_first(arguments.inside)))
        return
    machine = describe_machine()
    print(f"{machine['cpu']}, {WORLD} simulated ranks")
    if note := remark(machine):
        print(note)
    parts = arguments.part or ["balance", "planning"]
    kept: dict[str, Any] = {"machine": machine}
    if "balance" in parts:
        kept["balance"] = measure_balance(arguments.quick)
        show_balance(kept["balance"])
    if "planning" in parts:
        kept["planning"] = measure_sizes(arguments.quick)
        print()
        show_planning(kept["planning"])
    if arguments.json is not None:
        write_json(arguments.json, kept)


if __name__ == "__main__":
    main()
