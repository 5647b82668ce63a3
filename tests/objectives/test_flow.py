"""Noise levels, and which key each random tensor has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marey.objectives.flow import FlowDraws, FlowSchedule, noised, velocity
from tests.objectives.latent_cases import batch_of, make_sample, make_samples


def test_levels_are_linear_from_one_with_the_end_excluded_and_then_shifted():
    grid = FlowSchedule().grid()
    assert len(grid) == 1000
    assert grid[0] == 1
    assert float(grid[500]) == pytest.approx(5 * 0.5 / (1 + 4 * 0.5))
    assert float(grid[999]) == pytest.approx(5 * 0.001 / (1 + 4 * 0.001))
    assert bool((grid.diff() < 0).all())
    torch.testing.assert_close(FlowSchedule(shift=1.0).grid(), torch.linspace(1, 0.001, 1000, dtype=torch.float64))


@given(steps=st.integers(1, 60), shift=st.floats(0.2, 12))
def test_a_sampler_goes_from_noise_to_clean_on_the_shifted_grid(steps, shift):
    grid = FlowSchedule(shift=shift).sampling_grid(steps)
    assert len(grid) == steps + 1
    assert float(grid[0]) == pytest.approx(1, abs=1e-15)
    assert grid[-1] == 0
    assert bool((grid.diff() < 0).all())


def test_velocity_carries_a_noised_frame_to_noise_and_back():
    clean, noise = torch.randn(2, 2, 3, 4, 2, 2, dtype=torch.float64)
    level = torch.rand(2, 4, dtype=torch.float64)
    x = noised(clean, noise, level)
    s = level[:, None, :, None, None]
    torch.testing.assert_close(x + (1 - s) * velocity(clean, noise), noise)
    torch.testing.assert_close(x - s * velocity(clean, noise), clean)
    assert torch.equal(noised(clean, noise, torch.zeros_like(level)), clean)


def draws(samples, layout, *, multiple=1, micro_step=0, seed=0):
    batch = batch_of(samples, multiple=multiple)
    source = FlowDraws(batch, layout=layout, seed=seed, micro_step=micro_step)
    return source.normal(), source.integers(1000)


def test_collated_noise_covers_the_capacity_and_depends_on_it():
    samples = make_samples(3)
    noise, index = draws(samples, "collated")
    assert bool((noise[2, :, 2:] != 0).all())
    again, index_again = draws(samples, "collated")
    assert torch.equal(noise, again)
    assert torch.equal(index, index_again)
    wide, _ = draws(samples, "collated", multiple=3)
    assert wide.shape[2] == 9
    assert not torch.equal(wide[:, :, :8], noise)
    assert not torch.equal(draws(samples, "collated", micro_step=1)[0], noise)
    assert not torch.equal(draws(samples, "collated", seed=1)[0], noise)


def test_per_sample_noise_ignores_batch_mates_capacity_order_and_micro_step():
    samples = make_samples(4)
    noise, index = draws(samples, "per_sample")
    other, other_index = draws([samples[2], samples[0]], "per_sample", multiple=5, micro_step=9)
    for here, there in ((2, 0), (0, 1)):
        frames = samples[here].valid_frames
        assert torch.equal(noise[here, :, :frames], other[there, :, :frames])
        assert torch.equal(index[here, :frames], other_index[there, :frames])
    assert not bool(noise[2, :, 2:].any())


def test_per_sample_noise_of_one_window_differs_between_its_draws():
    """Otherwise a clip would be trained on one noise for ever."""
    base = make_sample(0, 1, 3)
    fields = {"epoch": 1}, {"position": 77}, {"repeat": 1}
    reference = draws([base], "per_sample")[0]
    for changes in fields:
        assert not torch.equal(draws([make_sample(0, 1, 3, **changes)], "per_sample")[0], reference)


def test_validation_draws_belong_to_the_window_alone():
    a = FlowDraws.fixed(batch_of([make_sample(0, 1, 3)]), seed=0).normal()
    b = FlowDraws.fixed(batch_of([make_sample(1, 2, 6), make_sample(0, 1, 3, epoch=4, position=9)]), seed=0).normal()
    assert torch.equal(a[0], b[1, :, :4])


def test_levels_are_uniform_over_the_grid():
    batch = batch_of([make_sample(i, 2, 6) for i in range(50)])
    index = torch.cat([FlowDraws(batch, layout="collated", seed=0, micro_step=m).integers(1000) for m in range(50)])
    counts = torch.bincount(index.flatten() // 100, minlength=10).double()
    expected = index.numel() / 10
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9  # chi-square, 9 degrees of freedom, p = .001


def test_ranks_draw_their_own_collated_noise_and_the_same_per_sample(monkeypatch):
    samples = make_samples(2)
    for layout, same in (("collated", False), ("per_sample", True)):
        monkeypatch.setattr("marey.objectives.flow.current_rank", lambda: 0)
        first = draws(samples, layout)
        monkeypatch.setattr("marey.objectives.flow.current_rank", lambda: 1)
        for mine, its in zip(first, draws(samples, layout), strict=True):
            assert torch.equal(mine, its) == same


def test_noise_is_standard_and_every_tensor_of_a_step_is_its_own():
    batch = batch_of([make_sample(i, 2, 6) for i in range(40)])
    for layout in ("collated", "per_sample"):
        source = FlowDraws(batch, layout=layout, seed=0, micro_step=0)
        first, second = source.normal(), source.normal(extra=1)
        assert second.shape[2] == first.shape[2] + 1
        for noise in (first, second):
            assert abs(float(noise.mean())) < 0.03
            assert abs(float(noise.std()) - 1) < 0.03
        for shift in (0, 1):
            pair = torch.stack((first.flatten(), second[:, :, shift : shift + 8].flatten()))
            assert abs(float(pair.corrcoef()[0, 1])) < 0.03
