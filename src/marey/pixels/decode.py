"""Decode a video front to back, once, and say which frame is on screen at each grid step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np

from marey.pixels.files import footage_of
from marey.pixels.footage import Counts, FileIndex, Footage
from marey.pixels.media import Unreadable
from marey.pixels.picture import Size
from marey.pixels.timeline import Timeline, as_fraction

Tick = Callable[[int, float], None]
"""Called with (frames decoded so far, fraction of the video read); cheap, once per frame."""

__all__ = ["Counts", "FileIndex", "Reading", "Shown", "Tick", "index_file", "index_job"]


class Shown(NamedTuple):
    """A decoded frame and the grid steps ``step .. step+span-1`` at which it is on screen."""

    frame: av.VideoFrame
    step: int
    span: int
    time_s: float
    """The frame's own time stamp in the file, seconds (not the grid's)."""
    ordinal: int
    """Position among the frames that decode, from 0."""


class Reading:
    """One pass over a video: iterate to get ``Shown`` frames in order, then read ``counts``.

    ``video``: a path, or any footage. ``observe`` sees every frame that decodes, also those
    that no grid step shows. Raises ``Unreadable`` while iterating when the video
    cannot be opened or no frame decodes; anything that decodes before an error is kept.
    """

    def __init__(
        self,
        video: str | Footage,
        *,
        rate: float,
        tick: Tick | None = None,
        observe: Callable[[av.VideoFrame], None] | None = None,
    ) -> None:
        self.footage = footage_of(video) if isinstance(video, str) else video
        self.rate, self.counts = as_fraction(rate), Counts()
        self.time_base = Fraction(0)
        self._tick, self._observe = tick, observe

    def __iter__(self) -> Iterator[Shown]:
        with self.footage.decoding(self.counts, rate=self.rate) as (self.time_base, decoded):
            line = Timeline(rate=self.rate, time_base=self.time_base)
            held: av.VideoFrame | None = None
            for frame, fraction, own in decoded:
                self._saw(frame, fraction, own)
                if not own:
                    continue
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

    def _saw(self, frame: av.VideoFrame, fraction: float, own: bool) -> None:
        if own:
            self.counts.decoded += 1
            self.counts.damaged += bool(frame.is_corrupt)
        if self._observe is not None:
            self._observe(frame)
        if self._tick is not None:
            self._tick(self.counts.decoded, fraction)

    def _shown(self, frame: av.VideoFrame, step: int, span: int, ordinal: int) -> Shown:
        time_s = float((frame.pts or 0) * self.time_base)
        return Shown(frame=frame, step=step, span=span, time_s=time_s, ordinal=ordinal)


def index_file(video: str | Footage, *, rate: float, tick: Tick | None = None) -> FileIndex:
    """Decode the whole video and note, for each grid step, the frame that a store would hold for it.

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

    reading = Reading(video, rate=rate, tick=tick, observe=observe)
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
    """``index_file`` of ``payload["footage"]`` for a child process (``pixels.pool``)."""
    return index_file(payload["footage"], rate=payload["rate"], tick=tick)
