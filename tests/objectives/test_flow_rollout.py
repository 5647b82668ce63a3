"""Rollouts: known frames stay, the flow is followed to its end, long horizons use trained geometries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.objectives.chunked_conditioned import ChunkedConditionedObjective
from marey.objectives.rollout import Block, SamplerSettings, _chunk, plan_blocks, rollout, rollout_chunked
from marey.objectives.video_program import ProgramSettings
from tests.objectives.latent_cases import (
    CHANNELS,
    SIDE,
    TEXT_CHANNELS,
    batch_of,
    make_model,
    make_objective,
    make_sample,
    predictions,
    prepared_of,
)

BUCKETS = [(1, 3), (2, 6), (3, 9), (4, 12), (5, 15)]
BLANK = torch.zeros(1, TEXT_CHANNELS, dtype=torch.float64)


def latents(frames, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(CHANNELS, frames, SIDE, SIDE, generator=g, dtype=torch.float64)


def watched(program, answer):
    """Replace the model's forward by ``answer(latents, times, positions, text)``; returns the calls it got."""
    calls = []

    def forward(latents, *, times, positions, layout, text=None):
        calls.append((latents.clone(), times.clone(), positions.clone()))
        return answer(latents, times, positions, text)

    program.model.forward = forward
    return calls


def perfect(truth):
    """The velocity that ends in ``truth`` (by position): (x - x0) / s, 0 where s is 0."""

    def answer(x, times, positions, text):
        s = (times / 1000)[:, None, :, None, None]
        goal = truth[:, positions[0].clamp(min=0)]
        return torch.where(s > 0, (x - goal) / s.clamp(min=1e-9), 0.0)

    return answer


@pytest.mark.parametrize("mode", ["strict", "packed"])
def test_a_perfect_velocity_leads_to_the_true_future(mode):
    truth = latents(8)
    program = make_objective(mode, model=make_model(text=False))
    calls = watched(program, perfect(truth))
    future = rollout(program, truth[:, :2], horizon=6, geometries=BUCKETS, settings=SamplerSettings(steps=7))
    torch.testing.assert_close(future, truth[:, 2:])
    assert len(calls) == 7
    for x, times, positions in calls:
        assert torch.equal(x[0, :, :2], truth[:, :2])
        assert times[0, :2].tolist() == [0, 0]
        assert len(times[0, 2:].unique()) == 1
        assert positions[0].tolist() == list(range(8))
    grid = program.decoder.schedule.sampling_grid(7)
    assert [float(times[0, -1]) for _, times, _ in calls] == pytest.approx((1000 * grid[:-1]).tolist())
    first = calls[0][0][0, :, 2:]
    assert 0.7 < float(first.std()) < 1.3


def test_a_long_horizon_feeds_back_what_was_generated():
    program = make_objective("packed", model=make_model(text=False))
    calls = watched(program, lambda x, *_: torch.ones_like(x))
    future = rollout(program, latents(2), horizon=11, geometries=[(2, 3), (4, 5)], settings=SamplerSettings(steps=2))
    assert future.shape == (CHANNELS, 11, SIDE, SIDE)
    lengths = [x.shape[2] for x, _, _ in calls[::2]]
    assert lengths == [5, 9, 5]
    assert torch.equal(calls[4][0][0, :, :2], torch.cat((latents(2), future), dim=1)[:, 8:10])


def test_blocks_of_a_literal_plan():
    assert plan_blocks(1, 3, BUCKETS) == [Block(1, 3)]
    assert plan_blocks(5, 15, BUCKETS) == [Block(5, 15)]
    assert plan_blocks(5, 40, BUCKETS) == [Block(5, 15), Block(5, 15), Block(4, 12)]
    assert plan_blocks(1, 9, BUCKETS) == [Block(1, 3), Block(2, 6)]
    assert plan_blocks(9, 2, BUCKETS) == [Block(1, 3)]
    assert plan_blocks(8, 4, [(1, 4), (2, 4), (8, 4)]) == [Block(8, 4)]


@given(given_frames=st.integers(1, 20), horizon=st.integers(1, 200))
def test_every_block_is_a_trained_geometry_that_its_known_frames_allow(given_frames, horizon):
    known = given_frames
    for block in plan_blocks(given_frames, horizon, BUCKETS):
        assert tuple(block) in BUCKETS
        assert block.prefix <= known
        assert known < given_frames + horizon
        known += block.future
    assert known >= given_frames + horizon


def test_a_start_shorter_than_any_trained_prefix_is_refused():
    with pytest.raises(UserError, match=r"from 1 latent frames is shorter than any trained prefix \(2 frames\)"):
        plan_blocks(1, 4, [(2, 4), (3, 4)])


def test_guidance_extrapolates_from_the_blank_to_the_text():
    program = make_objective("packed", text_dropout=0.5, blank=BLANK + 2)

    def answer(x, times, positions, text):
        per_copy = torch.stack([t.sum() for t in text.split([3, 1])])
        return torch.ones_like(x) * per_copy[:, None, None, None, None]

    watched(program, answer)
    text = torch.ones(3, TEXT_CHANNELS, dtype=torch.float64)
    settings = SamplerSettings(steps=1, guidance=3.0, seed=4)
    guided = rollout(program, latents(1), horizon=3, geometries=BUCKETS, text=text, settings=settings)
    without, with_text = 2.0 * TEXT_CHANNELS, 3.0 * TEXT_CHANNELS
    watched(program, lambda x, *_: torch.zeros_like(x))
    noise = rollout(program, latents(1), horizon=3, geometries=BUCKETS, text=text, settings=settings)
    torch.testing.assert_close(guided, noise - (without + 3.0 * (with_text - without)))


