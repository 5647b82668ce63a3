"""Time stamps to a regular grid: which frame is on screen at each of the times ``k / rate``.

Nothing here trusts a header: the only input is the time stamp of each decoded frame, in the order they are shown.
Arithmetic is exact (fractions), so the grid does not drift over hours.
"""

from __future__ import annotations

import math
from fractions import Fraction

MAX_HOLD_S = 10
"""A frame held longer than this (or a stamp that runs backwards) is a break in the clock, not a long frame: the
time line goes on after one average frame, and the break is counted."""


MIN_RATE = 0.001
"""Stored frames per second; below it a rate is no longer a small fraction."""


def as_fraction(rate: float) -> Fraction:
    """``29.97`` -> 2997/100, ``15.0`` -> 15."""
    return Fraction(rate).limit_denominator(100_000)


class Timeline:
    """Feed time stamps with ``push``; each call says how many grid steps the *previous* frame covers.

    Step k belongs to the last frame whose time is at most ``t0 + k / rate``, t0 being the first frame's. Container
    clocks round (24 frames/s in milliseconds is 0, 42, 83, ...), so a frame counts from one clock tick early, at
    most a twentieth of the time since the frame before it. The last frame lasts as long as the average one, or as
    the one before it if that is shorter (where frames in the middle are lost, the average is long).
    """

    def __init__(self, *, rate: Fraction, time_base: Fraction) -> None:
        self._rate, self._tick = rate, time_base
        self._stamp: int | Fraction | None = None
        self._gap = Fraction(0)  # between the last two frames
        self._now = Fraction(0)  # of the frame pushed last, since the first
        self.seconds = Fraction(0)  # to the end of the last frame, once finished
        self.frames = 0
        self.steps = 0
        self.repeats = 0
        self.breaks = 0

    def _average(self) -> Fraction:
        return self._now / (self.frames - 1) if self._now else 1 / self._rate

    def _cover(self, until: Fraction, gap: Fraction) -> int:
        early = min(self._tick, gap / 20)
        count = max(0, math.ceil((until - early) * self._rate) - self.steps)
        self.steps += count
        self.repeats += max(0, count - 1)
        return count

    def push(self, stamp: int | None) -> int:
        """Grid steps of the frame before this one (0 for the first call). ``stamp`` in ticks, None if absent."""
        if self.frames == 0:
            self.frames, self._stamp = 1, stamp
            return 0
        gap: Fraction | None = None
        if stamp is not None and self._stamp is not None:
            gap = (stamp - self._stamp) * self._tick
        if gap is None or not 0 <= gap <= MAX_HOLD_S:
            self.breaks += 1
            gap = self._average()
        until = self._now + gap
        count = self._cover(until, gap)
        self.frames += 1
        self._now, self._gap = until, gap
        if stamp is not None:
            self._stamp = stamp
        elif self._stamp is not None:
            self._stamp += gap / self._tick  # where the absent stamp would have been
        return count

    def finish(self) -> int:
        """Grid steps of the last frame."""
        if self.frames == 0:
            return 0
        gap = min(self._average(), self._gap or self._average())
        self.seconds = self._now + gap
        return self._cover(self._now + gap, gap)

    def true_rate(self) -> float | None:
        """Average source frames per second; None for fewer than two frames in time."""
        return float((self.frames - 1) / self._now) if self._now else None
