"""FlexAttention (CUDA): the isolation predicate as a table of tiles and a mask for the tiles that straddle.

A tile is TILE queries by TILE keys. Its entry is decided on the CPU from the labels of the units it overlaps, by
prefix sums over unit pairs, so nothing of size tokens^2 is ever made and the device is never waited for. Tiles that
are invisible are skipped, visible ones run without a mask, straddling ones run the predicate token by token. The
straddling tiles are the price of this kernel: ``tile_pairs`` counts it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from marey.batching.segments import AttentionLayout, Units
from marey.batching.visibility import Labels, may_see, visibility_matrix

TILE = 128


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


def _tile_table(layout: AttentionLayout) -> Tiles:
    seen = visibility_matrix(layout.queries.labels, layout.keys.labels)
    sums = torch.zeros((seen.shape[0] + 1, seen.shape[1] + 1), dtype=torch.int64)
    sums[1:, 1:] = seen.to(torch.int64).cumsum(0).cumsum(1)
    (q0, q1), (k0, k1) = _unit_ranges(layout.queries), _unit_ranges(layout.keys)
    count = sums[q1][:, k1] - sums[q0][:, k1] - sums[q1][:, k0] + sums[q0][:, k0]
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


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def _cached_mask(layout: AttentionLayout, device: torch.device) -> BlockMask:
    # One layout serves every layer of a forward pass; its table is made once.
    masks: dict[torch.device, BlockMask] = layout.__dict__.setdefault("_block_masks", {})
    if device not in masks:
        masks[device] = block_mask(layout, device)
    return masks[device]


def flex_isolated_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
    """``[Nq, H, d]``, ``[Nk, H, d]``, ``[Nk, H, d]`` -> ``[Nq, H, d]`` on one CUDA device."""
    mask = _cached_mask(layout, q.device)
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out: Tensor = _compiled()(*heads_first, block_mask=mask)
    return out.squeeze(0).transpose(0, 1)
