from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.sampling.cipher import permute
from marey.sampling.draws import (
    CYCLE,
    MixtureDraws,
    SequentialDraws,
    Spread,
    SpreadDraws,
    draw_shares,
    floor_sum,
    largest_remainder,
)


def mixture(sizes: list[int], weights: list[float], **options: int | None) -> MixtureDraws:
    names = [f"s{i}" for i in range(len(sizes))]
    shares = draw_shares(names, weights, [1.0] * len(sizes), meaning="by_draw")
    return MixtureDraws(names, sizes, shares, **{"seed": 0, **options})  # type: ignore[arg-type]


def listed(draws: MixtureDraws | SequentialDraws, epoch: int, first: int, last: int) -> list[tuple[int, int, int]]:
    drawn = draws.at(epoch, np.arange(first, last))
    return list(zip(drawn.source.tolist(), drawn.window.tolist(), drawn.turn.tolist(), strict=True))


def permuted(n: int, turn: int = 0, seed: int = 0) -> list[int]:
    turns = np.full(n, turn)
    return [int(i) for i in permute(np.arange(n), n, turns=turns, seed=seed, purpose="test", parts=(1,))]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 10**6), st.integers(0, 2**62))
def test_a_keyed_permutation_is_a_bijection(n: int, turn: int, seed: int) -> None:
    assert sorted(permuted(n, turn, seed)) == list(range(n))


@given(st.integers(1, 10**12), st.data())
def test_any_entry_of_a_permutation_is_reached_directly(n: int, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, n - 1))
    options = {"seed": 5, "purpose": "test", "parts": (2,)}
    alone = permute(np.array([i]), n, turns=np.array([3]), **options)  # type: ignore[arg-type]
    among = permute(np.array([0, i, n - 1]), n, turns=np.array([3, 3, 3]), **options)  # type: ignore[arg-type]
    assert 0 <= alone[0] < n
    assert alone[0] == among[1]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_of_a_handful_is_equally_likely(n: int) -> None:
    trials = 400 * n
    turns = np.repeat(np.arange(trials), n)
    images = permute(np.tile(np.arange(n), trials), n, turns=turns, seed=0, purpose="test", parts=())
    counts = Counter(map(tuple, images.reshape(trials, n).tolist()))
    orders = list(permutations(range(n)))
    expected = trials / len(orders)
    chi_squared = sum((counts[order] - expected) ** 2 / expected for order in orders)
    freedom = len(orders) - 1
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5


def test_neighbours_of_a_large_permutation_are_unrelated() -> None:
    image = np.array(permuted(10_000))
    steps = np.diff(image)
    assert len(np.unique(steps)) > 5000
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(np.arange(10_000), image)[0, 1]) < 0.05


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 90), st.integers(0, 90))
def test_floor_sums_equal_their_loop(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(st.lists(st.fractions(0, 5), min_size=1, max_size=6).filter(any), st.integers(0, 1000))
def test_largest_remainders_are_exact_and_within_one(weights: list[Fraction], total: int) -> None:
    shares = [w / sum(weights) for w in weights]
    counts = largest_remainder(shares, total)
    assert sum(counts) == total
    assert all(abs(c - s * total) < 1 for c, s in zip(counts, shares, strict=True))


def test_the_larger_remainder_gets_the_seat() -> None:
    assert largest_remainder([Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)], 4) == [2, 1, 1]
    assert largest_remainder([Fraction(1, 2), Fraction(1, 2)], 3) == [2, 1]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(1, 12))
