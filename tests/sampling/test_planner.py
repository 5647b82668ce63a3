from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.sampling.canvases import by_canvas
from marey.sampling.draws import MixtureDraws, SequentialDraws, draw_shares
from marey.sampling.planner import MicrobatchPlanner, PlannedBatch
from marey.sampling.stream import MicrobatchSampler, RequestStream
from marey.sampling.windows import WindowTable
from tests.sampling.latent_sources import source, table

CANVASES = [(8, 8), (8, 12), (16, 16)]


def windows(n: int = 60) -> WindowTable:
    lengths = [4 + (7 * i) % 9 for i in range(n)]
    return WindowTable(
        [
            source("a", lengths, canvases=[CANVASES[i % 2] for i in range(n)]),
            source("b", lengths[: n // 3], canvases=[CANVASES[2]] * (n // 3)),
        ]
    )


def planner(at: WindowTable, *, epoch_draws: int | None = None, **options: object) -> MicrobatchPlanner:
    shares = draw_shares(at.names, [1.0] * len(at.sources), [1.0] * len(at.sources), meaning="by_draw")
    draws = MixtureDraws(at.names, at.sizes, shares, seed=1, epoch_draws=epoch_draws)
    return MicrobatchPlanner(draws, at, **{"seed": 1, "world": 1, "batch": 4, **options})  # type: ignore[arg-type]


def every(plan: MicrobatchPlanner, epoch: int = 0) -> list[list[PlannedBatch]]:
    return [[plan.batch_at(epoch, m, rank) for rank in range(plan.world)] for m in range(plan.micro_steps(epoch))]


def originals(plan: MicrobatchPlanner, epoch: int = 0) -> Counter[int]:
    return Counter(
        int(p)
        for step in every(plan, epoch)
        for batch in step
        for p, r in zip(batch.position, batch.repeat, strict=True)
        if r == 0
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 2),
    st.integers(30, 90),
    st.sampled_from(["strict", "padded", "bucket", "packed"]),
    st.sampled_from(["drop", "repeat"]),
    st.booleans(),
    st.integers(0, 25),
    st.integers(0, 3),
)
def test_every_stage_keeps_the_multiset_of_draws(
    world: int,
    batch: int,
    accumulate: int,
    epoch_draws: int,
    mode: str,
    tail: str,
    grouping: bool,
    pool: int,
    epoch: int,
) -> None:
    plan = planner(
        windows(),
        epoch_draws=epoch_draws,
        world=world,
        batch=batch,
        accumulate=accumulate,
        mode=mode,
        tail=tail,
        shape_grouping=grouping,
        pool_size=pool,
    )
    counts = plan.counts(epoch)
    step = world * batch * accumulate
    cut = epoch_draws // step * step if tail == "drop" else epoch_draws
    assert originals(plan, epoch) == Counter(range(cut))
    assert plan.dropped().tolist() == list(range(cut, epoch_draws))
    assert counts.drawn - counts.dropped == cut
    assert counts.planned == counts.micro_steps * world * batch == cut + counts.repeated
    assert counts.micro_steps % accumulate == 0
    if not grouping and tail == "drop":
        assert counts.repeated == 0
    repeats = [
        (int(p), int(r)) for s in every(plan, epoch) for b in s for p, r in zip(b.position, b.repeat, strict=True)
    ]
    assert len(set(repeats)) == len(repeats)
    for position, repeat in repeats:
        assert repeat == 0 or (position, repeat - 1) in repeats or grouping
    for batches in every(plan, epoch):
        for b in batches:
            drawn = plan.draws.at(epoch, b.position)
            assert b.source.tolist() == drawn.source.tolist()
            assert b.window.tolist() == drawn.window.tolist()
            if grouping and batch > 1:
                assert len(set(zip(b.at.height.tolist(), b.at.width.tolist(), strict=True))) == 1


@pytest.mark.parametrize("mode", ["strict", "padded", "packed"])
def test_a_micro_step_takes_its_block_of_positions_and_a_rank_its_part(mode: str) -> None:
    plan = planner(windows(), epoch_draws=70, world=3, batch=4, mode=mode)
    assert plan.micro_steps(0) == 5
    assert plan.batch_at(0, 2, 1).position.tolist() == [28, 29, 30, 31]


def test_one_two_and_eight_ranks_draw_the_same() -> None:
    def drawn(world: int, batch: int) -> list[tuple[int, int, int]]:
        plan = planner(windows(), epoch_draws=80, world=world, batch=batch)
        steps = [batch for step in every(plan, 3) for batch in step]
        return [(int(b.position[i]), int(b.source[i]), int(b.window[i])) for b in steps for i in range(len(b.position))]

    assert drawn(1, 16) == drawn(2, 8) == drawn(8, 2)


@pytest.mark.parametrize("mode", ["padded", "bucket"])
@pytest.mark.parametrize("grouping", [False, True])
def test_any_microbatch_is_reached_without_those_before_it(mode: str, grouping: bool) -> None:
    options = {"epoch_draws": 75, "world": 2, "batch": 3, "mode": mode, "pool_size": 9, "shape_grouping": grouping}
    whole = [every(planner(windows(), **options), epoch) for epoch in range(2)]  # type: ignore[arg-type]
    for epoch in range(2):
        for m in range(len(whole[epoch])):
            for rank in range(2):
                alone = planner(windows(), **options).batch_at(epoch, m, rank)  # type: ignore[arg-type]
                assert alone.position.tolist() == whole[epoch][m][rank].position.tolist()
                assert alone.repeat.tolist() == whole[epoch][m][rank].repeat.tolist()


def test_buckets_pool_each_rank_s_own_part_and_sort_it_by_length() -> None:
    plan = planner(windows(), epoch_draws=72, world=2, batch=4, mode="bucket", pool_size=13, bucket_order="sorted")
    assert plan.pooled == 3
    for rank in range(2):
        for pool in range(3):
            steps = [plan.batch_at(0, 3 * pool + i, rank) for i in range(3)]
            positions = {int(p) for b in steps for p in b.position}
            assert positions == {m * 8 + rank * 4 + i for m in range(3 * pool, 3 * pool + 3) for i in range(4)}
            lengths = np.concatenate([b.at.prefix + b.at.future for b in steps])
            assert (np.diff(lengths) >= 0).all()


def test_shuffled_buckets_are_the_sorted_ones_in_another_order() -> None:
    def steps(order: str) -> list[tuple[int, ...]]:
        plan = planner(windows(), epoch_draws=80, batch=4, mode="bucket", pool_size=40, bucket_order=order)
        return [tuple(b.position.tolist()) for [b] in every(plan)]

    ascending, keyed = steps("sorted"), steps("shuffled")
    assert sorted(ascending[:10]) == sorted(keyed[:10])
    assert sorted(ascending[10:]) == sorted(keyed[10:])
    assert ascending != keyed


def test_repeats_of_one_window_are_in_different_microbatches_of_a_pool() -> None:
    at = table(a=[4, 4, 4, 4])  # all of one geometry
    plan = planner(at, epoch_draws=16, batch=4, mode="bucket", pool_size=16)
    assert [sorted(batch.window.tolist()) for [batch] in every(plan)] == [[0, 1, 2, 3]] * 4


def test_a_dropped_tail_is_cut_from_the_stream_before_pooling() -> None:
    plan = planner(windows(), epoch_draws=30, batch=4, accumulate=2, mode="bucket", pool_size=999)
    assert plan.dropped().tolist() == [24, 25, 26, 27, 28, 29]
    assert originals(plan) == Counter(range(24))


def test_a_completed_tail_repeats_draws_evenly_and_counts_them() -> None:
    plan = planner(windows(), epoch_draws=3, world=2, batch=4, tail="repeat")
    placed = [
        (int(p), int(r)) for [a, b] in every(plan) for x in (a, b) for p, r in zip(x.position, x.repeat, strict=True)
    ]
    assert placed == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]
    assert plan.counts(0) == (3, 0, 5, 8, 1)


