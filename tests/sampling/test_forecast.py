from __future__ import annotations

from typing import Any

import pytest

from marey.config.causal import CausalConfig, ProgramConfig
from marey.config.compose import compose_container, validate
from marey.sampling import forecast as forecasting
from marey.sampling.draws import MixtureDraws, draw_shares
from marey.sampling.forecast import Forecast
from marey.sampling.planner import MicrobatchPlanner
from marey.sampling.video_tokens import chunked_pairs
from marey.sampling.windows import WindowTable
from tests.sampling.latent_sources import BUCKETS, source

PROGRAM = validate(compose_container(["data=demo"], config_name="causal_video"), CausalConfig).program


def forecast(planner: MicrobatchPlanner, *, program: ProgramConfig = PROGRAM, **options: Any) -> Forecast:
    return forecasting.forecast(planner, program=program, **options)


def plan(**options: Any) -> MicrobatchPlanner:
    at = WindowTable(
        [
            source("a", [4 + i % 9 for i in range(48)], canvases=[(4, 8)] * 48),
            source("b", [12] * 16, canvases=[(8, 8)] * 16),
        ]
    )
    draws = MixtureDraws(at.names, at.sizes, draw_shares(at.names, [3, 1], [1, 1], meaning="by_draw"), seed=0)
    return MicrobatchPlanner(draws, at, **{"seed": 0, "world": 2, "batch": 4, "shape_grouping": True, **options})


def test_a_forecast_is_a_count_of_the_planned_microbatches() -> None:
    planner = plan()
    found = forecast(planner, patch=2, multiple=4, steps=None)
    tokens = padded = pairs = 0
    for step in range(planner.micro_steps(0)):
        for rank in range(2):
            at = planner.batch_at(0, step, rank).at
            lengths = (at.prefix + at.future).tolist()
            capacity = -(-max(lengths) // 4) * 4
            for n, h, w in zip(lengths, at.height.tolist(), at.width.tolist(), strict=True):
                tokens += n * (h // 2) * (w // 2)
                padded += capacity * (h // 2) * (w // 2)
                pairs += (n * (h // 2) * (w // 2)) ** 2
    steps = planner.micro_steps(0)
    assert found.steps_seen == steps
    assert found.tokens == pytest.approx(tokens / steps)
    assert found.padding_share == pytest.approx(1 - tokens / padded)
    assert found.pairs == pytest.approx(pairs / steps)
    assert set(found.buckets) <= set(BUCKETS)
    assert sum(found.buckets.values()) == found.counts.planned
    assert set(found.canvases) == {(4, 8), (8, 8)}
    counts = found.counts
    assert counts.planned == counts.drawn - counts.dropped + counts.repeated


def test_buckets_pad_less_and_balance_ranks_at_least_as_well() -> None:
    padded = forecast(plan(mode="padded"), steps=None)
    bucket = forecast(plan(mode="bucket", pool_size=32), steps=None)
    assert bucket.tokens == padded.tokens
    assert bucket.padding_share < padded.padding_share
    assert 0 < bucket.rank_balance <= 1


def test_a_sampled_forecast_looks_at_whole_pools() -> None:
    found = forecast(plan(mode="bucket", pool_size=8, world=1), steps=3)
    assert found.steps_seen == 4
    assert found.draws == pytest.approx({"a": 0.75, "b": 0.25}, abs=0.3)


def test_pairs_and_the_balance_of_ranks_are_those_of_the_definitions() -> None:
    planner = plan(world=3)
    found = forecast(planner, patch=1, multiple=5, steps=None)
    pairs_padded, balance, balance_padded = 0, [], []
    steps = planner.micro_steps(0)
    for step in range(steps):
        valid, padded = [], []
        for rank in range(3):
            at = planner.batch_at(0, step, rank).at
            lengths, cells = (at.prefix + at.future).tolist(), int(at.height[0] * at.width[0])
            capacity = -(-max(lengths) // 5) * 5
            valid.append(sum(lengths) * cells)
            padded.append(len(lengths) * capacity * cells)
            pairs_padded += len(lengths) * (capacity * cells) ** 2
        balance.append(sum(valid) / 3 / max(valid))
        balance_padded.append(sum(padded) / 3 / max(padded))
    assert found.pairs_padded == pytest.approx(pairs_padded / steps)
    assert found.rank_balance == pytest.approx(sum(balance) / steps)
    assert found.rank_balance_padded == pytest.approx(sum(balance_padded) / steps)
    assert 0.3 < found.rank_balance < 1


@pytest.mark.parametrize(("size", "window"), [(1, 1), (2, 1), (3, 2), (4, 64)])
def test_pairs_of_the_chunked_program_are_those_of_its_labels(size: int, window: int) -> None:
    from marey.batching.visibility import visibility_matrix
    from marey.objectives.chunked_conditioned import ChunkGeometry, chunk_labels

    for frames in (1, 2, 7, 9):
        labels = chunk_labels([ChunkGeometry(size, window, None)], frames)
        assert chunked_pairs(frames, size=size, window=window) == int(visibility_matrix(labels, labels).sum())


def test_a_forecast_counts_what_the_program_shows() -> None:
    planner = plan(world=1)
    full = forecast(planner, steps=None)
    causal = forecast(planner, steps=None, program=PROGRAM.model_copy(update={"visibility": "prefix_causal"}))
    chunked = forecast(planner, steps=None, program=PROGRAM.model_copy(update={"name": "chunked_conditioned"}))
    hidden = tokens = 0
    for step in range(planner.micro_steps(0)):
        at = planner.batch_at(0, step, 0).at
        cells = at.height * at.width
        hidden += int((at.prefix * at.future * cells**2).sum())
        tokens += int(((1 + 2 * (at.prefix + at.future)) * cells).sum())
    assert full.pairs - causal.pairs == pytest.approx(hidden / planner.micro_steps(0))
    assert causal.tokens == full.tokens
    assert chunked.tokens == pytest.approx(tokens / planner.micro_steps(0))


def test_tail_repeats_are_told_by_source() -> None:
    found = forecast(plan(tail="repeat", world=1, batch=6), steps=None)
    assert sum(found.tail.values()) * found.counts.planned == pytest.approx(found.counts.repeated)
    assert found.counts.repeated > 0
