"""Length pools: a bounded number of drawn samples, sorted so that a microbatch holds samples of like length.

Sorting changes which samples share a microbatch, never which samples are drawn or how often.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from marey.core.keys import permutation

BucketOrder = Literal["sorted", "shuffled"]
Ints = NDArray[np.int64]


def pool_steps(pool_size: int, batch: int) -> int:
    """Microbatches in a pool: ``floor(pool_size / batch)``, at least one."""
    return max(1, pool_size // batch)


def pool_batches(keys: Sequence[Ints], windows: Ints, *, batch: int) -> Ints:
    """int64 ``[n // batch, batch]``: places in the pool, microbatch by microbatch, in ascending order of key.

    keys: columns int64 ``[n]``, the most significant first; n is a multiple of ``batch``. windows: int64
    ``[n]``, equal for two draws of one window. The sort is stable. Among draws of equal key, the repeats of
    one window go to different microbatches as far as counts allow: the most repeated window chooses first,
    each time the microbatch that has most room left among those with fewest of it.
    """
    n = len(windows)
    assert n % batch == 0, (n, batch)
    order = np.lexsort(tuple(reversed(keys))).astype(np.int64)
    sorted_keys = np.stack([key[order] for key in keys])
    changes = np.flatnonzero((sorted_keys[:, 1:] != sorted_keys[:, :-1]).any(axis=0)) + 1
    edges = [0, *changes.tolist(), n]
    for first, last in pairwise(edges):
        run = order[first:last]
        if (last - 1) // batch > first // batch and len(np.unique(windows[run])) < len(run):
            order[first:last] = _separated(run, windows[run], first, batch)
    return order.reshape(-1, batch)


def _separated(run: Ints, windows: Ints, first: int, batch: int) -> Ints:
    """The same places in an order that keeps repeats of one window in different microbatches."""
    last = first + len(run)
    steps = range(first // batch, (last - 1) // batch + 1)
    room = np.array([min(last, (m + 1) * batch) - max(first, m * batch) for m in steps])
    chosen: list[list[int]] = [[] for _ in steps]
    _, inverse, counts = np.unique(windows, return_inverse=True, return_counts=True)
    appearance = np.full(len(counts), len(run))
    np.minimum.at(appearance, inverse, np.arange(len(run)))
    for w in sorted(range(len(counts)), key=lambda w: (-counts[w], appearance[w])):
        if counts[w] == 1:
            break
        held = np.zeros(len(room), dtype=np.int64)
        for place in np.flatnonzero(inverse == w):
            open_steps = np.flatnonzero(room > 0)
            fewest = open_steps[held[open_steps] == held[open_steps].min()]
            m = int(fewest[room[fewest].argmax()])
            chosen[m].append(int(place))
            room[m] -= 1
            held[m] += 1
    placed = np.zeros(len(run), dtype=bool)
    placed[[place for step in chosen for place in step]] = True
    singles = iter(np.flatnonzero(~placed).tolist())
    for m, left in enumerate(room):
        chosen[m].extend(next(singles) for _ in range(left))
    return run[[place for step in chosen for place in sorted(step)]]


def emission_order(steps: int, order: BucketOrder, *, seed: int, epoch: int, pool: int) -> Ints:
    """int64 ``[steps]``: which microbatch of a pool comes first, second, ...

    ``shuffled`` is keyed by epoch and pool but not by rank: in one step all ranks then work at microbatches
    of like rank in length, and none waits long for another.
    """
    if order == "sorted":
        return np.arange(steps, dtype=np.int64)
    return permutation(steps, seed, "pool-order", epoch, pool)