def test_an_epoch_smaller_than_one_step_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"data.epoch_draws=7 does not fill one optimizer step of 8 samples"):
        planner(windows(), epoch_draws=7, world=2, batch=4)


def test_grouping_needs_height_and_width_unless_a_batch_is_one_sample() -> None:
    bare = table(a=[9] * 20)
    with pytest.raises(UserError, match="has no columns height and width"):
        planner(bare, shape_grouping=True)
    assert len(every(planner(bare, shape_grouping=True, batch=1))) == 20


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=60), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_a_canvas_plan_loses_nothing_and_mixes_nothing(
    canvas: list[int], world: int, batch: int, accumulate: int
) -> None:
    draws, repeats = by_canvas(np.array(canvas, dtype=np.int64), world=world, batch=batch, accumulate=accumulate)
    assert draws.shape == repeats.shape == (len(draws), world, batch)
    assert len(draws) % accumulate == 0
    pairs = list(zip(draws.flatten().tolist(), repeats.flatten().tolist(), strict=True))
    assert sorted(d for d, r in pairs if r == 0) == list(range(len(canvas)))
    assert len(set(pairs)) == len(pairs)
    codes = np.array(canvas, dtype=np.int64)
    for microbatch in draws.reshape(-1, batch):
        assert len(set(codes[microbatch].tolist())) == 1
    kinds = len(set(canvas))
    assert len(pairs) - len(canvas) <= kinds * (batch - 1) + (world * accumulate - 1) * batch
    for d, r in pairs:
        assert r == 0 or (d, r - 1) in pairs


