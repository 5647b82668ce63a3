"""How many frames of a window are given and how many are to be predicted: the same window, always the same.

A window's geometry is picked from the configured (prefix, future) buckets, among those that fit into the
frames that its clip still has, by a hash of seed, clip and start. So it depends on no draw, batch-mate or
epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from marey.core.keys import derive
from marey.core.mixing import mix64


class Bucket(NamedTuple):
    """Latent frames given (prefix) and predicted (future)."""

    prefix: int
    future: int

    @property
    def frames(self) -> int:
        """Frames of the whole window."""
        return self.prefix + self.future


class Geometry:
    """Picks a bucket for any window. The order in which buckets are configured does not matter."""

    def __init__(self, buckets: Sequence[Sequence[int]], *, seed: int) -> None:
        ordered = sorted({Bucket(*pair) for pair in buckets}, key=lambda b: (b.frames, b.prefix))
        assert ordered, "at least one bucket"
        assert all(b.prefix >= 1 and b.future >= 1 for b in ordered), ordered
        self.buckets = tuple(ordered)
        self._prefix = np.array([b.prefix for b in ordered], dtype=np.int64)
        self._future = np.array([b.future for b in ordered], dtype=np.int64)
        self._frames = self._prefix + self._future
        self._key = derive(seed, "geometry")

    @property
    def shortest(self) -> int:
        """Frames of the shortest bucket: what a window needs at least."""
        return int(self._frames[0])

    @property
    def longest(self) -> int:
        """Frames of the longest bucket."""
        return int(self._frames[-1])

    def pick(
        self, clip_keys: NDArray[np.uint64], starts: NDArray[np.int64], available: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(prefix, future), int64 ``[k]`` each, of the windows at ``starts`` with ``available`` frames left.

        ``available`` must be at least ``shortest``.
        """
        fitting = np.searchsorted(self._frames, available, side="right").astype(np.uint64)
        assert fitting.size == 0 or fitting.min() >= 1, available
        mixed = mix64(mix64(clip_keys, self._key) + starts.astype(np.uint64))
        chosen = (mixed % fitting).astype(np.int64)
        return self._prefix[chosen], self._future[chosen]
