"""A source of episodes held in memory, with episodes that refuse to be read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from marey.pixels.episodes import FrameRequest


class MemorySource:
    """Smooth moving pictures: pixels depend on episode, step, channel and place, so that any mix-up shows."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        size: tuple[int, int] = (40, 56),
        name: str = "memory",
        broken: Sequence[int] = (),
        labels: Sequence[int] | None = None,
    ) -> None:
        self.name, self.path, self.version, self.rate = name, f"/{name}", "1", 15.0
        self.lengths: NDArray[np.int64] = np.array(lengths, dtype=np.int64)
        self.labels = None if labels is None else np.array(labels, dtype=np.int64)
        self.files = [f"{name}_{episode}.mp4" for episode in range(len(lengths))]
        self.size, self.broken = size, set(broken)
        self.reads: list[int] = []

    def frame(self, episode: int, step: int) -> torch.Tensor:
        """uint8 ``[3, H, W]``."""
        height, width = self.size
        y, x = torch.arange(height).view(-1, 1) / height, torch.arange(width).view(1, -1) / width
        waves = [
            torch.sin(6.3 * ((1 + c) * y + (2 + episode % 5) * x) + 0.4 * step + 1.7 * episode + c) for c in range(3)
        ]
        return (127.5 + 100 * torch.stack(waves) + 27 * torch.sin(40 * x)).clamp(0, 255).to(torch.uint8)

    def read(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor]:
        self.reads.append(len(requests))
        for request in requests:
            if request.episode in self.broken:
                raise ValueError(f"frame {request.steps[0]} of {self.files[request.episode]} is not a JPEG")
        return [torch.stack([self.frame(request.episode, int(step)) for step in request.steps]) for request in requests]
