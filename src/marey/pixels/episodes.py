"""What every source of episodes offers, whether frames come from a store or straight from video files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError

if TYPE_CHECKING:
    import torch


class FrameRequest(NamedTuple):
    """Frames of one episode, by their stored steps (0 is the episode's first frame)."""

    episode: int
    steps: NDArray[np.int64]


class SourceGoneError(UserError):
    """The source itself changed or went away while it was in use; nothing of it stands in for anything."""


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


@runtime_checkable
class ReadsEach(Protocol):
    """A source that knows which clip of several cannot be read, so that the others need not be read again."""

    def read_each(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor | UserError]:
        """As ``EpisodeSource.read``, with the error of a clip that cannot be read in its place."""
        ...
