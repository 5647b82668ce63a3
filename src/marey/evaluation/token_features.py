"""All patch tokens of many clips, in half precision and possibly on disk, read a few clips at a time.

Legend: m clips that are stored, n clips of a selection, N tokens of a clip, D features of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

CHUNK = 64
"""Clips held in float32 at a time where a statistic runs over all of them."""


@dataclass(frozen=True)
class Tokens:
    """A selection of clips. Stored values are the features less ``offset``: half precision then keeps what differs
    between tokens, which may be small beside what all of them share.
    """

    values: NDArray[np.float16]
    """``[m, N, D]``; a memory map where they lie on disk."""
    offset: NDArray[np.float32]
    """``[D]``."""
    rows: NDArray[np.int64]
    """``[n]``: which stored clips these are."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """D."""
        return int(self.values.shape[2])

    def take(self, kept: Sequence[int] | NDArray[np.int64]) -> Tokens:
        """The selected clips at these places; nothing is read."""
        return Tokens(self.values, self.offset, self.rows[np.asarray(kept, dtype=np.int64)])

    def batch(self, places: Sequence[int] | NDArray[np.int64], *, device: torch.device | str = "cpu") -> torch.Tensor:
        """float32 ``[len(places), N, D]``."""
        stored = torch.from_numpy(self.values[self.rows[places]]).to(device)
        return stored.float().add_(torch.from_numpy(self.offset).to(device))

    def spread(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``[D]`` each: mean and standard deviation over all tokens of the selected clips."""
        total, squares = np.zeros(self.width), np.zeros(self.width)
        for start in range(0, len(self), CHUNK):
            stored = torch.from_numpy(self.values[self.rows[start : start + CHUNK]]).flatten(0, 1).double()
            total += stored.sum(0).numpy()
            squares += stored.square().sum(0).numpy()
        count = len(self) * self.values.shape[1]
        mean = total / count  # of what is stored, which lies around 0, so that the squares do not cancel
        return mean + self.offset, np.sqrt(np.maximum(squares / count - mean**2, 0))
