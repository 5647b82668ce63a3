"""How sure a measured accuracy is: the unit is the video, never the clip."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from marey.core.keys import rng

Z95 = 1.959963984540054


def wilson(right: int, total: int) -> tuple[float, float]:
    """95% interval of a share, both ends in 0..1 (Wilson, JASA 22, 1927); sensible at 0 and at ``total``."""
    share, z2 = right / total, Z95**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    # Clipped so that rounding cannot put the share itself outside its interval at 0 and 1.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def paired_gain(
    right_a: NDArray[np.bool_], right_b: NDArray[np.bool_], *, seed: int, draws: int = 2000
) -> tuple[float, float, float]:
    """``share(a) - share(b)`` on the same videos, and its 95% interval by bootstrap over videos.

    right_a, right_b: ``[videos]``, whether each was classified rightly. Returns (gain, low, high), in -1..1.
    Paired, because the two share their hard and easy videos: the interval of the difference is narrower than
    the two intervals suggest.
    """
    difference = right_a.astype(np.float64) - right_b.astype(np.float64)
    chosen = rng(seed, "probe-bootstrap").integers(0, len(difference), size=(draws, len(difference)))
    low, high = np.quantile(difference[chosen].mean(axis=1), [0.025, 0.975])
    return float(difference.mean()), float(low), float(high)
