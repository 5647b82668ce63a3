"""Random clips from a frame store against the JPEG decoder alone, and straight from video against decoding alone.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/reads.py --json reads.json

Clips of 16 frames at stride 2 and 15 frames a second, eight to a batch. The store's floor is TurboJPEG on the same
bytes into memory that is already there; both sides take turns, a batch each. Straight from video, ``decoder`` is
PyAV's CPU time a frame, reading the file from its front, times the frames that stand between a key frame and the clip's
last; ``reader`` seeks, decodes and makes RGB in this process; ``guarded`` is what training does: another process
decodes, and its CPU time is counted with this one's (``here``). 720p video is as x264 writes it by default, with a key
frame at least every 250 frames, and every 15.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray

from machine import cannot_run, describe_machine, remark
from marey.core.files import write_json
from marey.core.keys import rng
from marey.pixels.decode import index_file
from marey.pixels.episodes import EpisodeSource, FrameRequest
from marey.pixels.ingest import ingest
from marey.pixels.media import open_video
from marey.pixels.reader import VideoReader
from marey.pixels.store import FrameStore
from marey.pixels.videos import VideoEpisodes
from tables import markdown, number
from videos import CLIPS, camera_clip, make_720p

FRAMES, STRIDE, BATCH, RATE = 16, 2, 8, 15.0
SPAN = (FRAMES - 1) * STRIDE + 1


def draws(source: EpisodeSource, count: int, batch: int) -> list[FrameRequest]:
    """Windows of random episodes."""
    key = rng(0, "benchmark-reads", batch)
    usable = np.flatnonzero(source.lengths >= SPAN)
    requests = []
    for _ in range(count):
        episode = int(key.choice(usable))
        start = int(key.integers(int(source.lengths[episode]) - SPAN + 1))
        requests.append(FrameRequest(episode, start + STRIDE * np.arange(FRAMES)))
    return requests


def encoded_frames(store: FrameStore, requests: Sequence[FrameRequest]) -> tuple[list[list[memoryview]], float]:
    """The JPEGs of each request, and the CPU seconds of the table's one take."""
    starts = np.cumsum(store.lengths) - store.lengths  # an ingest writes episodes in order
    rows = np.stack([starts[request.episode] + request.steps for request in requests])
    wanted, places = np.unique(rows, return_inverse=True)
    dataset, begun = store.dataset(), time.process_time()
    column = dataset.take(wanted, columns=["frame"]).column("frame")
    took = time.process_time() - begun
    frames = [memoryview(value.as_buffer()).cast("B") for value in column]
    return [[frames[int(place)] for place in clip] for clip in places.reshape(rows.shape)], took


def from_store(store: FrameStore, batches: int) -> dict[str, Any]:
    height, width = int(store.heights[0]), int(store.widths[0])
    memory: NDArray[np.uint8] = np.ones((BATCH, FRAMES, height, width, 3), np.uint8)
    read = alone = take = 0.0
    for batch in range(batches + 1):
        requests = draws(store, BATCH, batch)
        clips, took = encoded_frames(store, requests)
        begun = time.process_time()
        for clip, out in zip(clips, memory, strict=True):
            for frame, picture in zip(clip, out, strict=True):
                simplejpeg.decode_jpeg(frame, colorspace="RGB", buffer=picture)
        decoded = time.process_time()
        got = store.read(requests)
        done = time.process_time()
        assert np.array_equal(got[-1].permute(0, 2, 3, 1).numpy(), memory[-1])
        del got
        if batch:  # the first opens the table and touches memory
            read, alone, take = read + done - decoded, alone + decoded - begun, take + took
    clips_read = batches * BATCH
    return {
        "clips": clips_read,
        "frame": [height, width],
        "read_cpu_ms": read / clips_read * 1e3,
        "decoder_cpu_ms": alone / clips_read * 1e3,
        "take_cpu_ms": take / clips_read * 1e3,
        "of_decoder": alone / read,
    }


def children_cpu() -> float:
    """CPU seconds of the processes that this one has started and that still run."""
    pids = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return sum(time.clock_gettime((~int(pid) << 3) | 2) for pid in pids)  # Linux's CPU clock of a process


