"""Like work for the ranks of a micro-step, by the modelled cost of samples: nobody waits long for another.

All ranks work out the same assignment from the same numbers; nothing is communicated.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from marey.core.keys import permutation

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
POOL = 10
"""Micro-steps' worth of filled microbatches among which those of like cost are brought together."""


def deal(cost: Floats, ranks: int) -> Ints:
    """int64 ``[ranks, n / ranks]``: which of n samples each rank takes, as many each; ascending within a rank.

    The most costly sample first, each to the rank that has least work so far among those with room (Graham's longest
    processing time rule, with equal counts). Equal costs go in the order given, equal loads to the lower rank. Counts
    stay equal so that a microbatch is what ``train_batch_size`` says, whatever divides its loss; with eight samples a
    rank, letting them differ would gain next to nothing ("free counts" in benchmarks/packing.py).
    """
    n = len(cost)
    assert n % ranks == 0, (n, ranks)
    room = n // ranks
    taken: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    values = cost.tolist()
    for sample in np.argsort(-cost, kind="stable").tolist():
        load, rank = loads[0]
        taken[rank].append(sample)
        if len(taken[rank]) < room:
            heapq.heapreplace(loads, (load + values[sample], rank))
        else:
            heapq.heappop(loads)
    return np.sort(np.asarray(taken, dtype=np.int64), axis=1)


def deal_alike(cost: Floats, kinds: Ints, *, batch: int, backwards: bool = False) -> Ints:
    """int64 ``[ranks, batch]``: :func:`deal`, where samples move between microbatches of one kind alone.

    cost: float64 ``[ranks * batch]``, the microbatch of rank 0 first. kinds: int64 ``[ranks]``, of each microbatch.
    ``backwards`` deals to the last rank first: where micro-steps take turns, no rank always has the most costly sample.
    """
    places = np.arange(len(cost), dtype=np.int64).reshape(-1, batch)
    dealt = places.copy()
    for kind in np.unique(kinds):
        mine = np.flatnonzero(kinds == kind)
        held = places[mine].reshape(-1)
        dealt[mine[::-1] if backwards else mine] = held[deal(cost[held], len(mine))]
    return dealt


def group(cost: Floats, *, world: int, seed: int, epoch: int) -> Ints:
    """int64 ``[micro_steps, world]``: which of the filled microbatches (float64 ``[micro_steps * world]``) meet.

    In pools of ``POOL`` micro-steps they are sorted by cost and cut into micro-steps, which come in a keyed order:
    training sees no trend. Every second micro-step is dealt out backwards, so that no rank always has the most work.
    """
    assert len(cost) % world == 0, (len(cost), world)
    whole = []
    for pool, first in enumerate(range(0, len(cost), POOL * world)):
        order = first + np.argsort(-cost[first : first + POOL * world], kind="stable").astype(np.int64)
        steps = order.reshape(-1, world)
        whole.append(steps[permutation(len(steps), seed, "fill-order", epoch, pool)])
    grouped = np.concatenate(whole) if whole else np.zeros((0, world), dtype=np.int64)
    grouped[1::2] = grouped[1::2, ::-1].copy()
    return grouped
