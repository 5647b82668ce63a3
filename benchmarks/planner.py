"""Planning 10 thousand to 10 million clips: seconds, bytes a clip, time to the first batch, and how they grow.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/planner.py --json planner.json

Two sources of different canvases, half of the clips each, as CSV; weights by hours, microbatches of 36 on 8
ranks, grouping by shape, pools of 1152. Each size runs in a fresh process. "to first batch" is all of it,
from opening the manifests to the requests of rank 0's first microbatch; nothing of it opens a latent file. Growth is
the exponent between neighbouring sizes: 1 is as much again for as many clips again. ``--quick`` stops at a million.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from machine import describe_machine, peak_bytes, remark
from marey.core.files import write_json
from marey.latents.geometry import Geometry
from marey.latents.manifest import read_manifest
from marey.sampling.draws import MixtureDraws, draw_shares
from marey.sampling.planner import MicrobatchPlanner
from marey.sampling.stream import RequestStream
from marey.sampling.windows import SourceWindows, WindowTable
from tables import NONE, markdown, number

BUCKETS = [(1, 3), (2, 6), (3, 9), (4, 12), (5, 15)]
WORLD, BATCH, POOL = 8, 36, 1152
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
CANVASES = {"wide": (8, 12), "tall": (16, 8)}


def write_manifest(path: Path, name: str, clips: int) -> None:
    height, width = CANVASES[name]
    with path.open("w") as file:
        file.write("clip_id,path,length_frames,height,width,physical_key,text,fps\n")
        for i in range(clips):
            file.write(
                f"{name}_{i:07d},latents/{i // 1000:04d}/{i:07d}.safetensors,{4 + i % 17},{height},{width},"
                f'recording_{i // 10:06d},"pick it up, then place it at {i % 50}",4.0\n'
            )


def measure(folder: Path, clips: int) -> dict[str, float]:
    """Seconds of each stage and bytes held, for ``clips`` clips in ``folder``."""
    before = peak_bytes()
    start = time.perf_counter()
    manifests = {name: read_manifest(folder / f"{name}.csv", check_files=False) for name in CANVASES}
    read = time.perf_counter()
    geometry = Geometry(BUCKETS, seed=0)
    windows = WindowTable([SourceWindows(name, manifest, geometry) for name, manifest in manifests.items()])
    measures = windows.weighing("by_hours", patch=2)
    shares = draw_shares(windows.names, [1.0, 1.0], measures, meaning="by_hours")
    draws = MixtureDraws(windows.names, windows.sizes, shares, seed=0)
    weighed = time.perf_counter()
    planner = MicrobatchPlanner(
        draws, windows, seed=0, world=WORLD, batch=BATCH, mode="bucket", pool_size=POOL, shape_grouping=True
    )
    counts = planner.counts(0)
    planned = time.perf_counter()
    stream = RequestStream(planner, [None, None])
    stream.requests(0, 0, 0)
    first = time.perf_counter()
    steps = min(64, counts.micro_steps)
    for step in range(steps):
        stream.requests(0, step, 0)
    rest = time.perf_counter()
    rng = np.random.default_rng(0)
    for position in rng.integers(0, draws.epoch_draws, 200):
        draws.at(int(rng.integers(0, 1000)), np.array([position]))
    anywhere = time.perf_counter()
    held = sum(manifest.nbytes for manifest in manifests.values()) + sum(s.nbytes for s in windows.sources)
    return {
        "clips": clips,
        "read_s": read - start,
        "weigh_s": weighed - read,
        "plan_s": planned - weighed,
        "first_batch_s": first - planned,
        "to_first_batch_s": first - start,
        "batches_per_s": steps / (rest - first),
        "draw_anywhere_ms": 1e3 * (anywhere - rest) / 200,
        "manifest_bytes_per_clip": held / clips,
        "plan_bytes_per_draw": planner.nbytes / counts.planned,
        "peak_growth_mb": (peak_bytes() - before) / 2**20,
        "micro_steps": counts.micro_steps,
        "tail_repeats": counts.repeated,
        "dropped": counts.dropped,
    }


ROWS = {
    "read_s": "manifests read and checked, s",
    "weigh_s": "windows and weights, s",
    "plan_s": "planned, s",
    "to_first_batch_s": "to the first batch, s",
    "batches_per_s": "batches a second afterwards",
    "draw_anywhere_ms": "a batch anywhere in the epoch, ms",
    "manifest_bytes_per_clip": "manifest, bytes a clip",
    "plan_bytes_per_draw": "plan, bytes a draw",
    "peak_growth_mb": "memory grown, MiB",
}
GROWS = ("read_s", "weigh_s", "plan_s", "to_first_batch_s")


def exponents(rows: list[dict[str, float]], key: str) -> list[float]:
    """Of the growth of ``key`` with clips, between neighbouring sizes."""
    return [math.log(b[key] / a[key]) / math.log(b["clips"] / a["clips"]) for a, b in pairwise(rows)]


def report(rows: list[dict[str, float]]) -> str:
    body = []
    for key, name in ROWS.items():
        growth = ", ".join(f"{e:.2f}" for e in exponents(rows, key)) if key in GROWS else NONE
        body.append([name, *(number(row[key]) for row in rows), growth])
    return markdown(["clips", *(f"{row['clips']:,}" for row in rows), "growth"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", help="clips; each a fresh process")
    parser.add_argument("--quick", action="store_true", help="up to a million clips instead of ten million")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        print(json.dumps(measure(options.inside, options.sizes[0])))
        return
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['usable_cores']} cores")
    if note := remark(machine):
        print(note)
    rows = []
    for clips in options.sizes or SIZES[: -1 if options.quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            for name in CANVASES:
                write_manifest(Path(folder) / f"{name}.csv", name, clips // 2)
            command = [sys.executable, __file__, "--inside", folder, "--sizes", str(clips)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
    print(report(rows))
    if options.json is not None:
        write_json(options.json, {"machine": machine, "quick": options.quick, "rows": rows})


if __name__ == "__main__":
    main()
