"""From clips to videos: the probabilities of a video's clips are averaged before its class is read off.

Legend: m clips, U videos, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Videos:
    """The videos behind some clips. A video whose episodes differ in label counts once for each label."""

    of_clip: NDArray[np.int64]
    """``[m]``: which video."""
    truth: NDArray[np.int64]
    """``[U]``: class numbers."""

    @classmethod
    def of(cls, names: Sequence[str], y: NDArray[np.int64]) -> Videos:
        """names, y: ``[m]``, the video and class of each clip."""
        units = sorted(set(zip(names, y.tolist(), strict=True)))
        place = {unit: i for i, unit in enumerate(units)}
        return cls(
            np.array([place[unit] for unit in zip(names, y.tolist(), strict=True)], dtype=np.int64),
            np.array([number for _, number in units], dtype=np.int64),
        )

    def mean(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of clips ``[m, K]`` -> of videos ``[U, K]``."""
        summed = np.zeros((len(self.truth), probabilities.shape[1]))
        np.add.at(summed, self.of_clip, probabilities)
        return np.asarray(summed / np.bincount(self.of_clip, minlength=len(self.truth))[:, None])

    def right(self, probabilities: NDArray[np.float64]) -> NDArray[np.bool_]:
        """bool ``[U]``: whether each video is classified rightly by its clips' probabilities ``[m, K]``."""
        return np.asarray(self.mean(probabilities).argmax(axis=1) == self.truth)