def test_guidance_without_text_dropout_is_refused():
    text = torch.ones(3, TEXT_CHANNELS, dtype=torch.float64)
    settings = SamplerSettings(guidance=2.0)
    for program, own in ((make_objective("packed"), text), (make_objective("packed", blank=BLANK), text)):
        with pytest.raises(UserError, match=r"guidance 2.0 compares with and without the text"):
            rollout(program, latents(1), horizon=3, geometries=BUCKETS, text=own, settings=settings)


@pytest.mark.parametrize("visibility", ["full", "prefix_causal"])
def test_a_rollout_is_a_function_of_its_seed_and_not_of_the_training_mode(visibility):
    text = torch.ones(2, TEXT_CHANNELS, dtype=torch.float64)

    def run(mode, seed):
        settings = SamplerSettings(steps=3, seed=seed)
        program = make_objective(mode, visibility=visibility)
        return rollout(program, latents(2), horizon=5, geometries=BUCKETS, text=text, settings=settings)

    assert torch.equal(run("padded", 0), run("packed", 0))
    assert not torch.allclose(run("packed", 0), run("packed", 1))


def chunked(**changes):
    settings = ProgramSettings(mode="strict", seed=0)
    return ChunkedConditionedObjective(make_model(text=False), settings, **changes)


def test_a_chunked_rollout_goes_chunk_by_chunk_over_clean_frames():
    truth = latents(6)
    program = chunked()
    calls = watched(program, perfect(truth))
    condition = latents(1, seed=9)
    out = rollout_chunked(
        program, condition, horizon=5, max_frames=8, chunk_size=2, window=4, settings=SamplerSettings(steps=3)
    )
    torch.testing.assert_close(out, truth[:, :5])
    assert [x.shape[2] for x, _, _ in calls[::3]] == [1 + 2, 1 + 2 + 2, 1 + 4 + 2]
    last, times, positions = calls[-1]
    torch.testing.assert_close(last[0, :, :5], torch.cat((condition, truth[:, :4]), dim=1))
    assert positions[0].tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert times[0, :5].tolist() == [0] * 5


def test_a_chunked_rollout_starts_again_where_training_ended():
    program = chunked()
    calls = watched(program, lambda x, *_: torch.zeros_like(x))
    out = rollout_chunked(
        program, latents(1), horizon=7, max_frames=3, chunk_size=2, window=4, settings=SamplerSettings(steps=1)
    )
    assert out.shape[1] == 7
    assert [x.shape[2] for x, _, _ in calls] == [3, 4, 3, 4, 3]
    assert torch.equal(calls[2][0][0, :, 0], out[:, 2])


def test_the_last_chunk_of_a_rollout_sees_what_the_same_chunk_sees_in_training():
    """The sampler's sequence of one noisy chunk gives the velocity that the two full streams give it."""
    program = chunked(chunk_sizes=(2, 2), windows=(3, 3), condition_noise=0.0)
    video, condition = latents(6), latents(1, seed=5)
    sample = make_sample(0, 1, 5, video_latents=video, condition_latent=condition)
    batch = batch_of([sample], "strict")
    prepared = prepared_of(program, batch)
    times = prepared.times.clone()
    times[:, 11:13] = 400.0
    expected = predictions(program, batch, prepared._replace(times=times))[0, :, 4:6]
    noisy = prepared.inputs[0, :, 11:13]

    real = program.model.forward
    seen = []

    def forward(latents, *, times, positions, layout, text=None):
        latents = torch.cat((latents[:, :, :-2], noisy.unsqueeze(0)), dim=2)
        times = times.clamp(max=400)
        out = real(latents, times=times, positions=positions, layout=layout, text=text)
        seen.append(out[0, :, -2:])
        return out

    program.model.forward = forward
    clean = torch.cat((condition, video[:, :4]), dim=1)
    _chunk(program, clean, 2, 2, 3, None, SamplerSettings(steps=1), 0)
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-12)


def test_a_few_steps_of_training_bring_the_prediction_towards_the_truth():
    """Still videos of two colours, told apart by their prefix."""
    torch.manual_seed(0)
    model = make_model(text=False, width=32, depth=2).float()
    program = make_objective("packed", model=model)
    colours = torch.tensor([-1.0, 1.0])

    def still(i, prefix, future):
        video = torch.full((CHANNELS, prefix + future, SIDE, SIDE), float(colours[i % 2]))
        return make_sample(i, prefix, future, video_latents=video)

    samples = [still(0, 1, 3), still(1, 2, 4), still(2, 1, 4), still(3, 1, 2)]
    optimizer = torch.optim.AdamW(program.parameters(), lr=3e-3)
    losses = []
    for step in range(120):
        output = program.forward_train_batch(batch_of(samples), micro_step=step)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.parts["flow"].item())
    assert sum(losses[-20:]) < 0.4 * sum(losses[:20])
    for i in range(2):
        prefix = still(i, 1, 3).video_latents[:, :1]
        future = rollout(program, prefix, horizon=3, geometries=[(1, 3)])
        assert float((future - colours[i]).square().mean()) < 0.15
