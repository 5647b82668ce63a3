"""Patches, their grid positions and the keep-set: what the loader ships and the encoder reads.

Legend: B clips, V local views, N sequences, K kept tokens, C=3 channels, T frames, P = C*tubelet*patch*patch.
A patch is flattened in the order ``(C, tubelet, patch, patch)``, the order of ``patch_embed.proj.weight``
``[D, C, tubelet, patch, patch]``, so that embedding gathered patches is one matrix product.
Tokens are numbered frame by frame, row by row: ``(t * rows + h) * columns + w``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from marey.core.keys import rng
from marey.core.tokencount import DropMode, kept_count


class TokenGroup(NamedTuple):
    """Sequences of equal length: the kept tokens of one kind of view.

    patches: uint8 or floating ``[N, K, P]``. positions: int64 ``[N, K, 3]``, grid position (t, h, w), sorted by t.
    """

    patches: torch.Tensor
    positions: torch.Tensor


class ViewChunk(NamedTuple):
    """What the loader ships for b consecutive clips of one micro-step.

    views_global: N = b. views_local: N = b * V, clip-major (clip 0's V views first); K may be 0 when V = 0.
    clips: int64 ``[b, 5]``: source index, episode index within the source, first stored step of the window,
    epoch, position within the epoch.
    replaced: int64 ``[n, 3]``: source index, episode that could not be read, episode of the same source that
    stands in for it; n is 0 as a rule. reasons: n sentences, each naming the file and why it was refused.
    """

    views_global: TokenGroup
    views_local: TokenGroup
    clips: torch.Tensor
    replaced: torch.Tensor
    reasons: list[str]


def grid_shape(frames: int, height: int, width: int, *, patch: int, tubelet: int) -> tuple[int, int, int]:
    """Tokens along (t, h, w). Sizes must divide; asserted, since the configuration was checked before."""
    assert frames % tubelet == 0, (frames, tubelet)
    assert height % patch == 0, (height, patch)
    assert width % patch == 0, (width, patch)
    return frames // tubelet, height // patch, width // patch


def grid_positions(grid: tuple[int, int, int]) -> torch.Tensor:
    """int64 ``[t*h*w, 3]``: the (t, h, w) of every token, in token order."""
    axes = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    return torch.stack([axis.reshape(-1) for axis in axes], dim=-1)


def patchify(video: torch.Tensor, *, patch: int, tubelet: int) -> torch.Tensor:
    """``[N, C, T, H, W]`` -> ``[N, tokens, P]`` in token order, any dtype."""
    n, c, t, h, w = video.shape
    gt, gh, gw = grid_shape(t, h, w, patch=patch, tubelet=tubelet)
    blocks = video.reshape(n, c, gt, tubelet, gh, patch, gw, patch)
    return blocks.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(n, gt * gh * gw, c * tubelet * patch * patch)


def keep_indices(
    tokens: int,
    drop_rate: float,
    *,
    seed: int,
    epoch: int,
    position: int,
    view: int,
    mode: DropMode = "random",
    steps: int = 1,
) -> torch.Tensor:
    """int64 ``[kept]``, ascending: the tokens of this view of this sample that survive training's token drop.

    Uniform without replacement, keyed by (seed, "token-drop", epoch, position, view); view 0 is the global one.
    ``tube`` draws places of the image, and keeps them at each of the ``steps`` of time (which divide ``tokens``).
    """
    if mode == "tube":
        places = tokens // steps
        kept = keep_indices(places, drop_rate, seed=seed, epoch=epoch, position=position, view=view)
        return (torch.arange(steps)[:, None] * places + kept).reshape(-1)
    keep = kept_count(tokens, drop_rate)
    if keep == tokens:
        return torch.arange(tokens)
    drawn = rng(seed, "token-drop", epoch, position, view).permutation(tokens)[:keep]
    drawn.sort()
    return torch.from_numpy(drawn.astype("int64", copy=False))
