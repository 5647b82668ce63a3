"""The spatial plan: an epoch's draws cut into microbatches of one canvas each, for all ranks at once.

A micro-step is ``world`` microbatches of ``batch`` samples. Each canvas fills whole micro-steps with its
draws in stream order; what is left of it fills microbatches, the last one completed by repeating samples of
that canvas; left-over microbatches share micro-steps, and the most frequent canvas gives repeats for those
still missing. Every repeat is counted. Micro-steps come in the order in which the stream would have brought
their samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def by_canvas(canvas: Ints, *, world: int, batch: int, accumulate: int) -> tuple[Ints, NDArray[np.int32]]:
    """Plan n draws with canvases int64 ``[n]`` (any code, equal for equal canvases).

    Returns (draws, repeats), each ``[micro_steps, world, batch]``: which draw fills each place, and 0 for
    the draw itself or k for its k-th repetition. ``micro_steps`` is a multiple of ``accumulate``.
    """
    step = world * batch
    if len(canvas) == 0:
        return np.zeros((0, world, batch), dtype=np.int64), np.zeros((0, world, batch), dtype=np.int32)
    groups = np.split(
        order := np.argsort(canvas, kind="stable").astype(np.int64),
        np.flatnonzero(np.diff(canvas[order])) + 1,
    )
    whole: list[Ints] = []
    left: list[tuple[Ints, NDArray[np.int32]]] = []
    used = []
    for group in groups:
        full = len(group) // step * step
        whole.append(group[:full].reshape(-1, world, batch))
        rest = group[full:]
        missing = -len(rest) % batch
        fill, repeats = _repeats(group, len(group) - len(rest) % batch, 0, missing)
        used.append(missing)
        left.append((np.concatenate([rest, fill]), np.concatenate([np.zeros(len(rest), np.int32), repeats])))
    steps = sum(len(part) for part in whole)
    microbatches = steps * world + sum(len(draws) for draws, _ in left) // batch
    missing = -microbatches % (world * accumulate) * batch
    if missing:
        most = max(range(len(groups)), key=lambda g: len(groups[g]))
        edge = len(groups[most]) - len(groups[most]) % batch
        draws, repeats = left[most]
        fill, again = _repeats(groups[most], edge, used[most], missing)
        left[most] = (np.concatenate([draws, fill]), np.concatenate([repeats, again]))
    full_steps = np.concatenate(whole)
    planned = np.concatenate([full_steps, np.concatenate([d for d, _ in left]).reshape(-1, world, batch)])
    counted = np.zeros(planned.shape, dtype=np.int32)
    counted[len(full_steps) :] = np.concatenate([r for _, r in left]).reshape(-1, world, batch)
    in_time = np.argsort(planned.reshape(len(planned), -1).mean(axis=1), kind="stable")
    return planned[in_time], counted[in_time]


def _repeats(group: Ints, edge: int, already: int, count: int) -> tuple[Ints, NDArray[np.int32]]:
    """``count`` repeats of a canvas's draws, after ``already`` others: backwards from place ``edge``, then round.

    Starting before the incomplete microbatch keeps a repeat away from its original where there are enough
    draws.
    """
    turn = np.arange(already, already + count)
    return group[(edge - 1 - turn) % len(group)], (turn // len(group) + 1).astype(np.int32)
