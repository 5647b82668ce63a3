"""How the frames of a batch stand in the flat token sequence that the heavy layers see.

Legend: B samples, T temporal positions (temporal patches where a patch spans several frames), S tokens per
position, F positions that the heavy layers see, M text tokens of all samples together.

The heavy layers always work on flat tokens ``[F*S, D]``. In ``packed`` F counts the valid positions, sequence after
sequence, equal shapes side by side; in every other mode F is B*T in batch order. Parameters know nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marey.batching.segments import AttentionLayout, Units, rectangle, segment, sequence_units
from marey.batching.transport import Mode
from marey.batching.visibility import UNBOUNDED, Labels


@dataclass(frozen=True, eq=False)
class VideoLayout:
    """The way from the batch layout to the flat one and back, and who sees whom there."""

    batch: int
    """B"""
    capacity: int
    """T"""
    tokens_per_position: int
    """S"""
    positions: int
    """F"""
    valid_positions: int
    index: Tensor | None
    """int64 ``[F]``: where in ``[B*T]`` each position comes from, on the batch's device; None: all, in order"""
    attention: AttentionLayout
    text_index: Tensor | None
    """int64 ``[M]``: order of the text tokens, given in batch order; None: as they are"""
    cross: AttentionLayout | None
    """None where there is no text"""

    @property
    def tokens(self) -> int:
        """Video tokens that the heavy layers see."""
        return self.positions * self.tokens_per_position

    @property
    def valid_tokens(self) -> int:
        """Those of them that are real."""
        return self.valid_positions * self.tokens_per_position

    def gather(self, x: Tensor) -> Tensor:
        """``[B, T, ...]`` -> ``[F, ...]``."""
        flat = x.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def scatter(self, x: Tensor) -> Tensor:
        """``[F, ...]`` -> ``[B, T, ...]``, zero where the heavy layers saw nothing."""
        if self.index is not None:
            empty = x.new_zeros((self.batch * self.capacity, *x.shape[1:]))
            x = empty.index_copy(0, self.index, x)
        return x.reshape(self.batch, self.capacity, *x.shape[1:])


def program_labels(valid: Tensor, *, chunk: Tensor, noisy: Tensor, reach: Tensor) -> Labels:
    """Labels ``[B, T]`` of positions, from ``valid``, ``chunk``, ``noisy`` ``[B, T]`` and ``reach`` ``[B]``."""
    batch, capacity = valid.shape
    return Labels(
        sample=torch.arange(batch, dtype=torch.int32).unsqueeze(1).expand(batch, capacity),
        valid=valid,
        chunk=chunk.to(torch.int32),
        noisy=noisy,
        reach=reach.to(torch.int32).unsqueeze(1).expand(batch, capacity),
    )


def _text_units(order: Sequence[int], text_lengths: Sequence[int]) -> Units:
    """Each sample's text is one unit, in the order of the sequences."""
    count = len(order)
    labels = Labels(
        sample=torch.tensor(list(order), dtype=torch.int32),
        valid=torch.ones(count, dtype=torch.bool),
        chunk=torch.zeros(count, dtype=torch.int32),
        noisy=torch.zeros(count, dtype=torch.bool),
        reach=torch.full((count,), UNBOUNDED, dtype=torch.int32),
    )
    return sequence_units(labels, [text_lengths[b] for b in order], [1] * count)


def _asking_text(units: Units) -> Units:
    """Video units as queries of text: the program's order and reach are about video alone."""
    labels = units.labels
    return units._replace(
        labels=labels._replace(
            chunk=torch.zeros_like(labels.chunk),
            noisy=torch.zeros_like(labels.noisy),
            reach=torch.full_like(labels.reach, UNBOUNDED),
        )
    )


def _text_order(order: Sequence[int], text_lengths: Sequence[int]) -> Tensor:
    starts = [0]
    for length in text_lengths:
        starts.append(starts[-1] + length)
    return torch.cat([torch.arange(starts[b], starts[b + 1]) for b in order])


def _packed_order(labels: Labels, text_lengths: Sequence[int] | None) -> list[int]:
    """Samples sorted (stably) by what decides the shape of their attention calls, so that equal ones are adjacent."""
    keys = [
        (
            int(labels.valid[b].sum()),
            tuple(t[b][labels.valid[b]].numpy().tobytes() for t in (labels.chunk, labels.noisy, labels.reach)),
            0 if text_lengths is None else text_lengths[b],
        )
        for b in range(labels.sample.shape[0])
    ]
    return sorted(range(len(keys)), key=lambda b: keys[b])


def video_layout(
    labels: Labels,
    *,
    mode: Mode,
    tokens_per_position: int,
    text_lengths: Sequence[int] | None,
    device: torch.device,
) -> VideoLayout:
    """Lay a batch out for the heavy layers.

    ``labels`` are ``[B, T]`` on the CPU (``program_labels``); ``text_lengths`` are the text tokens of each sample,
    None without text. The indices of the result are on ``device``.
    """
    batch, capacity = labels.sample.shape
    order = list(range(batch))
    index: Tensor | None = None
    if mode == "packed":
        order = _packed_order(labels, text_lengths)
        per_sequence = [int(labels.valid[b].sum()) for b in order]
        index = torch.cat([b * capacity + labels.valid[b].nonzero().flatten() for b in order])
        flat = Labels(*(field.reshape(-1)[index] for field in labels))
    else:
        per_sequence = [capacity] * batch
        flat = Labels(*(field.reshape(-1) for field in labels))
    units = sequence_units(flat, tokens_per_position, per_sequence)
    # Where nothing is padding, no mode has anything to mask, and all of them make the same calls.
    all_valid = bool(flat.valid.all())
    text_index: Tensor | None = None
    cross: AttentionLayout | None = None
    if text_lengths is not None:
        cross = segment(_asking_text(units), _text_units(order, text_lengths))
        if order != sorted(order):
            text_index = _text_order(order, text_lengths).to(device, non_blocking=True)
    identity = index is None or (len(index) == batch * capacity and bool((index.diff() == 1).all()))
    return VideoLayout(
        batch=batch,
        capacity=capacity,
        tokens_per_position=tokens_per_position,
        positions=len(flat.sample),
        valid_positions=int(flat.valid.sum()),
        index=None if identity or index is None else index.to(device, non_blocking=True),
        attention=segment(units, units) if all_valid else rectangle(units, units),
        text_index=text_index,
        cross=cross,
    )
