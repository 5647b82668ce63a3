from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.sampling.order import (
    Draw,
    EpochPlan,
    MicroBatchSampler,
    micro_steps_per_epoch,
    rank_positions,
)


def plan_of(sizes: list[int], clips: list[int], window: int, *, distinct: bool = True, seed: int = 0) -> EpochPlan:
    return EpochPlan(sizes, clips, seed=seed, statistic_batch=window, episode_distinct=distinct)


def pairs(plan: EpochPlan, epoch: int = 0) -> list[tuple[int, int]]:
    return [(d.source, d.episode) for d in plan.draws(epoch, 0, len(plan))]


LITERAL_ONE_SOURCE = [2, 3, 1, 0, 4, 3, 2, 1, 4, 0, 3, 2, 4, 0, 1]
LITERAL_MIXTURE = [
    (1, 0),
    (0, 0),
    (0, 1),
    (1, 3),
    (0, 1),
    (0, 0),
    (0, 0),
    (0, 1),
    (1, 1),
    (0, 0),
    (1, 2),
    (0, 1),
]
mixtures = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=3)


def test_a_tiny_epoch_is_the_same_for_ever() -> None:
    plan = plan_of([5], [3], 4)
    assert [d.episode for d in plan.draws(0, 0, 15)] == LITERAL_ONE_SOURCE
    assert plan.draws(0, 0, 2) == [Draw(0, 0, 0, LITERAL_ONE_SOURCE[0]), Draw(0, 1, 0, LITERAL_ONE_SOURCE[1])]


def test_a_tiny_mixture_is_the_same_for_ever() -> None:
    assert pairs(plan_of([2, 4], [4, 1], 3), 7) == LITERAL_MIXTURE


@given(mixture=mixtures, window=st.integers(1, 40), epoch=st.integers(0, 50), distinct=st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_episode_comes_exactly_as_often_as_its_source_says(
    mixture: list[tuple[int, int]], window: int, epoch: int, distinct: bool
) -> None:
    sizes, clips = [n for n, _ in mixture], [k for _, k in mixture]
    counts = Counter(pairs(plan_of(sizes, clips, window, distinct=distinct), epoch))
    assert counts == {(s, e): k for s, (n, k) in enumerate(mixture) for e in range(n)}


@given(mixture=mixtures, window=st.integers(1, 40), distinct=st.booleans(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_position_is_reached_directly(
    mixture: list[tuple[int, int]], window: int, distinct: bool, data: st.DataObject
) -> None:
    sizes, clips = [n for n, _ in mixture], [k for _, k in mixture]
    whole = plan_of(sizes, clips, window, distinct=distinct)
    expected = whole.draws(3, 0, len(whole))
    for _ in range(4):
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole)))
        fresh = plan_of(sizes, clips, window, distinct=distinct)
        assert fresh.draws(3, start, stop) == expected[start:stop]
        assert whole.draws(3, start, stop) == expected[start:stop]