def test_a_spread_is_even_and_loses_nothing(counts: list[int], parts: int) -> None:
    counts[-1] += -sum(counts) % parts
    spread = Spread(counts, parts)
    per_part = [spread.part(j) for j in range(parts)]
    for s, count in enumerate(counts):
        column = [part[s] for part in per_part]
        assert sum(column) == count
        assert set(column) <= {count // parts, count // parts + 1}
        assert [spread.before(j)[s] for j in range(parts + 1)] == [sum(column[:j]) for j in range(parts + 1)]
    assert {sum(part) for part in per_part} == {sum(counts) // parts}


def test_a_small_mixture_is_this_sequence() -> None:
    draws = mixture([5, 3], [2.0, 1.0], epoch_draws=6, block=4)
    assert listed(draws, 0, 0, 6) == SMALL[0]
    assert listed(draws, 1, 0, 6) == SMALL[1]
    assert listed(draws, 2, 0, 6) == SMALL[2]


SMALL: list[list[tuple[int, int, int]]] = [
    [(1, 2, 0), (0, 0, 0), (0, 1, 0), (0, 3, 0), (1, 1, 0), (0, 2, 0)],
    [(0, 4, 0), (1, 0, 0), (0, 0, 1), (0, 3, 1), (0, 2, 1), (1, 0, 1)],
    [(0, 1, 1), (1, 1, 1), (0, 4, 1), (0, 3, 2), (0, 4, 2), (1, 2, 1)],
]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=4).filter(
        lambda s: any(w for _, w in s)
    ),
    st.integers(1, 90),
    st.integers(1, 30),
    st.integers(0, 200),
    st.data(),
)
def test_any_position_is_reached_without_those_before_it(
    sources: list[tuple[int, int]], epoch_draws: int, block: int, epoch: int, data: st.DataObject
) -> None:
    sizes, weights = [n for n, _ in sources], [float(w) for _, w in sources]
    whole = listed(mixture(sizes, weights, epoch_draws=epoch_draws, block=block), epoch, 0, epoch_draws)
    position = data.draw(st.integers(0, epoch_draws - 1))
    fresh = mixture(sizes, weights, epoch_draws=epoch_draws, block=block)
    assert listed(fresh, epoch, position, position + 1) == [whole[position]]
    order = np.array(data.draw(st.permutations(range(epoch_draws))))
    drawn = fresh.at(epoch, order)
    assert [whole[i] for i in order] == list(
        zip(drawn.source.tolist(), drawn.window.tolist(), drawn.turn.tolist(), strict=True)
    )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=3).filter(
        lambda s: any(w for _, w in s)
    ),
    st.integers(1, 25),
    st.integers(1, 9),
)
def test_each_source_runs_through_all_its_windows_before_it_repeats_one(
    sources: list[tuple[int, int]], epoch_draws: int, block: int
) -> None:
    sizes = [n for n, _ in sources]
    draws = mixture(sizes, [float(w) for _, w in sources], epoch_draws=epoch_draws, block=block)
    seen: dict[int, list[tuple[int, int]]] = {}
    for epoch in range(70):
        for source, window, turn in listed(draws, epoch, 0, epoch_draws):
            seen.setdefault(source, []).append((window, turn))
    for source, drawn in seen.items():
        assert [turn for _, turn in drawn] == [k // sizes[source] for k in range(len(drawn))]
        for turn in range(len(drawn) // sizes[source]):
            windows = [w for w, t in drawn if t == turn]
            assert sorted(windows) == list(range(sizes[source]))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5).filter(lambda w: any(v > 0 for v in w)), st.integers(1, 300))
def test_shares_converge_to_the_weights_asked_for(weights: list[float], epoch_draws: int) -> None:
    draws = mixture([7] * len(weights), weights, epoch_draws=epoch_draws)
    drawn = np.sum([draws.quotas(epoch) for epoch in range(CYCLE)], axis=0)
    total = epoch_draws * CYCLE
    assert all(abs(int(n) - share * total) < 1 for n, share in zip(drawn, draws.shares, strict=True))
    counted = np.bincount(draws.at(3, np.arange(epoch_draws)).source, minlength=len(weights))
    assert counted.tolist() == draws.quotas(3)


def test_no_block_strays_more_than_a_draw_from_its_share() -> None:
    draws = mixture([100, 100, 100], [0.61, 0.29, 0.1], epoch_draws=1000, block=50)
    source = draws.at(0, np.arange(1000)).source.reshape(20, 50)
    for s, share in enumerate((0.61, 0.29, 0.1)):
        assert (np.abs((source == s).sum(axis=1) - 50 * share) <= 1).all()


def test_a_share_below_one_draw_an_epoch_is_still_drawn() -> None:
    draws = mixture([100, 3], [0.99, 0.01], epoch_draws=20)
    assert sum(draws.quotas(epoch)[1] for epoch in range(CYCLE)) == 13
    assert max(draws.quotas(epoch)[1] for epoch in range(CYCLE)) == 1


def test_a_zero_weight_is_never_drawn_and_never_blocks() -> None:
    draws = mixture([4, 0, 4], [1.0, 0.0, 1.0])
    assert draws.epoch_draws == 8
    assert {s for s, _, _ in listed(draws, 0, 0, 8)} == {0, 2}