def decoder_alone(path: Path) -> float:
    """CPU seconds per frame."""
    begun, frames = time.process_time(), 0
    with open_video(str(path)) as (container, stream):
        frames = sum(1 for _ in container.decode(stream))
    return (time.process_time() - begun) / frames


def from_video(name: str, path: Path, clips: int) -> dict[str, Any]:
    decoded: list[float] = []
    frame_cost = min(decoder_alone(path) for _ in range(3))
    index = index_file(str(path), rate=RATE)
    reader = VideoReader(str(path), index, tick=lambda: decoded.append(frame_cost))
    source = VideoEpisodes.open(str(path), rate=RATE, episode_length=128)
    cpu = {"decoder": 0.0, "reader": 0.0, "guarded": 0.0, "here": 0.0}
    for clip, request in enumerate(draws(source, clips + 2, 0)):
        decoded.clear()
        begun = time.process_time()
        for _ in reader.each((128 * request.episode + request.steps).tolist()):
            pass
        read = time.process_time()
        children = children_cpu() if clip else 0.0
        asked = time.process_time()
        (got,) = source.read([request])
        here = time.process_time() - asked
        if clip > 1:  # the first open files and start a process
            cpu["decoder"] += sum(decoded)
            cpu["reader"] += read - begun
            cpu["guarded"] += here + children_cpu() - children
            cpu["here"] += here
        del got
    return {"name": name, "frame": [index.height, index.width], "clips": clips} | {
        "cpu_ms": {what: seconds / clips * 1e3 for what, seconds in cpu.items()},
        "guard_over_reader": cpu["guarded"] / cpu["reader"],
        "of_decoder": cpu["decoder"] / cpu["guarded"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer clips, one video")
    parser.add_argument("--json", metavar="FILE", help="also write the result there")
    arguments = parser.parse_args()
    if not Path("/proc/self/task").exists():
        cannot_run("the CPU time of the decoding process is read as Linux gives it")
    torch.set_num_threads(1)
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['usable_cores']} cores, PyAV {machine['av']}, Lance {machine['pylance']}")
    if note := remark(machine):
        print(note)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["MAREY_CACHE"] = str(folder / "cache")
        sparse = make_720p(folder / "long.mp4", frames=300 if arguments.quick else 900, key_every=250)
        videos = {"720p, key frames every 250": sparse}
        if not arguments.quick:
            videos["720p, key frames every 15"] = make_720p(folder / "short.mp4", frames=900, key_every=15)
            videos |= {clip: camera_clip(clip) for clip in CLIPS}
        with contextlib.redirect_stderr(io.StringIO()):  # progress
            ingest([str(sparse), str(camera_clip(CLIPS[0]))], folder / "s.lance", rate=RATE)
            store = from_store(FrameStore.open(folder / "s.lance"), 3 if arguments.quick else 12)
            direct = [from_video(title, path, 6 if arguments.quick else 32) for title, path in videos.items()]
    print(f"\nFrom the store, {store['frame'][0]}x{store['frame'][1]}, CPU milliseconds per clip\n")
    columns = {"read": "read_cpu_ms", "JPEG decoder alone": "decoder_cpu_ms", "take": "take_cpu_ms"}
    cells = [number(store[key]) for key in columns.values()]
    print(markdown([*columns, "decoder / read"], [[*cells, f"{100 * store['of_decoder']:.0f}%"]]))
    print("\nStraight from video, CPU milliseconds per clip\n")
    header = ["video", "frame", "decoder", "reader", "guarded", "here", "guarded / reader", "decoder / guarded"]
    rows = [
        [
            row["name"],
            "x".join(map(str, row["frame"])),
            *map(number, row["cpu_ms"].values()),
            number(row["guard_over_reader"]),
            f"{100 * row['of_decoder']:.0f}%",
        ]
        for row in direct
    ]
    print(markdown(header, rows))
    if arguments.json:
        write_json(Path(arguments.json), {"machine": machine, "store": store, "video": direct})


if __name__ == "__main__":
    main()
