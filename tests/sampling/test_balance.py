"""Like work for all ranks: modelled costs, dealing longest first, microbatches of like cost together."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.sampling.balance import POOL, deal, deal_alike, group
from marey.sampling.forecast import forecast
from marey.sampling.windows import Located, WindowTable
from tests.sampling.filled_cases import CONFIG, COST, every, planner, windows
from tests.sampling.latent_sources import source, table


def test_modelled_flops_are_those_of_the_products() -> None:
    at = Located(*(np.array([v], dtype=np.int64) for v in (0, 0, 2, 6, 8, 12)))
    n, width, layers = 8 * (4 * 6), CONFIG.model.hidden, CONFIG.model.layers
    matrices = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    linear = sum(2 * n * a * b for a, b in matrices)
    attention = 2 * (2 * n * n * width)
    assert COST.of(at).tolist() == [layers * (linear + attention)]
    padded = COST.of(at, frames=np.array([10]))
    assert padded.tolist() == [layers * (linear * 10 / 8 + attention * (10 / 8) ** 2)]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_dealing_gives_every_sample_once_and_as_many_to_each(ranks: int, batch: int, data: st.DataObject) -> None:
    n = ranks * batch
    cost = np.array(data.draw(st.lists(st.integers(1, 50), min_size=n, max_size=n)), dtype=np.float64)
    dealt = deal(cost, ranks)
    assert dealt.shape == (ranks, batch)
    assert sorted(dealt.reshape(-1).tolist()) == list(range(n))
    assert (np.diff(dealt, axis=1) > 0).all()
    assert dealt.tolist() == deal(cost, ranks).tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=6, max_size=6))
def test_dealing_is_near_the_best_there_is(costs: list[int]) -> None:
    cost = np.array(costs, dtype=np.float64)
    busiest = cost[deal(cost, 2)].sum(axis=1).max()
    best = min(max(sum(order[:3]), sum(order[3:])) for order in permutations(costs))
    assert busiest <= 4 / 3 * best


def test_dealing_moves_samples_between_microbatches_of_one_kind_alone() -> None:
    cost = np.array([9.0, 8.0, 1.0, 1.0, 5.0, 5.0, 7.0, 1.0])
    dealt = deal_alike(cost, np.array([0, 0, 1, 0]), batch=2)
    assert dealt[2].tolist() == [4, 5]
    assert sorted(dealt[[0, 1, 3]].reshape(-1).tolist()) == [0, 1, 2, 3, 6, 7]
    assert sorted(cost[dealt[[0, 1, 3]]].sum(axis=1).tolist()) == [8, 9, 10]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 35), st.integers(0, 1000))
def test_groups_hold_every_microbatch_once_and_stay_in_their_pool(world: int, steps: int, seed: int) -> None:
    cost = np.random.default_rng(seed).random(world * steps)
    grouped = group(cost, world=world, seed=seed, epoch=0)
    assert sorted(grouped.reshape(-1).tolist()) == list(range(world * steps))
    assert (grouped // (world * POOL) == np.arange(steps)[:, None] // POOL).all()
    again = group(cost, world=world, seed=seed, epoch=0)
    assert grouped.tolist() == again.tolist()


def test_micro_steps_take_turns_in_which_rank_has_the_most_costly_sample() -> None:
    cost, kinds = np.array([5.0, 1.0, 1.0, 1.0]), np.array([0, 0])
    assert deal_alike(cost, kinds, batch=2).tolist() == [[0, 3], [1, 2]]
    assert deal_alike(cost, kinds, batch=2, backwards=True).tolist() == [[1, 2], [0, 3]]
    at = WindowTable([source("a", [4 + i % 9 for i in range(90)], canvases=[(8, 8)] * 90)])
    plan = planner(at, fill_tokens=None, world=3, batch=1, cost=COST)
    loads = np.array([[COST.of(b.at).sum() for b in step] for step in every(plan)])
    assert (np.diff(loads[::2], axis=1) <= 0).all()
    assert (np.diff(loads[1::2], axis=1) >= 0).all()


def test_groups_are_of_like_cost_in_no_order_and_no_rank_is_always_the_busiest() -> None:
    cost = np.random.default_rng(0).lognormal(size=8 * 400)
    grouped = cost[group(cost, world=8, seed=0, epoch=0)]
    apart = cost.reshape(-1, 8)
    assert (grouped.mean(axis=1) / grouped.max(axis=1)).mean() > 0.8 > 0.5 > (apart.mean(1) / apart.max(1)).mean()
    assert abs(np.corrcoef(grouped.mean(axis=1), np.arange(400))[0, 1]) < 0.2
    assert Counter(grouped.argmax(axis=1).tolist()).keys() == {0, 7}


def test_longest_first_keeps_the_samples_of_each_micro_step_and_evens_out_the_work() -> None:
    options: dict[str, Any] = {"fill_tokens": None, "world": 4, "batch": 6, "shape_grouping": True}
    apart, level = planner(windows(), **options), planner(windows(), **options, cost=COST)
    assert apart.counts(1) == level.counts(1)
    shares: list[list[float]] = [[], []]
    for before, after in zip(every(apart, 1), every(level, 1), strict=True):
        for column in ("position", "repeat", "window"):
            drawn = [Counter(v for b in step for v in getattr(b, column).tolist()) for step in (before, after)]
            assert drawn[0] == drawn[1]
        for found, step in zip(shares, (before, after), strict=True):
            loads = [float(COST.of(batch.at).sum()) for batch in step]
            found.append(sum(loads) / 4 / max(loads))
        for one, other in zip(before, after, strict=True):
            assert len(one.position) == len(other.position) == 6
            canvases = set(zip(other.at.height.tolist(), other.at.width.tolist(), strict=True))
            assert canvases == set(zip(one.at.height.tolist(), one.at.width.tolist(), strict=True))
    assert np.mean(shares[1]) > np.mean(shares[0])


def test_longest_first_on_eight_ranks_is_above_nine_tenths() -> None:
    at = WindowTable([source("a", [4 + i % 9 for i in range(2400)], canvases=[(8, 8)] * 2400)])
    balance = {}
    modes: dict[str, dict[str, Any]] = {
        "in order": {"fill_tokens": None},
        "longest first": {"fill_tokens": None, "cost": COST},
        "filled": {"fill_tokens": 2560},
        "filled, longest first": {"fill_tokens": 2560, "cost": COST},
    }
    for name, options in modes.items():
        plan = planner(at, world=8, batch=8, shape_grouping=True, **options)
        loads = np.array([[COST.of(batch.at).sum() for batch in step] for step in every(plan)])
        balance[name] = float((loads.mean(axis=1) / loads.max(axis=1)).mean())
    assert balance["in order"] < 0.85 < 0.9 < balance["longest first"]
    assert balance["filled"] < balance["filled, longest first"]
    assert balance["filled, longest first"] > 0.95


@pytest.mark.parametrize("mode", ["packed", "bucket"])
def test_a_forecast_measures_the_work_of_ranks_by_the_same_costs(mode: str) -> None:
    plan = planner(windows(), fill_tokens=None, world=3, batch=5, mode=mode, pool_size=10)
    found = forecast(plan, program=CONFIG.program, patch=2, multiple=4, steps=None, cost=COST)
    valid, padded = [], []
    for step in every(plan):
        longest = [np.full(5, -(-int((b.at.prefix + b.at.future).max()) // 4) * 4) for b in step]
        valid.append([COST.of(b.at).sum() for b in step])
        padded.append([COST.of(b.at, frames=n).sum() for b, n in zip(step, longest, strict=True)])
    for loads, said in ((valid, found.flops_balance), (padded, found.flops_balance_padded)):
        assert said == pytest.approx(float(np.mean([np.mean(row) / max(row) for row in loads])))
    assert found.samples == (5, 5)
    assert forecast(plan, program=CONFIG.program, patch=2).flops_balance is None


def test_balance_needs_height_and_width_and_says_its_own_way_out() -> None:
    with pytest.raises(UserError, match=r"which data.batching.balance=longest_first needs; .*set balance=none"):
        planner(table(a=[9] * 20), fill_tokens=None, cost=COST)
