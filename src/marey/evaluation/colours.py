"""Latents that no codec turns into pixels, as colours: their three strongest directions of variation.

Legend: C channels, T latent frames, H and W the latent canvas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TAIL = 0.01
"""Share of values at each end that a colour may clip, so that one outlier does not take the whole range."""


@dataclass(frozen=True)
class FeatureColours:
    """A map from channels to red, green and blue; the same map for every video that is to be compared."""

    mean: Tensor
    """float32 ``[C]``"""
    basis: Tensor
    """float32 ``[C, 3]``, columns beyond the channels there are, zero"""
    low: Tensor
    high: Tensor
    """float32 ``[3]``: what becomes 0 and 255"""
    cell: int
    """pixels drawn for one latent cell"""

    @classmethod
    def fit(cls, latents: Tensor, *, cell: int) -> FeatureColours:
        """Principal components of the cells of ``latents`` (floating ``[C, T, H, W]``), strongest first.

        A direction has no sign of its own: its largest entry is made positive, so that equal latents have equal
        colours.
        """
        rows = latents.detach().to("cpu", torch.float32).flatten(1).T  # [T*H*W, C]
        mean = rows.mean(dim=0)
        centred = rows - mean
        _, vectors = torch.linalg.eigh(centred.T @ centred)  # ascending
        strongest = vectors.flip(1)[:, :3]
        basis = torch.zeros(rows.shape[1], 3)
        basis[:, : strongest.shape[1]] = strongest
        largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
        basis = basis * torch.where(largest < 0, -1.0, 1.0)
        shown = centred @ basis
        low, high = (torch.quantile(shown, share, dim=0) for share in (TAIL, 1 - TAIL))
        return cls(mean, basis, low, high, cell)

    def decode(self, latents: Tensor) -> Tensor:
        """Floating ``[C, T, H, W]`` -> uint8 ``[T, 3, H*cell, W*cell]``."""
        values = latents.detach().to("cpu", torch.float32).movedim(0, -1) - self.mean
        span = (self.high - self.low).clamp_min(1e-12)
        unit = ((values @ self.basis - self.low) / span).clamp(0, 1)
        colours = (unit * 255).round().to(torch.uint8).movedim(-1, 1)  # [T, 3, H, W]
        return colours.repeat_interleave(self.cell, dim=2).repeat_interleave(self.cell, dim=3)
