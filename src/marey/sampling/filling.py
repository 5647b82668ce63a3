"""Microbatches filled to a budget of tokens, instead of counted in samples: an epoch planned at once.

Samples come in the sampler's order into at most ``OPEN_BINS`` open bins of their canvas, each into the bin that it
leaves with least room. Where none has room, the fullest one is closed and another opened. So a bin holds samples
that the sampler drew near each other, none is looked at twice, and a bin goes short by less than the shortest sample
unless ten others did too. Bins come in the order in which the sampler would have brought their samples on average.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.sampling.balance import Floats, group

Ints = NDArray[np.int64]
OPEN_BINS = 10
"""Bins of one canvas that are open at a time."""


def fill_bins(tokens: Ints, canvas: Ints, *, budget: int) -> Ints:
    """int64 ``[n]``: the bin of each of n samples; bins are numbered by the mean place of their samples.

    tokens: int64 ``[n]``, each from 1 to ``budget``. canvas: int64 ``[n]``, any code, equal for equal canvases. No bin
    holds two canvases or more than ``budget`` tokens.
    """
    n = len(tokens)
    bins, count = np.zeros(n, dtype=np.int64), 0
    for code in np.unique(canvas):
        mine = np.flatnonzero(canvas == code)
        sizes, which = np.unique(tokens[mine], return_inverse=True)
        # Few lengths occur: a list of small numbers holds one object for each of them, not one for each sample.
        placed, made = _best_fit(which.tolist(), sizes.tolist(), budget)
        bins[mine] = np.asarray(placed, dtype=np.int64) + count
        count += made
    places = np.arange(n, dtype=np.float64)
    mean = np.bincount(bins, weights=places, minlength=count) / np.maximum(np.bincount(bins, minlength=count), 1)
    number = np.empty(count, dtype=np.int64)
    number[np.argsort(mean, kind="stable")] = np.arange(count)
    return number[bins]


def _best_fit(which: Sequence[int], sizes: Sequence[int], budget: int) -> tuple[list[int], int]:
    """The bin of each sample of ``sizes[which]`` tokens, and how many bins there are. ``sizes`` ascend."""
    rooms: list[int] = []  # ascending, those of open bins
    open_bins: list[int] = []  # their numbers
    placed: list[int] = []
    made = 0
    for kind in which:
        size = sizes[kind]
        at = bisect_left(rooms, size)
        if at < len(rooms):
            number, room = open_bins.pop(at), rooms.pop(at) - size
        else:
            if at == OPEN_BINS:
                del rooms[0], open_bins[0]
            number, room = made, budget - size
            made += 1
        placed.append(number)
        if room >= sizes[0]:  # no sample fits into less
            at = bisect_left(rooms, room)
            rooms.insert(at, room)
            open_bins.insert(at, number)
    return placed, made


@dataclass(frozen=True)
class FilledEpoch:
    """Which draws fill each microbatch of one epoch, over all ranks. 8 bytes a draw, 20 a microbatch."""

    draws: Ints
    """int64 ``[n]``: all draws of the epoch, bin by bin, in the sampler's order within a bin."""
    ends: Ints
    """int64 ``[bins + 1]``: where each bin begins, and the last ends."""
    bins: Ints
    """int64 ``[micro_steps, world]``"""
    repeats: NDArray[np.int32]
    """int32 ``[micro_steps, world]``: 0, or k where the bin is repeated for the k-th time to complete a step."""
    left: Ints
    """int64: draws that no micro-step takes, ascending."""

    @property
    def micro_steps(self) -> int:
        """Micro-steps of the epoch."""
        return len(self.bins)

    @property
    def planned(self) -> int:
        """Samples of all micro-steps and ranks, repeats included."""
        return int((self.ends[self.bins + 1] - self.ends[self.bins]).sum())

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(held.nbytes for held in (self.draws, self.ends, self.bins, self.repeats, self.left))

    def places(self, first: int, last: int, rank: int) -> tuple[Ints, NDArray[np.int32]]:
        """Draws and repeats of a rank's part of the micro-steps [first, last)."""
        bins = self.bins[first:last, rank].tolist()
        draws = [self.draws[self.ends[b] : self.ends[b + 1]] for b in bins]
        repeats = np.repeat(self.repeats[first:last, rank], [len(part) for part in draws])
        return (np.concatenate(draws) if draws else self.draws[:0]), repeats


def fill_epoch(
    tokens: Ints,
    canvas: Ints,
    *,
    budget: int,
    world: int,
    accumulate: int,
    tail: Literal["drop", "repeat"],
    seed: int,
    epoch: int,
    cost: Floats | None = None,
) -> FilledEpoch:
    """Fill bins with an epoch's n draws and give them to ranks.

    ``cost`` (float64 ``[n]``) brings bins of like cost together in a micro-step; without it they meet as they come.
    Bins beyond a whole optimizer step of ``world * accumulate`` are dropped, the last ones, or (``tail`` repeat)
    completed by repeats of the epoch's first. An epoch after the first that would give no step at all is completed too.
    Raises UserError for a first epoch that gives none.
    """
    bins = fill_bins(tokens, canvas, budget=budget)
    draws = np.argsort(bins, kind="stable").astype(np.int64)
    sizes = np.bincount(bins)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    count, step = len(sizes), world * accumulate
    if tail == "drop" and count < step and epoch == 0:
        raise UserError(
            f"data.epoch_draws={len(tokens)} fill {count} microbatches of data.batching.fill_tokens={budget} and one "
            f"optimizer step takes {step} ({world} ranks x accumulate_grad_batches={accumulate}; null draws as many as "
            "there are windows); lower fill_tokens, raise data.epoch_draws or set data.batching.drop_last_train=false."
        )
    whole = count // step * step if tail == "drop" and count >= step else -(-count // step) * step
    taken = np.arange(whole, dtype=np.int64)
    if cost is None or world == 1:
        steps = taken.reshape(-1, world)
    else:
        of_bins: Floats = np.bincount(bins, weights=cost, minlength=count).astype(np.float64)
        steps = group(of_bins[taken % count], world=world, seed=seed, epoch=epoch)
    return FilledEpoch(
        draws=draws,
        ends=ends,
        bins=steps % count,
        repeats=(steps // count).astype(np.int32),
        left=np.sort(draws[ends[min(whole, count)] :]),
    )