def test_a_canvas_plan_is_this_one() -> None:
    draws, repeats = by_canvas(np.array([0, 1, 0, 0, 1, 0, 0]), world=1, batch=2, accumulate=1)
    assert draws.reshape(-1, 2).tolist() == CANVAS_PLAN[0]
    assert repeats.reshape(-1, 2).tolist() == CANVAS_PLAN[1]


CANVAS_PLAN: tuple[list[list[int]], list[list[int]]] = (
    [[0, 2], [1, 4], [3, 5], [6, 5]],
    [[0, 0], [0, 0], [0, 0], [0, 1]],
)


def test_canvases_alternate_as_the_stream_brings_them() -> None:
    rng = np.random.default_rng(0)
    canvas = rng.integers(0, 2, 4000)
    draws, _ = by_canvas(canvas, world=2, batch=5, accumulate=1)
    first = canvas[draws[:, 0, 0]]
    assert abs(first[:100].mean() - 0.5) < 0.2
    assert abs(first[-100:].mean() - 0.5) < 0.2


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 5))
def test_validation_reads_every_window_once_and_keeps_the_short_batch(n: int, world: int, batch: int) -> None:
    at = table(a=[9] * n, b=[9])
    plan = MicrobatchPlanner(SequentialDraws(at.sizes), at, seed=0, world=world, batch=batch, tail="keep")
    seen = [int(p) for step in every(plan) for b in step for p in b.position]
    assert seen == list(range(n + 1))
    assert plan.counts(0)[:4] == (n + 1, 0, 0, n + 1)


def test_requests_say_all_that_a_reader_needs_and_start_anywhere() -> None:
    plan = planner(windows(), epoch_draws=40, world=2, batch=4)
    stream = RequestStream(plan, [None, "THWC"])
    whole = list(MicrobatchSampler(stream, epoch=2, rank=1))
    assert len(whole) == 5
    assert list(MicrobatchSampler(stream, epoch=2, rank=1, first=3)) == whole[3:]
    assert len(MicrobatchSampler(stream, epoch=2, rank=1, first=3)) == 2
    batch = plan.batch_at(2, 3, 1)
    for i, request in enumerate(whole[3]):
        assert (request.epoch, request.position, request.repeat) == (2, int(batch.position[i]), 0)
        assert request.layout == (None if request.source == "a" else "THWC")
        assert request.start + request.frames <= request.clip.length_frames
        assert (request.clip.height, request.clip.width) == (batch.at.height[i], batch.at.width[i])
        assert request.alternates == ()


