"""What every source of episodes offers, whether frames come from a store or straight from video files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class FrameRequest(NamedTuple):
    """Frames of one episode, by their stored steps (0 is the episode's first frame)."""

    episode: int
    steps: NDArray[np.int64]


class EpisodeSource(Protocol):
    """Episodes by index ``0..len(lengths)-1``. Pickles cheaply; readers open inside the process that reads."""

    name: str
    path: str
    version: str
    """Changes whenever the content does; caches are keyed by it."""
    lengths: NDArray[np.int64]
    """``[episodes]``: stored frames of each."""
    labels: NDArray[np.int64] | None
    """``[episodes]``, or None where the source has no labels; -1 for an unlabelled episode."""
    files: list[str]
    """``[episodes]``: the video file each episode came from; what held-out splits go by. Where a store does not
    say, the episode's own name (``episode 12``)."""
    rate: float | None
    """Stored frames per second; None where the store does not say."""

    def read(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor]:
        """uint8 ``[T, 3, H, W]`` for each request, in order, all requests in one pass over the storage."""
        ...
