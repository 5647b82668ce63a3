"""A source of episodes whose colour follows their label."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from marey.pixels.episodes import FrameRequest


class ColouredSource:
    """Episodes of one colour each, brightening over time; colour follows the label."""

    def __init__(
        self, labels: Sequence[int], *, length: int = 8, rate: float | None = 15.0, folder: str = "/data"
    ) -> None:
        self.name, self.path, self.rate = "memory", folder, rate
        self.lengths = np.full(len(labels), length, dtype=np.int64)
        self.labels = np.array(labels, dtype=np.int64)
        self.files = [f"{folder}/{i:03d}.mp4" for i in range(len(labels))]
        self.unreadable: set[int] = set()

    @property
    def version(self) -> str:
        """Whatever decides the pixels."""
        return f"{self.lengths.tolist()} {self.labels.tolist()} {sorted(self.unreadable)}"

    def read(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor]:
        clips = []
        for episode, steps in requests:
            if episode in self.unreadable:
                raise ValueError("a broken frame")
            noise = np.random.default_rng(episode).integers(0, 60, size=(len(steps), 3, 20, 24))
            noise[:, int(self.labels[episode]) % 3] += 120
            clips.append(torch.from_numpy((noise + np.asarray(steps)[:, None, None, None] * 4).astype(np.uint8)))
        return clips
