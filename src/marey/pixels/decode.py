"""Decode a file front to back, once, and say which frame is on screen at each grid step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
from numpy.typing import NDArray

from marey.pixels.media import Unreadable, open_video, promised_seconds, reason_of, regular_size
from marey.pixels.picture import Size
from marey.pixels.timeline import Timeline, as_fraction

Tick = Callable[[int, float], None]
"""Called with (frames decoded so far, fraction of the file read); cheap, once per frame."""


class Shown(NamedTuple):
    """A decoded frame and the grid steps ``step .. step+span-1`` at which it is on screen."""

    frame: av.VideoFrame
    step: int
    span: int
    time_s: float
    """The frame's own time stamp in the file, seconds (not the grid's)."""
    ordinal: int
    """Position among the frames that decode, from 0."""


@dataclass
class Counts:
    """What a file promised and what it gave."""

    promised: int | None = None
    """Frames by the container's index; None where it does not say. Never used to decode, only to compare."""
    promised_s: float | None = None
    """Seconds by the header, where the container counts no frames; None where that does not say either."""
    decoded: int = 0
    seconds: float = 0.0
    """What the frames that decode cover."""
    steps: int = 0
    repeats: int = 0
    """Grid steps that show the same frame as the step before."""
    breaks: int = 0
    """Missing, backward or leaping time stamps."""
    damaged: int = 0
    """Frames the decoder gave but marked as corrupt."""
    errors: int = 0
    first_error: str | None = None
    true_rate: float | None = None

    def partial(self) -> str | None:
        """One phrase where less was read than the file holds, else None."""
        parts = []
        if self.promised is not None and self.decoded < self.promised:
            parts.append(f"{self.decoded} of {self.promised} promised frames decode")
        if self.promised_s is not None and self.seconds < self.promised_s - max(0.1, 3 / (self.true_rate or 1)):
            parts.append(f"{self.seconds:.2f} of {self.promised_s:.2f} promised seconds decode")
        if self.errors:
            parts.append(f"{self.errors} decoding errors (first: {self.first_error})")
        if self.damaged:
            parts.append(f"{self.damaged} frames are marked as damaged")
        return "; ".join(parts) or None


class Reading:
    """One pass over a file: iterate to get ``Shown`` frames in order, then read ``counts``.

    ``observe`` sees every frame that decodes, also those
    that no grid step shows. Raises ``Unreadable`` while iterating when the file
    cannot be opened or no frame decodes; anything that decodes before an error is kept.
    """

    def __init__(
        self,
        path: str,
        *,
        rate: float,
        tick: Tick | None = None,
        observe: Callable[[av.VideoFrame], None] | None = None,
    ) -> None:
        self.path, self.rate, self.counts = path, as_fraction(rate), Counts()
        self.time_base = Fraction(0)
        self._tick, self._observe = tick, observe

    def __iter__(self) -> Iterator[Shown]:
        size = regular_size(self.path)
        with open_video(self.path) as (container, stream):
            if stream.time_base is None:
                raise Unreadable("has no clock (no time base)")
            self.time_base = stream.time_base
            self.counts.promised = stream.frames or None
            self.counts.promised_s = None if self.counts.promised else promised_seconds(container, stream)
            line = Timeline(rate=self.rate, time_base=self.time_base)
            held: av.VideoFrame | None = None
            for frame in self._frames(container, stream, size):
                step, count = line.steps, line.push(frame.pts)
                if held is not None and held.pts is None and frame.pts is None and line.frames == 2:
                    raise Unreadable("its frames carry no time stamps")
                if held is not None and count:
                    yield self._shown(held, step, count, line.frames - 2)
                held = frame
            if held is None:
                raise Unreadable(f"no frame decodes ({self.counts.first_error or 'the stream is empty'})")
            step, count = line.steps, line.finish()
            if count:
                yield self._shown(held, step, count, line.frames - 1)
            self.counts.steps, self.counts.repeats, self.counts.breaks = line.steps, line.repeats, line.breaks
            self.counts.true_rate, self.counts.seconds = line.true_rate(), float(line.seconds)

    def _shown(self, frame: av.VideoFrame, step: int, span: int, ordinal: int) -> Shown:
        time_s = float((frame.pts or 0) * self.time_base)
        return Shown(frame=frame, step=step, span=span, time_s=time_s, ordinal=ordinal)

    def _error(self, error: av.FFmpegError) -> None:
        self.counts.errors += 1
        self.counts.first_error = self.counts.first_error or reason_of(error)

    def _frames(
        self, container: av.container.InputContainer, stream: av.video.stream.VideoStream, size: int
    ) -> Iterator[av.VideoFrame]:
        counts, fraction = self.counts, 0.0
        for packet in self._packets(container, stream):
            if packet.is_discard and counts.promised is not None:
                counts.promised -= 1  # an edit list cuts it away: nobody is promised to see it
            if packet.pos is not None and packet.pos > 0:
                fraction = max(fraction, min(1.0, packet.pos / size))
            try:
                frames = packet.decode() if packet.size else stream.codec_context.decode(None)
            except av.FFmpegError as error:
                if not isinstance(error, av.error.EOFError):
                    self._error(error)
                continue
            for frame in frames:
                assert isinstance(frame, av.VideoFrame)
                counts.decoded += 1
                counts.damaged += bool(frame.is_corrupt)
                if self._observe is not None:
                    self._observe(frame)
                if self._tick is not None:
                    self._tick(counts.decoded, fraction)
                yield frame

    def _packets(self, container: av.container.InputContainer, stream: av.video.stream.VideoStream) -> Iterator[Any]:
        try:
            yield from container.demux(stream)
        except av.FFmpegError as error:
            self._error(error)
            yield av.Packet()  # an empty packet flushes the frames the decoder still holds


