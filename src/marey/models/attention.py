"""Attention inside sequences that lie one after another in one tensor, for groups of equally long sequences.

Legend: M tokens of all sequences, one after another; a group is N sequences of L tokens ([CLS] first, then K
= L-1 patch tokens); D = H*d width, H heads, d channels of one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from marey.models.rope import RopeLayout, rotary_tables, rotate, rotate_back

AttnMode = Literal["full", "block_causal"]

# Above this size a mask is checked for being the same for all sequences, so that one copy serves them all.
SHARED_MASK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Layout:
    """What every block of one forward pass shares: made once, read by all layers.

    groups: (N, L) of each group, in the order of the tokens. cos, sin: rotary tables ``[M, 1, 1, d]``, or
    None when the encoder has no rotary positions. masks: one per group, added to the scores: ``[N or 1, 1, L,
    L]`` with 0 (seen) and -inf (not), or None (all seen).
    """

    groups: tuple[tuple[int, int], ...]
    cos: Tensor | None
    sin: Tensor | None
    masks: tuple[Tensor | None, ...]

    def sizes(self) -> list[int]:
        """Tokens of each group."""
        return [n * length for n, length in self.groups]


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a Linear applied to ``x`` answers (autocast leaves float64 alone)."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def block_causal_mask(frames: Tensor, *, dtype: torch.dtype) -> Tensor:
    """``[N, 1, 1+K, 1+K]`` to add to the scores of [CLS] and patches of integer ``frames`` ``[N, K]``.

    A patch of frame i sees a patch of frame j iff j <= i. [CLS] (row 0) sees everything. No patch sees [CLS]:
    it has seen the last frame, and would tell the first one a layer later.
    """
    n, k = frames.shape
    seen = torch.zeros(n, 1 + k, 1 + k, dtype=torch.bool, device=frames.device)
    seen[:, 0] = True
    seen[:, 1:, 1:] = frames.unsqueeze(1) <= frames.unsqueeze(2)
    mask = torch.zeros(n, 1, 1 + k, 1 + k, dtype=dtype, device=frames.device)
    return mask.masked_fill_(~seen.unsqueeze(1), float("-inf"))


def plan_attention(
    positions: Sequence[Tensor],
    counts: Sequence[int],
    *,
    head_dim: int,
    attn_mode: AttnMode,
    rope_layout: RopeLayout | None,
    dtype: torch.dtype,
    score_dtype: torch.dtype,
) -> Layout:
    """The layout of groups whose patch tokens lie at integer ``positions`` ``[N or 1, K, 3]``, ``counts`` =
    each N.

    One row of positions serves all N sequences of its group. ``rope_layout`` None leaves queries and keys as
    they are. ``dtype`` is the tokens', ``score_dtype`` the queries'.
    """
    groups: list[tuple[int, int]] = []
    tables: list[tuple[Tensor, Tensor]] = []
    masks: list[Tensor | None] = []
    for where, n in zip(positions, counts, strict=True):
        assert where.shape[0] in (1, n), (where.shape, n)
        length = 1 + where.shape[1]
        groups.append((n, length))
        if rope_layout is not None:
            # A row of zeros for [CLS]: position 0 has cosine 1 and sine 0 on every channel, so it is not
            # turned.
            with_cls = torch.nn.functional.pad(where, (0, 0, 1, 0))
            cos, sin = rotary_tables(with_cls, head_dim=head_dim, layout=rope_layout, dtype=dtype)
            tables.append((cos.expand(n, -1, -1), sin.expand(n, -1, -1)))
        if attn_mode == "full":
            masks.append(None)
            continue
        frames = where[..., 0]
        size = frames.shape[0] * length * length * score_dtype.itemsize
        if size > SHARED_MASK_BYTES and bool((frames == frames[:1]).all()):
            frames = frames[:1]
        masks.append(block_causal_mask(frames, dtype=score_dtype))
    if rope_layout is None:
        return Layout(tuple(groups), None, None, tuple(masks))
    cos, sin = (torch.cat([pair[i].flatten(0, 1) for pair in tables])[:, None, None] for i in (0, 1))
    return Layout(tuple(groups), cos, sin, tuple(masks))


def _heads(x: Tensor, groups: tuple[tuple[int, int], ...]) -> list[list[Tensor]]:
    """``[M, parts, H, d]`` -> per group its ``parts`` views ``[N, H, L, d]``."""
    pieces = torch.split(x, [n * length for n, length in groups])
    return [
        list(piece.view(n, length, *x.shape[1:]).permute(2, 0, 3, 1, 4).unbind(0))
        for piece, (n, length) in zip(pieces, groups, strict=True)
    ]


class _SplitHeads(torch.autograd.Function):
    """The output of a query-key-value layer ``[M, parts*D]`` -> per group its parts ``[N, H, L, d]``, turned.

    The last part (values) is not rotated. One node, so that the backward pass writes the gradients of all
    parts of all groups once, into the place where the layer's own backward pass reads them; autograd's
    splits, stacks and concatenations would copy them four times. Only the tables, shared by all layers, are
    kept.
    """

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, cos: Tensor | None, sin: Tensor | None, layout: Layout, num_heads: int, parts: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.groups = layout.groups
        x = packed.view(packed.shape[0], parts, num_heads, -1)
        if cos is not None and sin is not None:
            turned = torch.empty_like(x)
            rotate(x[:, :-1], cos, sin, out=turned[:, :-1])
            # A copy of the values costs less than keeping the raw queries and keys alive for a view of them.
            turned[:, -1] = x[:, -1]
            x = turned
        return tuple(part for group in _heads(x, layout.groups) for part in group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        parts = len(grads) // len(ctx.groups)
        heads, head_dim = grads[0].shape[1], grads[0].shape[3]
        m = sum(n * length for n, length in ctx.groups)
        out = grads[0].new_empty(m, parts, heads, head_dim)
        for i, group in enumerate(_heads(out, ctx.groups)):
            for place, grad in zip(group, grads[i * parts : (i + 1) * parts], strict=True):
                place.copy_(grad)
        if cos is not None:
            rotate_back(out[:, :-1], cos, sin, out=out[:, :-1])
        return out.view(m, -1), None, None, None, None, None


def _attend(parts: tuple[Tensor, ...], masks: tuple[Tensor | None, ...]) -> Tensor:
    """Queries, keys and values of each group, in turn -> ``[M, D]`` (M the queries of all groups)."""
    gathered = []
    for i, mask in enumerate(masks):
        q, k, v = parts[3 * i : 3 * i + 3]
        gathered.append(scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2).flatten(0, 1))
    return gathered[0] if len(gathered) == 1 else torch.cat(gathered)


def self_attention(qkv: Tensor, layout: Layout, *, num_heads: int) -> Tensor:
    """Queries, keys and values of all tokens ``[M, 3*D]`` -> what each gathered within its sequence ``[M,
    D]``.
    """
    parts: tuple[Tensor, ...] = _SplitHeads.apply(qkv, layout.cos, layout.sin, layout, num_heads, 3)
    return _attend(parts, layout.masks)


def summary_attention(q: Tensor, kv: Tensor, layout: Layout, *, num_heads: int) -> Tensor:
    """What [CLS] alone gathers: its queries ``[R, D]`` (R sequences of all groups), keys and values ``[M,
    2*D]``.

    Returns ``[R, D]``. [CLS] is not rotated and sees everything in both attention modes, so there is no mask.
    """
    keys_values: tuple[Tensor, ...] = _SplitHeads.apply(kv, layout.cos, layout.sin, layout, num_heads, 2)
    queries = torch.split(q.view(q.shape[0], num_heads, 1, -1), [n for n, _ in layout.groups])
    parts = tuple(x for i, qs in enumerate(queries) for x in (qs, *keys_values[2 * i : 2 * i + 2]))
    return _attend(parts, (None,) * len(layout.groups))
