"""Temporal windows: which episodes are long enough for a clip, and where in an episode a clip starts.

A clip of T frames with stride s spans ``(T - 1) * s + 1`` stored frames; an episode of just that many has one
window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.core.keys import rng
from marey.pixels.episodes import EpisodeSource

PadShort = Literal["drop", "repeat"]


def clip_span(num_frames: int, frame_stride: int) -> int:
    """Stored frames from a clip's first to its last, both counted: ``(T - 1) * stride + 1``."""
    return (num_frames - 1) * frame_stride + 1


@dataclass(frozen=True)
class ClipIndex:
    """The episodes of one source that give clips. Built from their lengths alone; no frame is read."""

    name: str
    version: str
    """Of the source it was built from: another version needs another index."""
    num_frames: int
    frame_stride: int
    episodes: NDArray[np.int64]
    """``[usable]``: episode indices within the source, ascending."""
    lengths: NDArray[np.int64]
    """``[usable]``: their stored frames."""
    dropped_short: int
    """Episodes left out because they are shorter than a clip (or empty)."""
    padded_short: int
    """Usable episodes shorter than a clip, whose last frame is repeated."""

    def __len__(self) -> int:
        return len(self.episodes)

    def window(self, usable: int, *, seed: int, epoch: int, position: int) -> NDArray[np.int64]:
        """int64 ``[T]``: the stored steps of the clip at ``position``, of usable episode ``usable``.

        The start is uniform over all windows that fit, keyed by (seed, "window", epoch, position).
        """
        length = int(self.lengths[usable])
        room = length - clip_span(self.num_frames, self.frame_stride)
        start = int(rng(seed, "window", epoch, position).integers(room + 1)) if room > 0 else 0
        return self._steps(start, length)

    def even_windows(self, usable: int, count: int) -> list[NDArray[np.int64]]:
        """``count`` times int64 ``[T]``: windows evenly spaced over the episode; a single one in its middle."""
        return [self.even_window(usable, number, count) for number in range(count)]

    def even_window(self, usable: int, number: int, count: int) -> NDArray[np.int64]:
        """int64 ``[T]``: window ``number`` of ``even_windows``, without the others."""
        room = int(self.windows([usable])[0]) - 1
        start = room // 2 if count == 1 else round(number * room / (count - 1))
        return self._steps(start, int(self.lengths[usable]))

    def windows(self, usable: Sequence[int] | slice = slice(None)) -> NDArray[np.int64]:
        """int64: distinct windows of each usable episode, one for each start that fits."""
        span = clip_span(self.num_frames, self.frame_stride)
        return np.maximum(self.lengths[usable] - span, 0) + 1

    def _steps(self, start: int, length: int) -> NDArray[np.int64]:
        steps = start + np.arange(self.num_frames, dtype=np.int64) * self.frame_stride
        return np.minimum(steps, length - 1)


def index_clips(source: EpisodeSource, *, num_frames: int, frame_stride: int, pad_short: PadShort) -> ClipIndex:
    """The usable episodes of ``source``.

    Episodes shorter than a clip are left out (``pad_short="drop"``) or kept with their last frame repeated
    (``"repeat"``); either way they are counted. Raises UserError where nothing is left.
    """
    lengths = np.asarray(source.lengths, dtype=np.int64)
    span = clip_span(num_frames, frame_stride)
    short = lengths < span
    usable = lengths > 0 if pad_short == "repeat" else ~short
    if not usable.any():
        longest = int(lengths.max(initial=0))
        remedy = "set data.pad_short=repeat or a smaller frame_stride" if longest else "add videos that can be decoded"
        raise UserError(
            f"{source.name} ({source.path}) has no episode long enough: {num_frames} frames at stride "
            f"{frame_stride} need {span} stored frames and the longest of its {len(lengths)} episodes has "
            f"{longest}; {remedy}"
        )
    return ClipIndex(
        name=source.name,
        version=source.version,
        num_frames=num_frames,
        frame_stride=frame_stride,
        episodes=np.flatnonzero(usable).astype(np.int64, copy=False),
        lengths=lengths[usable],
        dropped_short=int((~usable).sum()),
        padded_short=int((usable & short).sum()),
    )