class FileIndex(NamedTuple):
    """Where each grid step of a file is found again. int64 arrays; ``[steps]`` unless said otherwise."""

    stamps: NDArray[np.int64]
    """Time stamp, in ticks, of the frame on screen at each step (0 where the file has none)."""
    ordinals: NDArray[np.int64]
    """The same frame, counted from the front among the frames that decode."""
    keys: NDArray[np.int64]
    """``[key frames]``: time stamps, ascending."""
    seekable: bool
    """Time stamps are all present and strictly ascending, so that one names one frame."""
    height: int
    width: int
    """Size of the first frame as it is coded (not turned upright); what the whole file is shown at."""
    repeats: int
    true_rate: float | None


def index_file(path: str, *, rate: float, tick: Tick | None = None) -> FileIndex:
    """Decode the whole file and note, for each grid step, the frame that a store would hold for it.

    Packets are not trusted to become frames: only what decodes is listed. Raises ``Unreadable``.
    """
    keys: list[int] = []
    newest: int | None = None
    seekable = True
    size: Size | None = None

    def observe(frame: av.VideoFrame) -> None:
        nonlocal newest, seekable, size
        size = size or Size(frame.height, frame.width)
        seekable = seekable and frame.pts is not None and (newest is None or frame.pts > newest)
        newest = frame.pts
        if frame.key_frame and frame.pts is not None:
            keys.append(frame.pts)

    reading = Reading(path, rate=rate, tick=tick, observe=observe)
    stamps: list[int] = []
    ordinals: list[int] = []
    for shown in reading:
        stamps += [shown.frame.pts or 0] * shown.span
        ordinals += [shown.ordinal] * shown.span
    assert size is not None
    return FileIndex(
        stamps=np.asarray(stamps, np.int64),
        ordinals=np.asarray(ordinals, np.int64),
        keys=np.asarray(keys, np.int64),
        seekable=seekable,
        height=size.height,
        width=size.width,
        repeats=reading.counts.repeats,
        true_rate=reading.counts.true_rate,
    )


def index_job(payload: dict[str, Any], tick: Tick) -> FileIndex:
    """``index_file`` for a child process (``pixels.pool``)."""
    return index_file(payload["path"], rate=payload["rate"], tick=tick)