@given(n=st.integers(1, 40), clips=st.integers(1, 8), window=st.integers(1, 40), epoch=st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_a_window_repeats_no_episode_while_there_are_enough_and_repeats_evenly_otherwise(
    n: int, clips: int, window: int, epoch: int
) -> None:
    plan = plan_of([n], [clips], window)
    for start in range(0, len(plan), window):
        stop = min(start + window, len(plan))
        counts = Counter(d.episode for d in plan.draws(epoch, start, stop))
        assert max(counts.values()) <= math.ceil(window / n)
        if window <= n:
            assert plan.same_episode_pairs(epoch, start, stop) == 0


@given(mixture=mixtures, window=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_a_window_of_a_mixture_repeats_no_episode_while_rounds_are_long_enough(
    mixture: list[tuple[int, int]], window: int
) -> None:
    sizes, clips = [n for n, _ in mixture], [k for _, k in mixture]
    shortest_round = sum(n * k // max(clips) for n, k in mixture)
    plan = plan_of(sizes, clips, window)
    if window <= shortest_round:
        for start in range(0, len(plan) - window + 1, window):
            assert plan.same_episode_pairs(0, start, start + window) == 0


def test_a_mixture_has_the_same_proportions_all_through_the_epoch() -> None:
    plan = plan_of([100, 900], [10, 2], 56)  # 1,000 and 1,800 clips
    sources = np.array([d.source for d in plan.draws(0, 0, len(plan))])
    for part in np.split(sources, 10):  # ten rounds of 100 + 180
        assert (part == 0).sum() == 100


def test_every_episode_is_equally_likely_at_every_position() -> None:
    n, epochs = 6, 4000
    plan = plan_of([n], [2], 4)
    seen = np.zeros((2 * n, n))
    for epoch in range(epochs):
        for d in plan.draws(epoch, 0, 2 * n):
            seen[d.position, d.episode] += 1
    expected = epochs / n
    chi2 = ((seen - expected) ** 2 / expected).sum(axis=1)
    assert chi2.max() < 25.7  # chi-square, 5 degrees of freedom, p = 1e-4


def test_epochs_and_seeds_differ() -> None:
    plan = plan_of([50], [1], 10)
    assert pairs(plan, 0) != pairs(plan, 1)
    assert pairs(plan, 0) != pairs(plan_of([50], [1], 10, seed=1), 0)


def test_a_plain_shuffle_repeats_episodes_within_a_window() -> None:
    plan = plan_of([100], [20], 50, distinct=False)
    assert sum(plan.same_episode_pairs(0, s, s + 50) for s in range(0, 2000, 50)) > 100
    distinct = plan_of([100], [20], 50)
    assert sum(distinct.same_episode_pairs(0, s, s + 50) for s in range(0, 2000, 50)) == 0


@pytest.mark.parametrize(("sizes", "clips"), [([1_000_000], [1]), ([6067], [200]), ([500_000, 1000], [2, 100])])
def test_the_last_window_of_a_large_epoch_comes_quickly(sizes: list[int], clips: list[int]) -> None:
    plan = plan_of(sizes, clips, 1536)
    start = time.process_time()
    last = len(plan) // 1536 * 1536
    plan.draws(5, last - 1536, last)
    assert time.process_time() - start < 2.0


@given(batch=st.integers(1, 6), world=st.integers(1, 5), step=st.integers(0, 100))
def test_ranks_share_a_micro_step_without_gap_or_overlap(batch: int, world: int, step: int) -> None:
    taken = [p for rank in range(world) for p in rank_positions(step, batch=batch, world=world, rank=rank)]
    assert taken == list(range(step * world * batch, (step + 1) * world * batch))


def test_the_published_epoch_has_394_steps_and_drops_the_odd_micro_step() -> None:
    steps = micro_steps_per_epoch(6067 * 200, world=16, batch=96, accumulate=2)
    assert steps == (788, 394, 6067 * 200 - 788 * 1536)
    assert micro_steps_per_epoch(7, world=1, batch=8, accumulate=1) == (0, 0, 7)


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_sampler_started_anywhere_continues_the_same_sequence(first: int, micro_batch: int) -> None:
    plan = plan_of([11], [4], 8)  # 44 clips: five micro-steps of 2 ranks x 4

    def chunks(start: int, rank: int) -> list[list[Draw]]:
        sampler = MicroBatchSampler(
            plan,
            epoch=2,
            first_micro_step=start,
            micro_steps=5 - start,
            batch=4,
            micro_batch=micro_batch,
            world=2,
            rank=rank,
        )
        assert len(sampler) == len(list(sampler))
        return list(sampler)

    whole = chunks(0, 1)
    assert {len(chunk) for chunk in whole} == {micro_batch}
    assert chunks(first, 1) == whole[first * 4 // micro_batch :]
    flat = [d for rank in (0, 1) for chunk in chunks(0, rank) for d in chunk]
    assert sorted(flat, key=lambda d: d.position) == plan.draws(2, 0, 40)


def test_a_moved_sampler_covers_the_new_epoch() -> None:
    plan = plan_of([10], [1], 5)
    sampler = MicroBatchSampler(
        plan, epoch=0, first_micro_step=1, micro_steps=1, batch=5, micro_batch=5, world=1, rank=0
    )
    assert list(sampler) == [plan.draws(0, 5, 10)]
    sampler.move(epoch=1, first_micro_step=0, micro_steps=2)
    assert list(sampler) == [plan.draws(1, 0, 5), plan.draws(1, 5, 10)]
