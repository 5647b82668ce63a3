"""How long each command takes before it does what was asked: ``--help``, ``plan``, ``inspect``, the first step.

    python benchmarks/startup.py --json startup.json

Every row is a fresh process, timed from its start to its end; rounds go through all rows in turn, and a row's number
is the median over the rounds. The floors are processes that only import: the bare interpreter, torch, Lightning. A
run's first step is over when its row stands in ``metrics.csv``, as a person would see it, and what follows is not
timed, so Lightning's import is timed to the end of the import alone. Models and batches are so small that the step
itself takes milliseconds. Training rows use the demo's frames (made once, in the cache), a manifest of
a thousand rows, and, for the first batch of large data, one of ``--rows`` rows whose clips share 17 files, and a
frame store of ``--rows`` episodes. Everything stands in the page cache after the first round; on a cold disk, imports
cost what reading gigabytes of shared libraries costs.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from machine import describe_machine, remark
from tables import markdown, number

PYTHON, MAREY = [sys.executable], [sys.executable, "-m", "marey"]
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
POLL_S = 0.005
"""Seconds between two looks at whether a run has made its first step."""
LENGTHS = range(4, 21)
STORE_FRAMES = 4
"""Frames of an episode of the synthetic store: a clip of the demo's model."""
ONE_STEP = (
    "trainer.max_steps=1",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
)
TINY = ("model.hidden=16", "model.layers=1", "model.heads=2", "trainer.limit_val_batches=1")
ENCODER = ("recipe=demo", "loader.batch_size=4")


