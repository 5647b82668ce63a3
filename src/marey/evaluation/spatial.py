"""Several square views of every frame along its longer side, as published frozen evaluations take them.

Legend: T frames, H and W pixels, S the shorter of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from marey.core.errors import UserError
from marey.pixels.episodes import EpisodeSource, FrameRequest
from marey.pixels.reading import Refusal, read_clips


class SpatialViews:
    """A source of squares: episode ``e * views + v`` is view ``v`` of episode ``e`` of another source.

    The views lie evenly along the longer side, from its start to its end. Requests that differ in the view alone are
    read once.
    """

    def __init__(self, source: EpisodeSource, views: int) -> None:
        assert views >= 2, views
        self.source, self.views = source, views
        self.name, self.path, self.rate = source.name, source.path, source.rate
        self.version = f"{source.version}, {views} views"
        self.lengths = np.repeat(source.lengths, views)
        self.labels = None if source.labels is None else np.repeat(source.labels, views)
        self.files = [file for file in source.files for _ in range(views)]

    def read(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor]:
        """uint8 ``[T, 3, S, S]`` for each request."""
        found = []
        for each in self.read_each(requests):
            if isinstance(each, UserError):
                raise each
            found.append(each)
        return found

    def read_each(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor | UserError]:
        """As ``read``, with the error of a clip that cannot be read in its place."""
        wanted = [(episode // self.views, steps) for episode, steps in requests]
        clips = {(episode, steps.tobytes()): FrameRequest(episode, steps) for episode, steps in wanted}
        read = dict(zip(clips, read_clips(self.source, list(clips.values())), strict=True))
        found: list[torch.Tensor | UserError] = []
        for request, (episode, steps) in zip(requests, wanted, strict=True):
            frames = read[episode, steps.tobytes()]
            if isinstance(frames, Refusal):
                found.append(UserError(frames.reason))
            else:
                found.append(square(frames, request.episode % self.views, self.views))
        return found


def square(frames: torch.Tensor, view: int, views: int) -> torch.Tensor:
    """``[T, 3, H, W]`` -> ``[T, 3, S, S]``: view 0 begins where the longer side does, the last ends where it ends."""
    height, width = frames.shape[-2:]
    side = min(height, width)
    start = round((max(height, width) - side) * view / (views - 1))
    if width > height:
        return frames[..., start : start + side]
    return frames[..., start : start + side, :]