def test_alternates_are_other_clips_of_the_same_source_and_shape() -> None:
    plan = planner(windows(), epoch_draws=40, batch=4)
    one, again = (RequestStream(plan, [None, None], alternates=2).requests(0, 3, 0) for _ in range(2))
    assert one == again
    assert any(request.alternates for request in one)
    for request in one:
        for other in request.alternates:
            assert other.source == request.source
            assert other.clip.clip_id != request.clip.clip_id
            assert (other.clip.height, other.clip.width) == (request.clip.height, request.clip.width)
            assert (other.prefix, other.future) == (request.prefix, request.future)
            assert (other.epoch, other.position) == (request.epoch, request.position)


def test_measured_shares_are_the_weights_asked_for() -> None:
    at = windows()
    draws = MixtureDraws(at.names, at.sizes, [Fraction(3, 4), Fraction(1, 4)], seed=0, epoch_draws=400)
    plan = MicrobatchPlanner(draws, at, seed=0, world=2, batch=5, mode="bucket", pool_size=50)
    counted = Counter(int(s) for step in every(plan) for b in step for s in b.source)
    assert counted == {0: 300, 1: 100}


@pytest.mark.parametrize(("batch", "grouping"), [(4, False), (1, True), (4, True)])
def test_pools_go_by_length_alone_unless_grouping_by_shape_is_asked_for(batch: int, grouping: bool) -> None:
    plan = planner(
        windows(),
        epoch_draws=40,
        batch=batch,
        mode="bucket",
        pool_size=999,
        bucket_order="sorted",
        shape_grouping=grouping,
    )
    steps = [b for [b] in every(plan)]
    lengths = np.concatenate([b.at.prefix + b.at.future for b in steps])
    canvases = np.concatenate([b.at.height * 1000 + b.at.width for b in steps])
    assert (np.diff(canvases) >= 0).all() == grouping
    assert (np.diff(lengths) >= 0).all() != grouping
    assert (np.diff(canvases * 1000 + lengths) >= 0).all() == grouping


@pytest.mark.parametrize("mode", ["strict", "padded", "bucket", "packed"])
@pytest.mark.parametrize("grouping", [False, True])
def test_eight_ranks_share_three_windows_by_counted_repeats_or_refuse(mode: str, grouping: bool) -> None:
    def three() -> WindowTable:
        return WindowTable([source("a", [4, 4, 4], canvases=[(4, 4)] * 3)])

    options = {"world": 8, "batch": 2, "mode": mode, "shape_grouping": grouping, "pool_size": 100}
    plan = planner(three(), tail="repeat", **options)
    assert plan.counts(0) == (3, 0, 13, 16, 1)
    (ranks,) = every(plan)
    assert [len(set(batch.window.tolist())) for batch in ranks] == [2] * 8
    placed = Counter(int(r) for batch in ranks for r in batch.repeat)
    assert placed == {0: 3, 1: 3, 2: 3, 3: 3, 4: 3, 5: 1}
    with pytest.raises(UserError, match=r"data.epoch_draws=3 does not fill one optimizer step of 16 .*drop_last_train"):
        planner(three(), **options)


def test_one_draw_fills_a_batch_by_repeating_itself() -> None:
    plan = planner(windows(), epoch_draws=1, batch=4, tail="repeat", mode="bucket", pool_size=2)
    ((batch,),) = every(plan)
    assert (batch.position.tolist(), batch.repeat.tolist()) == ([0, 0, 0, 0], [0, 1, 2, 3])
    assert plan.counts(0) == (1, 0, 3, 4, 1)


def test_equal_window_numbers_of_two_sources_are_not_repeats() -> None:
    plan = planner(table(a=[4, 4, 4], b=[4, 4, 4]), batch=2, mode="bucket", pool_size=6, bucket_order="sorted")
    epochs = [[batch for [batch] in every(plan, epoch)] for epoch in range(9)]
    assert all([batch.position.tolist() for batch in steps] == [[0, 1], [2, 3], [4, 5]] for steps in epochs)
    assert any(batch.window[0] == batch.window[1] for steps in epochs for batch in steps)
