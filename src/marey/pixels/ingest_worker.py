"""One video to JPEG frames on the grid: a pure function of the file and the settings, mapped over files.

Three threads keep more than one core busy where there are fewer files than cores, and the decoder from waiting: one
decodes, one scales and encodes, one writes. All three spend their time in C, without Python's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from marey.core.errors import UserError
from marey.core.files import atomic_write
from marey.pixels.decode import Reading, Tick
from marey.pixels.footage import Counts
from marey.pixels.media import Unreadable
from marey.pixels.picture import Painter

CHUNK_FRAMES = 128
"""Frames a worker holds before it writes them down."""

AHEAD = 4
"""Decoded frames that may wait for the encoder: enough to even out frames that are dear to decode."""

CHUNK_SCHEMA = pa.schema(
    [
        ("source_step", pa.int32()),
        ("frame", pa.binary()),
        ("h", pa.int32()),
        ("w", pa.int32()),
        ("time_s", pa.float64()),
    ]
)


class StoredFrame(NamedTuple):
    """A frame as the store holds it."""

    step: int
    """Grid step in the file: the frame on screen ``step / rate`` seconds after the first."""
    jpeg: bytes
    height: int
    width: int
    time_s: float
    """The frame's own time stamp in the file, seconds."""


@dataclass(frozen=True)
class FileSettings:
    """What decides the frames of a file."""

    rate: float
    short_edge: int | None
    quality: int


def stored_frames(
    reading: Reading, *, short_edge: int | None, quality: int, first_step: int = 0
) -> Iterator[StoredFrame]:
    """Frames of ``reading`` on the grid, from ``first_step`` on (what comes before is decoded, not encoded).

    A repeated frame is encoded once. Raises ``Unreadable``.
    """
    painter = Painter(short_edge=short_edge)
    ahead: deque[_Waiting] = deque()
    with ThreadPoolExecutor(1, "encode") as encoder:
        for shown in reading:
            # The first frame decides the size of all, also where it is not stored itself.
            shape = painter.shape(shown.frame)
            steps = range(max(shown.step, first_step), shown.step + shown.span)
            if not steps:
                continue
            jpeg = encoder.submit(painter.jpeg, shown.frame, quality=quality)
            ahead.append(_Waiting(steps, *shape, shown.time_s, jpeg))
            if len(ahead) > AHEAD:
                yield from ahead.popleft().frames()
        while ahead:
            yield from ahead.popleft().frames()


class _Waiting(NamedTuple):
    """A frame that is being encoded, and the grid steps at which it is shown."""

    steps: range
    height: int
    width: int
    time_s: float
    jpeg: Future[bytes]

    def frames(self) -> Iterator[StoredFrame]:
        jpeg = self.jpeg.result()
        return (StoredFrame(step, jpeg, self.height, self.width, self.time_s) for step in self.steps)


def chunk_path(folder: Path, source: int, chunk: int) -> Path:
    """Where frames ``[chunk * CHUNK_FRAMES, ...)`` of a source wait to be committed."""
    return folder / f"{source:08d}-{chunk:06d}.arrow"


def ingest_file(payload: dict[str, Any], tick: Tick) -> dict[str, Any]:
    """Write the frames of ``payload["footage"]`` as chunk files; return its counts.

    The first ``payload["chunks_done"]`` chunks are there already. Raises ``Unreadable`` for the file's faults and
    ``UserError`` where the output cannot be written.
    """
    settings = FileSettings(**payload["settings"])
    folder, source, chunk = Path(payload["folder"]), payload["source"], payload["chunks_done"]
    reading = Reading(payload["footage"], rate=settings.rate, tick=tick)
    frames = stored_frames(
        reading,
        short_edge=settings.short_edge,
        quality=settings.quality,
        first_step=chunk * CHUNK_FRAMES,
    )
    held: list[StoredFrame] = []
    with ThreadPoolExecutor(1, "write") as writer:
        written = writer.submit(lambda: None)
        for frame in frames:
            held.append(frame)
            if len(held) == CHUNK_FRAMES:
                written.result()  # one chunk at a time waits for the disk
                written = writer.submit(_write, chunk_path(folder, source, chunk), held)
                held, chunk = [], chunk + 1
        written.result()
        if held:
            _write(chunk_path(folder, source, chunk), held)
    if reading.counts.steps < payload["min_frames"]:
        raise Unreadable(
            f"gives {reading.counts.steps} frames at {settings.rate:g} frames/s, "
            f"fewer than min_frames={payload['min_frames']}"
        )
    return outcome(reading.counts)


def outcome(counts: Counts) -> dict[str, Any]:
    """Counts as plain values, with the sentence about what is missing."""
    return asdict(counts) | {"partial": counts.partial()}


def _write(path: Path, frames: list[StoredFrame]) -> None:
    columns = list(zip(*frames, strict=True))
    arrays = [pa.array(column, field.type) for column, field in zip(columns, CHUNK_SCHEMA, strict=True)]
    try:
        with atomic_write(path) as file, pa.ipc.new_file(file, CHUNK_SCHEMA) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=CHUNK_SCHEMA))
    except OSError as error:
        raise UserError(
            f"cannot write to {path.parent}: {error.strerror or error}; "
            "make room or give another output, and run the same command again to go on from here"
        ) from None
