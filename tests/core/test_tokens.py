"""The keep-set: which tokens survive training's drop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from marey.core.tokencount import kept_count
from marey.core.tokens import grid_positions, keep_indices

KEY = {"seed": 0, "epoch": 1, "position": 2, "view": 3}


def test_the_published_sizes_keep_the_published_counts() -> None:
    assert kept_count(16 * 14 * 14, 0.95) == 157
    assert kept_count(16 * 6 * 6, 0.95) == 29


@given(st.integers(1, 6), st.integers(1, 9), st.floats(0, 0.99), st.integers(0, 10**6))
def test_tubes_keep_the_same_places_in_every_frame(frames: int, side: int, rate: float, position: int) -> None:
    tokens = frames * side * side
    key = {**KEY, "position": position}
    kept = keep_indices(tokens, rate, mode="tube", steps=frames, **key)
    positions = grid_positions((frames, side, side))[kept]
    by_frame = [sorted(map(tuple, positions[positions[:, 0] == t, 1:].tolist())) for t in range(frames)]
    assert all(places == by_frame[0] for places in by_frame)
    assert len(kept) == kept_count(tokens, rate, mode="tube", steps=frames) == frames * kept_count(side * side, rate)
    assert torch.equal(kept, kept.unique())


def test_tubes_are_uniform_over_places() -> None:
    counts = torch.zeros(16)
    for position in range(2000):
        kept = keep_indices(4 * 16, 0.75, mode="tube", steps=4, **{**KEY, "position": position})
        counts[kept[:4]] += 1
    assert counts.sum() == 2000 * 4
    assert (counts - 500).abs().max() < 5 * (2000 * 0.25 * 0.75) ** 0.5


def test_one_step_of_time_makes_both_modes_the_same_draw() -> None:
    assert torch.equal(keep_indices(64, 0.5, mode="tube", steps=1, **KEY), keep_indices(64, 0.5, **KEY))
