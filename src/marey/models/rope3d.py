"""Rotary positions of latent video tokens over (t, h, w), as one complex factor per pair of channels.

Legend: F positions in time, S tokens of each (h * w, row by row), N = F*S tokens, H heads, d channels of one head.

Rotary embedding (Su et al. 2021, arXiv 2104.09864) with adjacent channels as pairs. Of the d channels h and w get
``floor(d/3)`` rounded down to even each and t gets the rest, so every even d works and every channel turns. On an
axis of n channels the frequencies are ``10000 ** (-i/(n/2))``, i = 0 .. n/2-1.
"""

from __future__ import annotations

import torch
from torch import Tensor

THETA = 10_000.0


def axis_channels(head_dim: int) -> tuple[int, int, int]:
    """Channels of t, h and w; their sum is ``head_dim`` (64 -> 24, 20, 20)."""
    assert head_dim % 2 == 0, head_dim
    side = 2 * (head_dim // 3 // 2)
    return head_dim - 2 * side, side, side


def _angles(positions: Tensor, channels: int) -> Tensor:
    half = channels // 2
    steps = torch.arange(half, dtype=positions.dtype, device=positions.device)
    return positions.unsqueeze(-1) * THETA ** (-steps / max(half, 1))


def rotary_factors(frames: Tensor, *, rows: int, columns: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """``exp(i * angle)`` of every token: complex ``[F*S, 1, d/2]``.

    ``frames`` are the temporal positions ``[F]`` (integers, any order). Angles are float64 for ``dtype`` float64 and
    float32 for everything else: half precision cannot tell the angles of neighbours apart.
    """
    real = torch.float64 if dtype == torch.float64 else torch.float32
    t, h, w = axis_channels(head_dim)
    device = frames.device
    along_t = _angles(frames.to(real), t)
    along_h = _angles(torch.arange(rows, dtype=real, device=device), h)
    along_w = _angles(torch.arange(columns, dtype=real, device=device), w)
    grid = (len(frames), rows, columns)
    angles = torch.cat(
        (
            along_t[:, None, None].expand(*grid, -1),
            along_h[None, :, None].expand(*grid, -1),
            along_w[None, None, :].expand(*grid, -1),
        ),
        dim=-1,
    ).reshape(-1, 1, head_dim // 2)
    return torch.polar(torch.ones_like(angles), angles)


def rotate_pairs(x: Tensor, factors: Tensor) -> Tensor:
    """Turn ``x`` ``[N, H, d]`` by ``factors`` ``[N, 1, d/2]``; computed in their precision, dtype of ``x`` back."""
    real = torch.float64 if factors.dtype == torch.complex128 else torch.float32
    pairs = torch.view_as_complex(x.to(real).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors).flatten(-2).to(x.dtype)
