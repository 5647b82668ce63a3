"""``isolated_attention``: softmax attention in which no sample sees another, on every device.

Legend: Nq query tokens, Nk key tokens, H heads, d channels of one head.

Three implementations of one predicate. On CUDA, FlexAttention over a table of tiles. On a CPU, where FlexAttention
has no backward pass, one ``scaled_dot_product_attention`` per group of equal sequences: attention between samples
is never computed, so not even NaN can cross. ``dense_attention`` applies the predicate to every pair; it is the
oracle of the tests and far too slow for anything else. Kernels that mask (CUDA, dense, and rectangles of padded
sequences within one sample) multiply a masked value by zero, which does not stop NaN: NaN is refused on entry.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from marey.batching.segments import AttentionLayout, Group, Part, Selection, UnitMask
from marey.batching.visibility import visibility_matrix


def _take(x: Tensor, selection: Selection) -> Tensor:
    """Tokens of ``[g, N, H, d]``."""
    return x[:, selection] if isinstance(selection, slice) else x.index_select(1, selection.to(x.device))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: UnitMask | None) -> Tensor:
    """``[g, N, H, d]`` -> ``[g, N, H, d]``."""
    seen = None if mask is None else mask.tokens.to(q.device)
    out = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen)
    return out.transpose(1, 2)


def _token_order(parts: tuple[Part, ...], total: int) -> Tensor:
    tokens = torch.arange(total)
    return torch.cat([tokens[part.queries] for part in parts])


def _attend_group(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """All parts of a group; ``[g, N, H, d]`` each. Queries in no part get zero."""
    outs = [
        _attend(_take(q, part.queries), _take(k, part.keys), _take(v, part.keys), part.mask) for part in group.parts
    ]
    covered = sum(out.shape[1] for out in outs)
    if len(outs) == 1 and covered == group.queries:
        return outs[0]
    if not outs:
        return torch.zeros_like(q)
    together = torch.cat(outs, dim=1)
    order = _token_order(group.parts, group.queries)
    if covered == group.queries and bool((order.diff() == 1).all()):
        return together
    return torch.zeros_like(q).index_copy(1, order.to(q.device), together)


def segmented_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
    """``[Nq, H, d]``, ``[Nk, H, d]``, ``[Nk, H, d]`` -> ``[Nq, H, d]``, one call per group and part."""
    q_sizes = [group.samples * group.queries for group in layout.groups]
    k_sizes = [group.samples * group.keys for group in layout.groups]
    # One split and one concatenation, so that the backward pass copies everything once, not once per group.
    pieces = zip(torch.split(q, q_sizes), torch.split(k, k_sizes), torch.split(v, k_sizes), strict=True)
    heads = q.shape[1:]
    outs = [
        _attend_group(
            qg.reshape(group.samples, group.queries, *heads),
            kg.reshape(group.samples, group.keys, *heads),
            vg.reshape(group.samples, group.keys, *heads),
            group,
        ).flatten(0, 1)
        for group, (qg, kg, vg) in zip(layout.groups, pieces, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
    """The definition: every pair is scored, pairs that the predicate forbids get no weight.

    Same shapes as ``segmented_attention``; computed in float64 and returned so. Queries that see nothing get zero.
    """
    seen = visibility_matrix(layout.query_labels, layout.key_labels).to(q.device)
    q, k, v = q.double(), k.double(), v.double()
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    weights = torch.where(seen.any(dim=1, keepdim=True), weights, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def isolated_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
    """Attention of ``q`` ``[Nq, H, d]`` to ``k`` and ``v`` ``[Nk, H, d]``, each token within its own sample.

    Scores are scaled by ``d ** -0.5``. Queries that see nothing get zero. Returns ``[Nq, H, d]`` of the input's
    dtype, differentiable. Which pairs are computed follows from ``layout``; who may see whom does not depend on it.
    """
    if q.is_cuda and q.dtype != torch.float64:  # FlexAttention sums in float32 at best; segments run anywhere
        from marey.batching.flex import flex_isolated_attention  # its compiler is loaded where it is used

        return flex_isolated_attention(q, k, v, layout)
    return segmented_attention(q, k, v, layout)
