"""Microbatches filled to a budget of tokens: nothing lost, nothing over, nearly full, the same from any position."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.sampling.filling import OPEN_BINS, fill_bins, fill_epoch
from tests.sampling.filled_cases import COST, every, planner, tokens_of, windows
from tests.sampling.latent_sources import table

SHORT = [4, 8, 12, 16, 20]
LONG = sorted({p + f for p in (1, 2, 4, 8, 16) for f in (2, 4, 8, 16, 32, 48)})


def filled(tokens: list[int], *, canvas: list[int] | None = None, budget: int) -> list[list[int]]:
    """Which samples each bin holds."""
    codes = [0] * len(tokens) if canvas is None else canvas
    bins = fill_bins(np.array(tokens, dtype=np.int64), np.array(codes, dtype=np.int64), budget=budget)
    return [np.flatnonzero(bins == b).tolist() for b in range(int(bins.max(initial=-1)) + 1)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bins_hold_every_sample_once_and_never_more_than_the_budget_or_two_canvases(data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, 60))
    tokens = data.draw(st.lists(st.integers(1, budget), max_size=80))
    canvas = data.draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens)))
    bins = filled(tokens, canvas=canvas, budget=budget)
    assert sorted(i for held in bins for i in held) == list(range(len(tokens)))
    for held in bins:
        assert sum(tokens[i] for i in held) <= budget
        assert len({canvas[i] for i in held}) == 1
    means = [sum(held) / len(held) for held in bins]
    assert means == sorted(means)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([SHORT, LONG, list(range(3, 40))]), st.integers(4, 12), st.integers(1, 3)
)
def test_varied_mixes_of_many_small_samples_fill_99_percent(
    seed: int, lengths: list[int], times: int, canvases: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.choice(lengths, 12_000) * 16
    canvas = rng.integers(0, canvases, len(tokens))
    budget = int(max(lengths)) * 16 * times
    bins = fill_bins(tokens, canvas, budget=budget)
    assert tokens.sum() / (budget * (int(bins.max()) + 1)) >= 0.99


def test_the_fill_is_this_one() -> None:
    # 6 leaves 4; 5 opens another (leaves 5); 4 fits best into the first and fills it; 3 goes to the second.
    assert filled([6, 5, 4, 3, 9, 2], budget=10) == [[0, 2], [1, 3, 5], [4]]


def test_at_most_ten_bins_are_open_and_the_fullest_one_is_closed_for_another() -> None:
    tokens = [60 - i for i in range(OPEN_BINS)] + [60] + [40] + [49]
    bins = filled(tokens, budget=100)
    # The first had least room (40) when an eleventh was needed: nothing may join it, although 40 would fit exactly.
    assert [0] in bins
    assert [10, 11] in bins
    assert [9, 12] in bins


def test_samples_of_a_bin_were_drawn_near_each_other() -> None:
    tokens = np.random.default_rng(0).choice(LONG, 20_000) * 16
    bins = fill_bins(tokens, np.zeros_like(tokens), budget=4096)
    order = np.argsort(bins, kind="stable")
    spans = [int(held.max() - held.min()) for held in np.split(order, np.cumsum(np.bincount(bins))[:-1])]
    assert float(np.mean(spans)) < 20 * OPEN_BINS
    assert max(spans) < len(tokens) / 4


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(60, 150),
    st.sampled_from(["drop", "repeat"]),
    st.booleans(),
    st.integers(0, 3),
)
def test_an_epoch_loses_nothing_but_its_counted_tail(
    world: int, accumulate: int, epoch_draws: int, tail: str, balanced: bool, epoch: int
) -> None:
    cost = COST if balanced else None
    plan = planner(windows(), epoch_draws=epoch_draws, world=world, accumulate=accumulate, tail=tail, cost=cost)
    counts, steps, dropped = plan.counts(epoch), every(plan, epoch), plan.dropped(epoch)
    placed = [(int(p), int(r)) for step in steps for b in step for p, r in zip(b.position, b.repeat, strict=True)]
    assert len(set(placed)) == len(placed)
    assert sorted([p for p, r in placed if r == 0] + dropped.tolist()) == list(range(epoch_draws))
    for position, repeat in placed:
        assert repeat == 0 or (position, repeat - 1) in placed
    assert counts == (epoch_draws, len(dropped), sum(r > 0 for _, r in placed), len(placed), len(steps))
    assert len(steps) % accumulate == 0
    assert len(steps) > 0
    assert not len(dropped) or tail == "drop"
    for step in steps:
        for batch in step:
            assert 0 < tokens_of(batch) <= 800
            assert len(set(zip(batch.at.height.tolist(), batch.at.width.tolist(), strict=True))) == 1
            drawn = plan.draws.at(epoch, batch.position)
            assert batch.window.tolist() == drawn.window.tolist()
            assert batch.position.tolist() == sorted(batch.position.tolist())


@pytest.mark.parametrize("balanced", [False, True])
def test_any_microbatch_is_reached_without_those_before_it(balanced: bool) -> None:
    options: dict[str, Any] = {"world": 2, "accumulate": 2, "cost": COST if balanced else None}
    whole = [every(planner(windows(), **options), epoch) for epoch in range(3)]
    assert len({len(steps) for steps in whole}) > 1  # epochs may differ in length
    for epoch in (2, 0, 1):
        for m in (len(whole[epoch]) - 1, 0):
            for rank in (1, 0):
                alone = planner(windows(), **options).batch_at(epoch, m, rank)
                assert alone.position.tolist() == whole[epoch][m][rank].position.tolist()


def test_a_twin_plans_the_same_and_plans_each_epoch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planner(windows())
    twin = plan.twin()
    expected = [batch.position.tolist() for [batch] in every(plan, 1)]
    monkeypatch.setattr("marey.sampling.planner.fill_epoch", lambda *_, **__: pytest.fail("planned again"))
    assert [batch.position.tolist() for [batch] in every(twin, 1)] == expected


def test_what_is_dropped_are_the_bins_that_the_sampler_would_have_brought_last() -> None:
    tokens = np.full(103, 10, dtype=np.int64)
    canvas = np.zeros(103, dtype=np.int64)
    canvas[[20, 50]] = 1  # a rare canvas, whose bin stays open to the end of the epoch
    plan = fill_epoch(tokens, canvas, budget=100, world=4, accumulate=1, tail="drop", seed=0, epoch=0)
    assert plan.micro_steps == 3  # 12 bins: 10 full ones of canvas 0, one of a single sample, one of canvas 1
    assert plan.left.tolist() == []
    plan = fill_epoch(tokens, canvas, budget=100, world=5, accumulate=1, tail="drop", seed=0, epoch=0)
    assert plan.planned + len(plan.left) == 103
    assert 20 not in plan.left
    assert plan.left.min() > 80


def test_a_later_epoch_too_short_for_a_step_is_completed_and_a_first_one_refused() -> None:
    tokens, canvas = np.full(6, 10, dtype=np.int64), np.zeros(6, dtype=np.int64)
    options: dict[str, Any] = {"budget": 20, "world": 2, "accumulate": 2, "tail": "drop", "seed": 0}
    later = fill_epoch(tokens, canvas, **options, epoch=3)
    assert (later.micro_steps, later.planned, len(later.left)) == (2, 8, 0)
    assert Counter(later.repeats.reshape(-1).tolist()) == {0: 3, 1: 1}
    with pytest.raises(UserError, match=r"data.epoch_draws=6 fill 3 micro.*fill_tokens=20 .* takes 4 \(2 ranks"):
        fill_epoch(tokens, canvas, **options, epoch=0)


def test_filling_needs_height_and_width_and_says_its_own_way_out() -> None:
    with pytest.raises(UserError, match=r"which data.batching.fill_tokens=800 needs; .*set fill_tokens=null"):
        planner(table(a=[9] * 20))


def test_a_million_draws_hold_few_bytes_each() -> None:
    tokens = np.random.default_rng(0).choice(SHORT, 100_000) * 16
    plan = fill_epoch(tokens, np.zeros_like(tokens), budget=5120, world=8, accumulate=1, tail="drop", seed=0, epoch=0)
    assert plan.nbytes / plan.planned < 10
