"""FlexAttention (CUDA): the isolation predicate as a table of tiles and a mask for the tiles that straddle.

A tile is TILE queries by TILE keys. Its entry is decided on the CPU from the labels of the units it overlaps, by
prefix sums over the unit pairs of each sequence, so nothing of size tokens^2 or (units of a batch)^2 is ever made
and the device is never waited for. Tiles that are invisible are skipped, visible ones run without a mask, straddling
ones run the predicate token by token. The straddling tiles are the price of this kernel: ``tile_pairs`` counts it.

The kernel is compiled once for a shape family: heads, channels, dtype, with or without gradient, one tile or several,
queries that are the keys or others. Lengths of batches are symbols in it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from marey.batching.segments import AttentionLayout, Units
from marey.batching.visibility import Labels, may_see, visibility_matrix
from marey.core.errors import UserError

TILE = 128

SMALLEST_HEAD = 16
"""Channels of a head below which the kernel has no matrix product."""

COMPILATION: dict[str, Any] = {"fullgraph": True, "dynamic": True}
"""How the kernel is compiled. ``dynamic``: every batch has lengths of its own. ``fullgraph``: beyond the limit on
variants torch would otherwise run the eager version without a word, which makes all pairs of the packed batch."""

VARIANTS = 64
"""Shape families of one process (torch's own limit of 8 is reached by one model that trains and validates)."""


class Tiles(NamedTuple):
    """bool ``[query tiles, key tiles]`` each."""

    straddling: Tensor
    """some pairs of the tile are visible, or it reaches beyond the last token"""
    visible: Tensor
    """all pairs of the tile are visible"""


def _unit_ranges(units: Units) -> tuple[Tensor, Tensor]:
    """First unit, and one past the last, that every tile overlaps; int64 ``[tiles]`` each."""
    ends = units.tokens.cumsum(0)
    total = int(ends[-1])
    first = torch.arange(0, total, TILE)
    last = (first + TILE).clamp(max=total) - 1
    return torch.searchsorted(ends, first, right=True), torch.searchsorted(ends, last, right=True) + 1


def tile_table(layout: AttentionLayout) -> Tiles:
    """Which tiles are computed, and which of them need the predicate; made once for a layout."""
    known: Tiles | None = layout.__dict__.get("_tiles")
    if known is None:
        known = layout.__dict__["_tiles"] = _tile_table(layout)
    return known


class _Own(NamedTuple):
    """One sequence's units among those of all."""

    units: slice
    tiles: slice
    """tiles that hold tokens of it"""


def _sequences(units: Units) -> list[_Own]:
    starts = [0, *units.tokens.cumsum(0).tolist()]
    found, unit = [], 0
    for count in units.per_sequence:
        first, end = starts[unit], starts[unit + count]
        found.append(_Own(slice(unit, unit + count), slice(first // TILE, -(-end // TILE))))
        unit += count
    return found


def _tile_table(layout: AttentionLayout) -> Tiles:
    (q0, q1), (k0, k1) = _unit_ranges(layout.queries), _unit_ranges(layout.keys)
    count = torch.zeros((len(q0), len(k0)), dtype=torch.int64)
    # A sequence sees itself alone: its own unit pairs are all that can be visible.
    for q, k in zip(_sequences(layout.queries), _sequences(layout.keys), strict=True):
        seen = visibility_matrix(layout.queries.labels.at(q.units), layout.keys.labels.at(k.units))
        sums = torch.zeros((seen.shape[0] + 1, seen.shape[1] + 1), dtype=torch.int64)
        sums[1:, 1:] = seen.to(torch.int64).cumsum(0).cumsum(1)
        rows = [(ends[q.tiles] - q.units.start).clamp(0, seen.shape[0]) for ends in (q0, q1)]
        columns = [(ends[k.tiles] - k.units.start).clamp(0, seen.shape[1]) for ends in (k0, k1)]
        strips = sums[rows[1]] - sums[rows[0]]
        count[q.tiles, k.tiles] += strips[:, columns[1]] - strips[:, columns[0]]
    area = (q1 - q0).unsqueeze(1) * (k1 - k0).unsqueeze(0)
    whole_q = torch.arange(1, len(q0) + 1) * TILE <= int(layout.queries.tokens.sum())
    whole_k = torch.arange(1, len(k0) + 1) * TILE <= int(layout.keys.tokens.sum())
    visible = (count == area) & whole_q.unsqueeze(1) & whole_k.unsqueeze(0)
    return Tiles((count > 0) & ~visible, visible)


def tile_pairs(layout: AttentionLayout) -> int:
    """Query-key pairs that this kernel computes, straddling tiles in full."""
    tiles = tile_table(layout)
    return int((tiles.straddling | tiles.visible).sum()) * TILE * TILE


def _rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """A tile table as (how many, which first) per row: int32 ``[1, 1, rows]`` and ``[1, 1, rows, columns]``."""
    which = table.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return table.sum(1, dtype=torch.int32)[None, None], which.to(torch.int32)[None, None]


def block_mask(layout: AttentionLayout, device: torch.device) -> BlockMask:
    """The layout as FlexAttention reads it, on ``device``."""
    queries, keys = layout.query_labels.to(device), layout.key_labels.to(device)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001 (FlexAttention's signature)
        return may_see(Labels(*(f[q] for f in queries)), Labels(*(f[k] for f in keys)))

    tiles = tile_table(layout)
    some_count, some = (t.to(device, non_blocking=True) for t in _rows(tiles.straddling))
    full_count, full = (t.to(device, non_blocking=True) for t in _rows(tiles.visible))
    return BlockMask.from_kv_blocks(
        some_count,
        some,
        full_count,
        full,
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(len(queries.sample), len(keys.sample)),
    )


def cached_mask(layout: AttentionLayout, device: torch.device) -> BlockMask:
    """``block_mask``, made once for a layout: one layout serves every layer of a forward pass."""
    masks: dict[torch.device, BlockMask] = layout.__dict__.setdefault("_block_masks", {})
    if device not in masks:
        masks[device] = block_mask(layout, device)
    return masks[device]


def padded_head(channels: int) -> int:
    """Channels that the kernel is given for heads of ``channels``: the next power of two, at least 16.

    It computes with that many in any case, and its tile sizes are tuned, and fit shared memory, for these numbers.
    """
    return max(SMALLEST_HEAD, 1 << (channels - 1).bit_length())


def padded_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """``[1, H, Nq, d]``, ``[1, H, Nk, d]``, ``[1, H, Nk, d]`` -> ``[1, H, Nq, d]``, scores scaled by ``d ** -0.5``.

    Zeros in the channels beyond d add nothing to a score, and what they give is cut off.
    """
    channels = q.shape[-1]
    missing = padded_head(channels) - channels
    if missing:
        q, k, v = (pad(x, (0, missing)) for x in (q, k, v))
    out = flex_attention(q, k, v, block_mask=mask, scale=channels**-0.5)
    assert isinstance(out, Tensor)
    return out[..., :channels]


@cache
def compiled_attention() -> Any:
    """``padded_attention`` as a kernel, the same for every layout."""
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, VARIANTS)
    return torch.compile(padded_attention, **COMPILATION)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """``[N, H, d]`` -> ``[1, H, N, d]``, heads and channels fixed for the compiler and lengths not."""
    turned = [x.transpose(0, 1).unsqueeze(0) for x in tensors]
    for x in turned:
        torch._dynamo.mark_static(x, 1)
        torch._dynamo.mark_static(x, 3)
    return turned


def flex_isolated_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
    """``[Nq, H, d]``, ``[Nk, H, d]``, ``[Nk, H, d]`` -> ``[Nq, H, d]`` on one CUDA device, in float32 or less.

    Raises:
        UserError: for float64, in which the kernel cannot sum.
    """
    if q.dtype == torch.float64:
        raise UserError(
            "attention on CUDA (FlexAttention) sums in float32, so it has nothing to offer a run in float64; set "
            "trainer.precision=32-true, or trainer.accelerator=cpu for float64"
        )
    out: Tensor = compiled_attention()(*heads_first(q, k, v), cached_mask(layout, q.device))
    return out.squeeze(0).transpose(0, 1)
