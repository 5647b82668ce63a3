"""A source of episodes with its frames cut square and shrunk, for latents small enough to train on without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from marey.pixels.episodes import EpisodeSource, FrameRequest
from marey.pixels.evalclips import short_side_centre_crop


@dataclass(frozen=True)
class Shrunk:
    """The first ``episodes`` of ``source`` (None: all of them), every frame ``side`` pixels square."""

    source: EpisodeSource
    side: int
    episodes: int | None = None

    @property
    def name(self) -> str:
        """The source's."""
        return self.source.name

    @property
    def version(self) -> str:
        """The source's, and what is made of it."""
        return f"{self.source.version} side={self.side} episodes={len(self.lengths)}"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 ``[episodes]``: frames of each."""
        return self.source.lengths[: self.episodes]

    @property
    def files(self) -> list[str]:
        """The video of each."""
        return self.source.files[: self.episodes]

    @property
    def rate(self) -> float | None:
        """Frames per second."""
        return self.source.rate

    def read(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor]:
        """uint8 ``[T, 3, side, side]`` for each request, shrunk as clips are for evaluation."""
        return [short_side_centre_crop(frames, self.side) for frames in self.source.read(requests)]
