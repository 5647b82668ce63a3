from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.sampling.pools import emission_order, pool_batches, pool_steps


def test_a_pool_is_whole_microbatches_and_at_least_one() -> None:
    assert [pool_steps(128, 36), pool_steps(1152, 36), pool_steps(4, 36), pool_steps(36, 36)] == [3, 32, 1, 1]


def batches(lengths: list[int], windows: list[int], batch: int) -> list[list[int]]:
    found: list[list[int]] = pool_batches([np.array(lengths)], np.array(windows), batch=batch).tolist()
    return found


def test_a_pool_is_sorted_stably() -> None:
    assert batches([9, 4, 9, 4, 7, 4], [0, 1, 2, 3, 4, 5], 2) == [[1, 3], [5, 4], [0, 2]]


def test_the_first_key_counts_most() -> None:
    canvas, length = np.array([2, 1, 2, 1]), np.array([1, 9, 0, 3])
    assert pool_batches([canvas, length], np.arange(4), batch=2).tolist() == [[3, 1], [2, 0]]


def test_repeats_of_a_window_go_to_different_microbatches() -> None:
    assert batches([5] * 6, [7, 7, 7, 1, 2, 3], 2) == [[0, 3], [1, 4], [2, 5]]
    assert batches([5] * 4, [7, 7, 8, 8], 2) == [[0, 2], [1, 3]]


def test_without_repeats_the_order_within_a_key_is_the_order_drawn() -> None:
    assert batches([5] * 6, [3, 1, 2, 6, 5, 4], 2) == [[0, 1], [2, 3], [4, 5]]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), st.data())
def test_a_pool_keeps_every_draw_and_separates_repeats_where_counts_allow(
    batch: int, steps: int, data: st.DataObject
) -> None:
    n = batch * steps
    windows = data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n))
    lengths = [w % 3 for w in windows]  # a window has one length
    found = batches(lengths, windows, batch)
    flat = [i for step in found for i in step]
    assert sorted(flat) == list(range(n))
    assert [lengths[i] for i in flat] == sorted(lengths)
    held = [Counter(windows[i] for i in step) for step in found]
    for length in set(lengths):
        places = [sum(lengths[i] == length for i in step) for step in found]
        copies = Counter(w for w in windows if w % 3 == length)
        if _can_separate(list(copies.values()), places):
            assert all(step[w] <= 1 for step in held for w in copies)


def _can_separate(copies: list[int], places: list[int]) -> bool:
    """Gale and Ryser's condition: any k windows together fit one into each place."""
    copies = sorted(copies, reverse=True)
    return all(sum(copies[:k]) <= sum(min(k, p) for p in places) for k in range(1, len(copies) + 1))


def test_the_order_of_microbatches_is_ascending_or_keyed_alike_on_every_rank() -> None:
    assert emission_order(5, "sorted", seed=0, epoch=0, pool=0).tolist() == [0, 1, 2, 3, 4]
    keyed = emission_order(32, "shuffled", seed=0, epoch=1, pool=2)
    assert sorted(keyed.tolist()) == list(range(32))
    assert keyed.tolist() == emission_order(32, "shuffled", seed=0, epoch=1, pool=2).tolist()
    assert keyed.tolist() != emission_order(32, "shuffled", seed=0, epoch=1, pool=3).tolist()
    assert keyed.tolist() != list(range(32))


def test_a_pool_that_is_not_whole_microbatches_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        batches([1, 2, 3], [0, 1, 2], 2)