@dataclass
class Row:
    """One command, what it is held against, and how long it took."""

    name: str
    command: list[str]
    floor: str = "interpreter"
    aim: float | None = None
    """Seconds: of the whole, or above the floor where ``above`` is set."""
    above: bool = False
    run: Path | None = None
    """Where this is a training run: its folder, timed to its first step."""
    to_first_line: bool = False
    """Timed until it prints."""
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def write_manifest(folder: Path, rows: int) -> Path:
    """``rows`` clips of 17 lengths that share one file each."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        np.save(folder / f"{length}.npy", rng.standard_normal((4, length, 4, 4)).astype(np.float16))
    path = folder / "manifest.csv"
    with path.open("w") as file:
        file.write("clip_id,path,length_frames,height,width,physical_key,text,fps\n")
        for i in range(rows):
            length = LENGTHS[i % len(LENGTHS)]
            file.write(
                f"clip_{i:07d},{length}.npy,{length},4,4,recording_{i // 10:06d},"
                f'"pick it up, then place it at {i % 50}",4.0\n'
            )
    return path


def write_store(path: Path, episodes: int) -> Path:
    """``episodes`` videos of four frames, each the same small picture."""
    import lance
    import pyarrow as pa
    from PIL import Image

    from marey.pixels.storeformat import FRAME_SCHEMA, METADATA_KEY, STORE_FORMAT

    picture = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), 90, np.uint8)).save(picture, "JPEG")
    schema = FRAME_SCHEMA.with_metadata({METADATA_KEY: json.dumps({"format": STORE_FORMAT, "rate": 15.0})})

    def batches(chunk: int = 50_000) -> Iterator[pa.RecordBatch]:
        for first in range(0, episodes, chunk):
            episode = np.repeat(np.arange(first, min(first + chunk, episodes)), STORE_FRAMES)
            rows = len(episode)
            step = np.tile(np.arange(STORE_FRAMES), rows // STORE_FRAMES)
            columns = {
                "episode_idx": episode,
                "step_idx": step,
                "frame": [picture.getvalue()] * rows,
                "h": np.full(rows, 16),
                "w": np.full(rows, 16),
                "label": pa.nulls(rows),
                "source": [f"/videos/{number % 100:02d}/{number:07d}.mp4" for number in episode.tolist()],
                "source_idx": episode,
                "source_step": step,
                "time_s": step / 15.0,
                "true_rate": np.full(rows, 15.0),
                "extra": pa.nulls(rows),
            }
            made = [pa.array(values).cast(schema.field(name).type) for name, values in columns.items()]
            yield pa.record_batch(made, schema=schema)

    lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches()), str(path))
    return path


def training(name: str, folder: Path, *words: str, aim: float, above: bool) -> Row:
    run = folder / name.replace(" ", "-").replace(",", "")
    command = [*MAREY, "train", *words, *ONE_STEP, f"hydra.run.dir={run}", f"checkpoint.dirpath={run}-checkpoints"]
    return Row(name, command, "lightning", aim, above, run)


def table_rows(folder: Path, *, rows: int, workers: Sequence[int]) -> list[Row]:
    small, large = write_manifest(folder / "small", 1000), write_manifest(folder / "large", rows)
    store = write_store(folder / "large.lance", rows)
    causal = ("--config-name", "causal_video")

    def imports(modules: str) -> list[str]:
        return [*PYTHON, "-c", f"import {modules}"]

    found = [
        Row("interpreter", [*PYTHON, "-c", "pass"]),
        Row("torch", imports("torch")),
        Row("lightning", imports("lightning.pytorch; print(flush=True)"), to_first_line=True),
        Row("--help", [*MAREY, "--help"], aim=1.5),
        Row("plan", [*MAREY, "plan"], aim=1.5),
        Row("plan recipe=demo", [*MAREY, "plan", "recipe=demo"], aim=1.5),
        Row("plan, causal", [*MAREY, "plan", *causal, f"data.train={small}"], aim=1.5),
    ]
    for count in workers:
        own = (*causal, f"loader.num_workers={count}")
        name = "1 worker" if count == 1 else f"{count} workers"
        found += [
            training(f"train, {name}", folder, *ENCODER, own[-1], aim=3.0, above=True),
            training(f"train causal, {name}", folder, *own, f"data.train={small}", *TINY, aim=3.0, above=True),
            training(f"{rows:,} rows, {name}", folder, *own, f"data.train={large}", *TINY, aim=10.0, above=False),
        ]
    words = ("data=custom", f"data.train={store}", "data.name=large", "frame_stride=1", "loader.num_workers=1")
    found.append(training(f"{rows:,} episodes, 1 worker", folder, *ENCODER, *words, aim=10.0, above=False))
    for name, of in (("inspect", "train, "), ("inspect, causal", "train causal, ")):
        run = next(row.run for row in found if row.name.startswith(of))
        found.append(Row(name, [*MAREY, "inspect", f"{run}-checkpoints/last.ckpt"], "torch", 1.0, above=True))
    found += [
        Row("what a worker imports", imports("marey.training.workers, marey.pixels.dataset"), "torch"),
        *(Row(f"what {name} imports", imports(f"marey.evaluation.{name}"), "torch") for name in ("embed", "probe")),
        Row("what report imports", imports("marey.evaluation.report")),
    ]
    return found


def timed(row: Row) -> float:
    """Seconds until the process has ended, or made its first step. Output of one that fails is shown."""
    started = time.perf_counter()
    with tempfile.NamedTemporaryFile("w+") as said:
        process = subprocess.Popen(row.command, stdout=said, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        first = None
        if row.run is not None:
            first = _first_time(row.run / "metrics.csv", 2, process)  # the header, and step 1
        elif row.to_first_line:
            first = _first_time(Path(said.name), 1, process)
        code = process.wait()
        ended = time.perf_counter()
        if code or (first is None and (row.run is not None or row.to_first_line)):
            said.seek(0)
            sys.exit(f"{' '.join(row.command)} ended with {code}:\n{said.read()}")
    return (ended if first is None else first) - started


def _first_time(file: Path, lines: int, process: subprocess.Popen[bytes]) -> float | None:
    """When ``file`` has that many lines; None where the process ends without."""
    while True:
        going = process.poll() is None
        if file.exists() and file.read_bytes().count(b"\n") >= lines:
            return time.perf_counter()
        if not going:
            return None
        time.sleep(POLL_S)


def measure(folder: Path, *, rows: int, rounds: int, workers: Sequence[int]) -> list[dict[str, Any]]:
    """All rows with their floors."""
    table = table_rows(folder, rows=rows, workers=workers)
    for _ in range(rounds):
        for row in table:
            if row.run is not None:  # each round is a run of its own
                stem = str(row.run)
                for made in (Path(stem), Path(f"{stem}-checkpoints")):
                    if made.exists():
                        made.rename(f"{made}-round-{len(row.seconds)}")
            row.seconds.append(timed(row))
    medians = {row.name: row.median for row in table}
    found = []
    for row in table:
        floor = medians[row.floor]
        held = row.median - floor if row.above else row.median
        found.append(
            {
                "name": row.name,
                "seconds": row.seconds,
                "median_s": row.median,
                "floor": row.floor,
                "over_floor_s": row.median - floor,
                "aim_s": row.aim,
                "aim_is_above_floor": row.above,
                "met": None if row.aim is None else held <= row.aim,
            }
        )
    return found


def show(rows: list[dict[str, Any]]) -> str:
    """The table: seconds, seconds over the floor, the aim."""
    lines = []
    for row in rows:
        aim = ""
        if row["aim_s"] is not None:
            aim = f"{row['floor']} + {row['aim_s']:g}" if row["aim_is_above_floor"] else f"{row['aim_s']:g}"
            aim += "" if row["met"] else " (missed)"
        over = "" if row["name"] == row["floor"] else f"{row['over_floor_s']:.2f} over {row['floor']}"
        lines.append([row["name"], number(row["median_s"]), over, aim])
    return markdown(["process", "seconds", "of which", "aim, seconds"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the large manifest, and episodes of the store")
    parser.add_argument("--quick", action="store_true", help="one round, a tenth of the rows, one worker")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds, rows = (1, options.rows // 10) if options.quick else (options.rounds, options.rows)
    from marey.pixels.digits import demo_source

    demo_source("train")
    machine = describe_machine()
    if note := remark(machine):
        print(note)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), rows=rows, rounds=rounds, workers=(1,) if options.quick else (0, 1))
    print(show(found))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "rounds": rounds, "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