def test_extreme_weights_keep_both_sources() -> None:
    draws = mixture([10, 10], [1.0, 1e-6], epoch_draws=1_000_000)
    assert draws.quotas(0) == [999_999, 1]
    assert (draws.at(0, np.arange(1_000_000)).source == 1).sum() == 1


def test_an_epoch_by_size_is_one_pass_over_every_window() -> None:
    sizes = [700, 31, 5]
    shares = draw_shares("abc", [1, 1, 1], sizes, meaning="by_size")
    draws = MixtureDraws("abc", sizes, shares, seed=3)
    for epoch in range(3):
        drawn = listed(draws, epoch, 0, draws.epoch_draws)
        assert sorted((s, w) for s, w, _ in drawn) == [(s, w) for s, n in enumerate(sizes) for w in range(n)]
        assert {turn for _, _, turn in drawn} == {epoch}


def test_what_a_weight_counts_is_what_it_says() -> None:
    names, weights = ["a", "b"], [1.0, 3.0]
    assert draw_shares(names, weights, [10, 2], meaning="by_draw") == [Fraction(1, 4), Fraction(3, 4)]
    for meaning in ("by_size", "by_hours", "by_frames", "by_tokens"):
        assert draw_shares(names, weights, [10, 2], meaning=meaning) == [Fraction(5, 8), Fraction(3, 8)]


def test_seeds_and_names_key_the_order() -> None:
    def windows(seed: int, name: str) -> list[int]:
        return [w for _, w, _ in listed(MixtureDraws([name], [50], [Fraction(1)], seed=seed), 0, 0, 50)]

    assert windows(0, "a") == windows(0, "a")
    assert windows(0, "a") != windows(1, "a")
    assert windows(0, "a") != windows(0, "b")
    assert windows(0, "a")[:10] != sorted(windows(0, "a"))[:10]


def test_another_source_does_not_reorder_the_first_one() -> None:
    alone = [w for s, w, _ in listed(mixture([20], [1.0], epoch_draws=20), 0, 0, 20)]
    beside = [w for s, w, _ in listed(mixture([20, 9], [1.0, 1.0], epoch_draws=40), 0, 0, 40) if s == 0]
    assert alone == beside


def test_sources_that_give_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="source s1 has no usable window"):
        mixture([4, 0], [1.0, 1.0])
    with pytest.raises(UserError, match="every weight is 0"):
        mixture([4, 4], [0.0, 0.0])
    with pytest.raises(UserError, match="source b has nothing to weigh"):
        draw_shares("ab", [1.0, 1.0], [1.0, 0.0], meaning="by_hours")


def test_sequential_draws_are_every_window_once_in_order() -> None:
    draws = SequentialDraws([2, 0, 3])
    assert listed(draws, 5, 0, 5) == [(0, 0, 0), (0, 1, 0), (2, 0, 0), (2, 1, 0), (2, 2, 0)]


def test_weights_apart_by_any_power_are_exact_and_impossible_ones_never_arrive() -> None:
    shares = draw_shares("ab", [1e300, 1e-300], [1, 1], meaning="by_draw")
    assert shares[0] < 1
    assert sum(shares) == 1
    assert MixtureDraws("ab", [5, 5], shares, seed=0, epoch_draws=10).quotas(0) == [10, 0]
    assert draw_shares("ab", [5e-324, 5e-324], [1, 1], meaning="by_draw") == [Fraction(1, 2)] * 2
    for weight in (-1.0, float("inf"), float("nan")):
        with pytest.raises(AssertionError):
            draw_shares("ab", [2.0, weight], [1, 1], meaning="by_draw")


def test_a_limited_validation_reads_windows_spread_over_all_sources() -> None:
    draws = SpreadDraws([8, 0, 4, 100], 7)
    found = draws.at(0, np.arange(7))
    assert draws.counts == [1, 0, 1, 5]
    assert found.source.tolist() == [0, 2, 3, 3, 3, 3, 3]
    assert found.window.tolist() == [4, 2, 10, 30, 50, 70, 90]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.data())
def test_spread_windows_are_distinct_and_leave_no_source_out(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, sum(sizes)))
    draws = SpreadDraws(sizes, count)
    found = draws.at(3, np.arange(count))
    pairs = set(zip(found.source.tolist(), found.window.tolist(), strict=True))
    assert len(pairs) == count
    assert all(0 <= window < sizes[source] for source, window in pairs)
    there = {source for source, size in enumerate(sizes) if size}
    if count >= len(there):
        assert {source for source, _ in pairs} == there
