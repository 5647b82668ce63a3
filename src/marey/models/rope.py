"""Where a token is: rotary tables over (t, h, w), and fixed sine-cosine embeddings for encoders without them.

Legend: M tokens (or M = 1 row for [CLS]), H heads, d channels of one head, n channels of one axis, D width.

Rotary positions (Su et al. 2021, arXiv 2104.09864) over three axes: each axis has ``n =
2*floor(floor(d/3)/2)`` channels with the frequencies ``10000 ** (-i/(n/2))``, i = 0 .. n/2-1; channels that
are left over do not turn. Adjacent channels (2i, 2i+1) form a pair, and a token at position p becomes ``x*cos
+ pairswap(x)*sin`` with ``pairswap(x)[2i] = -x[2i+1]`` and ``pairswap(x)[2i+1] = x[2i]``. The two layouts
differ in which frequency a channel c of an axis has:

- ``rotary``: frequency ``c // 2``, so both channels of a pair turn by one angle. A true rotation: the score
  of a query and a key depends on nothing but the difference of their positions.
- ``tiled``: frequency ``c mod (n/2)``, the half-vector tiled twice. The channels of a pair turn by two
  different angles, which is no rotation: scores depend on absolute positions too. The published weights were
  trained with it, so they work with it alone.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

RopeLayout = Literal["tiled", "rotary"]

THETA = 10_000.0
AXES = 3


def axis_channels(head_dim: int) -> int:
    """Channels of one head that one axis turns: ``2*floor(floor(head_dim/3)/2)`` (64 -> 20, 80 -> 26)."""
    return 2 * (head_dim // AXES // 2)


def _frequencies(half: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[half]``: ``THETA ** (-i/half)``."""
    steps = torch.arange(half, dtype=dtype, device=device)
    return THETA ** (-steps / half)


def _angle_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rotary_tables(positions: Tensor, *, head_dim: int, layout: RopeLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of tokens at integer ``positions`` ``[..., 3]``: two tensors ``[...,
    head_dim]``.

    The sign of ``pairswap`` is folded into the sine, so that rotating is ``x*cos + swap(x)*sin`` with a plain
    swap of the channels of each pair. Channels that do not turn have cosine 1 and sine 0. The tables are
    float64 for ``dtype`` float64 and float32 for everything else: half precision cannot tell the angles of
    neighbours apart.
    """
    n = axis_channels(head_dim)
    dtype = _angle_dtype(dtype)
    frequencies = _frequencies(n // 2, dtype=dtype, device=positions.device)
    frequencies = frequencies.repeat(2) if layout == "tiled" else frequencies.repeat_interleave(2)
    angles = (positions.to(dtype).unsqueeze(-1) * frequencies).flatten(-2)
    angles = torch.nn.functional.pad(angles, (0, head_dim - AXES * n))
    sign = torch.tensor([-1.0, 1.0], dtype=dtype, device=positions.device).repeat(head_dim // 2)
    return angles.cos(), angles.sin() * sign


def _swap(x: Tensor) -> Tensor:
    """``[..., d]`` with the channels (2i, 2i+1) of every pair exchanged, contiguous."""
    pairs = x.view(*x.shape[:-1], -1, 2)
    return torch.stack((pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> Tensor:
    """``x*cos + swap(x)*sin`` into ``out`` of the shape and dtype of ``x`` ``[..., d]``; tables broadcast to
    it.

    Computed in the precision of the tables. ``out`` may be ``x``. No gradient: see ``rotate_back``.
    """
    swapped = _swap(x)
    if x.dtype == cos.dtype:
        return torch.mul(x, cos, out=out).addcmul_(swapped, sin)
    return out.copy_((x * cos).addcmul_(swapped, sin))


def rotate_back(grad: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> Tensor:
    """The transpose of ``rotate``: the gradient at ``x`` from the gradient at the result, into ``out``."""
    # Swapping is its own transpose, so here the sine multiplies before the swap.
    swapped = _swap(grad * sin)
    if grad.dtype == cos.dtype:
        return torch.mul(grad, cos, out=out).add_(swapped)
    return out.copy_((grad * cos).add_(swapped))


def sincos_embedding(positions: Tensor, *, width: int, dtype: torch.dtype) -> Tensor:
    """Fixed embeddings of integer ``positions`` ``[..., 3]``, to be added to tokens: ``[..., width]`` of
    ``dtype``.

    Each axis has ``n = axis_channels(width)`` channels, ``n/2`` sines then ``n/2`` cosines of the position
    times ``10000 ** (-i/(n/2))``, as in Vaswani et al. 2017 (arXiv 1706.03762); channels that are left over
    are 0.
    """
    n = axis_channels(width)
    angle_dtype = _angle_dtype(dtype)
    frequencies = _frequencies(n // 2, dtype=angle_dtype, device=positions.device)
    angles = positions.to(angle_dtype).unsqueeze(-1) * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return torch.nn.functional.pad(waves, (0, width - AXES * n)).to(dtype)
