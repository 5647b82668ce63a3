"""Adaptive layer norm (Peebles and Xie 2023, arXiv 2212.09748), one modulation per temporal position.

Legend: F temporal positions, S tokens of each, D width, W width of the time wave.

The noise level belongs to a frame, so its embedding and everything derived from it is computed once per position and
broadcast to that position's tokens: S times less work and memory than per token, and the same numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-6
TIME_WAVE = 256
"""Channels of the sine-cosine embedding of time."""
TIME_PERIOD = 10_000.0
"""The longest wavelength, over 2 pi, in units of model time (0..1000)."""


def time_wave(times: Tensor) -> Tensor:
    """Model times ``[F]`` (0..1000) -> ``[F, TIME_WAVE]``, cosines then sines, at least float32."""
    half = TIME_WAVE // 2
    real = torch.float64 if times.dtype == torch.float64 else torch.float32
    steps = torch.arange(half, dtype=real, device=times.device)
    angles = times.to(real).unsqueeze(-1) * torch.exp(-math.log(TIME_PERIOD) * steps / half)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimeEmbedding(nn.Module):
    """Model time to the vector that every modulation is made of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(TIME_WAVE, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, times: Tensor) -> Tensor:
        """``[F]`` -> ``[F, D]``, already through the SiLU that every modulation starts with."""
        wave = time_wave(times).to(self.fc1.weight.dtype)
        return functional.silu(self.fc2(functional.silu(self.fc1(wave))))


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm without parameters, then ``* (1 + scale) + shift``: ``[F*S, D]`` with ``[F, D]`` twice."""
    normed = functional.layer_norm(x, x.shape[-1:], eps=EPS).reshape(len(shift), -1, x.shape[-1])
    return (normed * (1 + scale).unsqueeze(1) + shift.unsqueeze(1)).flatten(0, 1)


def gated_add(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """``x + gate * branch``: ``[F*S, D]``, ``[F, D]``, ``[F*S, D]``."""
    gated = branch.reshape(len(gate), -1, x.shape[-1]) * gate.unsqueeze(1)
    return x + gated.flatten(0, 1)
