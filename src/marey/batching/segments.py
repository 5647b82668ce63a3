"""Which queries meet which keys, as segments: the isolation predicate turned into plain attention calls.

A unit is a run of tokens with equal labels: the tokens of one frame, or the text of one sample. A sequence is what
one sample owns: its units, side by side. Visibility is decided between units, so planning a batch costs no more
than (units per sample)^2, whatever the canvas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from marey.batching.visibility import Labels, visibility_matrix

Selection = slice | Tensor
"""Tokens of one sequence: a range, or int64 indices."""


class Units(NamedTuple):
    """The units of all sequences, in the order in which their tokens stand in the flat tensor."""

    labels: Labels
    """``[U]``, on the CPU"""
    tokens: Tensor
    """int64 ``[U]``: how many tokens each unit has"""
    per_sequence: tuple[int, ...]
    """units of each sequence; their sum is U"""


@dataclass(frozen=True, eq=False)
class UnitMask:
    """Which keys count, decided between units; spelled out for tokens only where a kernel asks."""

    seen: Tensor
    """bool ``[samples, 1 or units of queries, units of keys]``"""
    query_tokens: int
    key_tokens: int

    @cached_property
    def tokens(self) -> Tensor:
        """bool ``[samples, 1, 1 or queries, keys]``"""
        rows = self.seen if self.seen.shape[1] == 1 else self.seen.repeat_interleave(self.query_tokens, dim=1)
        return rows.repeat_interleave(self.key_tokens, dim=2).unsqueeze(1)


class Part(NamedTuple):
    """Queries of a sequence that all see the same keys of it (or, with a mask, all queries and all keys)."""

    queries: Selection
    keys: Selection
    mask: UnitMask | None
    """where padding is computed and masked away"""


class Group(NamedTuple):
    """Consecutive sequences of equal shape and visibility: one attention call for each part serves them all."""

    samples: int
    queries: int
    """tokens of one sequence"""
    keys: int
    """tokens of one sequence"""
    parts: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """Everything an attention kernel needs to know about a batch, whichever kernel it is."""

    groups: tuple[Group, ...]
    queries: Units
    keys: Units

    @cached_property
    def query_labels(self) -> Labels:
        """Labels of every query token ``[Nq]``, on the CPU."""
        return Labels(*(field.repeat_interleave(self.queries.tokens) for field in self.queries.labels))

    @cached_property
    def key_labels(self) -> Labels:
        """Labels of every key token ``[Nk]``, on the CPU."""
        return Labels(*(field.repeat_interleave(self.keys.tokens) for field in self.keys.labels))

    @cached_property
    def needed_pairs(self) -> int:
        """Query-key pairs of valid queries that the predicate allows: what a perfect kernel would compute."""
        total = 0
        start_q = start_k = 0
        for nq, nk in zip(self.queries.per_sequence, self.keys.per_sequence, strict=True):
            q, k = slice(start_q, start_q + nq), slice(start_k, start_k + nk)
            seen = visibility_matrix(self.queries.labels.at(q), self.keys.labels.at(k))
            seen &= self.queries.labels.valid[q].unsqueeze(1)
            weights = self.queries.tokens[q].unsqueeze(1) * self.keys.tokens[k].unsqueeze(0)
            total += int((seen * weights).sum())
            start_q, start_k = start_q + nq, start_k + nk
        return total

    @cached_property
    def computed_pairs(self) -> int:
        """Query-key pairs that the segments compute."""
        return sum(
            group.samples * _count(part.queries, group.queries) * _count(part.keys, group.keys)
            for group in self.groups
            for part in group.parts
        )

    def pairs_on(self, device: torch.device) -> int:
        """Query-key pairs that the kernel of ``device`` computes."""
        if device.type == "cuda":
            from marey.batching.flex import tile_pairs  # its compiler is loaded where it is used

            return tile_pairs(self)
        return self.computed_pairs


def _count(selection: Selection, total: int) -> int:
    return len(range(*selection.indices(total))) if isinstance(selection, slice) else len(selection)


def _selection(units: Tensor, starts: list[int]) -> Selection:
    """Tokens of the chosen units (ascending unit numbers; ``starts`` has one entry more than there are units)."""
    chosen = units.tolist()
    runs: list[tuple[int, int]] = []
    for unit in chosen:
        start, stop = starts[unit], starts[unit + 1]
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    if not runs:
        return slice(0, 0)
    if len(runs) == 1:
        return slice(*runs[0])
    return torch.cat([torch.arange(start, stop) for start, stop in runs])


def _starts(tokens: Tensor) -> list[int]:
    return [0, *tokens.cumsum(0).tolist()]


def _parts(seen: Tensor, query_tokens: Tensor, key_tokens: Tensor) -> tuple[Part, ...]:
    """Queries with the same visible keys, together; ``seen`` is bool ``[units of queries, units of keys]``.

    Queries that see nothing are in no part; their output is zero.
    """
    query_starts, key_starts = _starts(query_tokens), _starts(key_tokens)
    patterns, owner = torch.unique(seen, dim=0, return_inverse=True)
    parts = [
        Part(
            _selection((owner == p).nonzero().flatten(), query_starts),
            _selection(pattern.nonzero().flatten(), key_starts),
            None,
        )
        for p, pattern in enumerate(patterns)
        if bool(pattern.any())
    ]
    # In the order of the queries, so that results of contiguous parts need no reordering.
    return tuple(sorted(parts, key=lambda part: _first(part.queries)))


def _first(selection: Selection) -> int:
    return int(selection.start) if isinstance(selection, slice) else int(selection[0])


def segment(queries: Units, keys: Units) -> AttentionLayout:
    """Isolated sequences: consecutive ones of equal shape and visibility form a group, nothing is masked away."""
    groups: list[Group] = []
    last: tuple[bytes, ...] | None = None
    start_q = start_k = 0
    for nq, nk in zip(queries.per_sequence, keys.per_sequence, strict=True):
        q, k = slice(start_q, start_q + nq), slice(start_k, start_k + nk)
        start_q, start_k = start_q + nq, start_k + nk
        tokens_q, tokens_k = queries.tokens[q], keys.tokens[k]
        seen = visibility_matrix(queries.labels.at(q), keys.labels.at(k))
        signature = tuple(t.numpy().tobytes() for t in (seen, tokens_q, tokens_k))
        if signature == last:
            groups[-1] = groups[-1]._replace(samples=groups[-1].samples + 1)
        else:
            parts = _parts(seen, tokens_q, tokens_k)
            groups.append(Group(1, int(tokens_q.sum()), int(tokens_k.sum()), parts))
            last = signature
    return AttentionLayout(tuple(groups), queries, keys)


def rectangle(queries: Units, keys: Units) -> AttentionLayout:
    """Sequences padded to one shape: one call over everything, in which padding is masked as keys.

    All sequences have the same number of units, and all units the same number of tokens.
    """
    samples = len(queries.per_sequence)
    seen = visibility_matrix(
        Labels(*(field.reshape(samples, -1) for field in queries.labels)),
        Labels(*(field.reshape(samples, -1) for field in keys.labels)),
    )
    same_for_all = bool((seen == seen[:, :1]).all())
    mask = UnitMask(seen[:, :1] if same_for_all else seen, int(queries.tokens[0]), int(keys.tokens[0]))
    nq, nk = (int(units.tokens.sum()) // samples for units in (queries, keys))
    everything = slice(None)
    return AttentionLayout((Group(samples, nq, nk, (Part(everything, everything, mask),)),), queries, keys)


def sequence_units(labels: Labels, tokens_per_unit: Sequence[int] | int, per_sequence: Sequence[int]) -> Units:
    """Units from labels ``[U]`` and their token counts (one for all, or one each)."""
    if isinstance(tokens_per_unit, int):
        tokens = torch.full(labels.sample.shape, tokens_per_unit, dtype=torch.int64)
    else:
        tokens = torch.tensor(list(tokens_per_unit), dtype=torch.int64)
    assert sum(per_sequence) == len(labels.sample) == len(tokens)
    return Units(labels, tokens, tuple(per_sequence))
