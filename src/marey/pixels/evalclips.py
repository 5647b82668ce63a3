"""Clips for evaluation: fixed windows, no augmentation, every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional

from marey.pixels.clips import PadShort, index_clips
from marey.pixels.episodes import EpisodeSource, FrameRequest
from marey.pixels.reading import ClipReader, Refusal
from marey.pixels.resample import resize


class EvalBatch(NamedTuple):
    """B clips that could be read; one that could not is missing here and named in ``refused``."""

    video: torch.Tensor
    """uint8 ``[B, 3, T, S, S]``."""
    episodes: NDArray[np.int64]
    """int64 ``[B]``: episode index within the source."""
    clips: NDArray[np.int64]
    """int64 ``[B]``: which of the episode's clips, from 0."""
    starts: NDArray[np.int64]
    """int64 ``[B]``: first stored step of the window."""
    labels: NDArray[np.int64]
    """int64 ``[B]``; -1 where the source has no label."""
    refused: list[Refusal]


def short_side_centre_crop(frames: torch.Tensor, size: int) -> torch.Tensor:
    """uint8 ``[T, 3, H, W]`` -> uint8 ``[T, 3, S, S]``: short side to S, bicubic; centre crop."""
    cropped: torch.Tensor = functional.center_crop(resize(frames, [size]), [size, size])
    return cropped


class EvalClips(Dataset[EvalBatch]):
    """``clips_per_episode`` evenly spaced clips of every usable episode of one source, episode by episode.

    An episode with fewer distinct clips gives each of them once (``capped`` counts these episodes). Works with
    a ``DataLoader`` and ``collate``. Raises UserError where no episode is long enough.
    """

    def __init__(
        self,
        source: EpisodeSource,
        *,
        num_frames: int,
        frame_stride: int,
        img_size: int,
        clips_per_episode: int = 1,
        pad_short: PadShort = "drop",
    ) -> None:
        assert clips_per_episode >= 1, clips_per_episode
        self.source, self.img_size, self.clips_per_episode = source, img_size, clips_per_episode
        self.num_frames = num_frames
        self._reader = ClipReader(source)
        self.index = index_clips(source, num_frames=num_frames, frame_stride=frame_stride, pad_short=pad_short)
        counts = np.minimum(self.index.windows(), clips_per_episode)
        self.capped = int((counts < clips_per_episode).sum())
        self._first = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def item(self, usable: int, clip: int) -> int:
        """The number under which clip ``clip`` of usable episode ``usable`` is found here."""
        return int(self._first[usable]) + clip

    def __getitem__(self, item: int) -> EvalBatch:
        """A batch of one clip."""
        return self.__getitems__([item])

    def __getitems__(self, items: Sequence[int]) -> EvalBatch:
        """The clips with these numbers, in order, less those that cannot be read."""
        labels = self.source.labels
        videos: list[torch.Tensor] = []
        rows: list[tuple[int, int, int, int]] = []
        refused: list[Refusal] = []
        for block in self._reader.blocks(items):
            requests, numbers = [], []
            for item in block:
                usable = int(np.searchsorted(self._first, item, side="right")) - 1
                clip = int(item - self._first[usable])
                steps = self.index.even_window(usable, clip, int(self._first[usable + 1] - self._first[usable]))
                requests.append(FrameRequest(int(self.index.episodes[usable]), steps))
                numbers.append(clip)
            for request, clip, frames in zip(requests, numbers, self._reader.read(requests), strict=True):
                if isinstance(frames, Refusal):
                    refused.append(frames)
                    continue
                videos.append(short_side_centre_crop(frames, self.img_size).movedim(1, 0))
                label = -1 if labels is None else int(labels[request.episode])
                rows.append((request.episode, clip, int(request.steps[0]), label))
        shape = (0, 3, self.num_frames, self.img_size, self.img_size)
        video = torch.stack(videos) if videos else torch.empty(shape, dtype=torch.uint8)
        table = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        episodes, clips, starts, label_row = table
        return EvalBatch(video, episodes, clips, starts, label_row, refused)
