from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from marey.config.schema import SigregKwargs
from marey.objectives import sigreg as module
from marey.objectives.sigreg import SigReg, directions
from tests.distributed import run_ranks


def statistic(knots: int = 17, num_proj: int = 12, normalize_by_n: bool = False, seed: int = 0) -> SigReg:
    return SigReg(SigregKwargs(knots=knots, num_proj=num_proj, normalize_by_n=normalize_by_n), seed=seed)


def cloud(views: int = 3, samples: int = 6, width: int = 5, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.3 + 1.5 * torch.randn(views, samples, width, generator=generator, dtype=torch.float64)


def slow(z: torch.Tensor, axes: torch.Tensor, knots: int, normalize_by_n: bool) -> float:
    """Straight from the formula, one number at a time."""
    views, samples, _ = z.shape
    dt = 3 / (knots - 1)
    total = 0.0
    for view in z.tolist():
        for axis in axes.tolist():
            projections = [sum(a * b for a, b in zip(row, axis, strict=True)) for row in view]
            for k in range(knots):
                t = k * dt
                gauss = math.exp(-t * t / 2)
                cos = sum(math.cos(t * p) for p in projections) / samples
                sin = sum(math.sin(t * p) for p in projections) / samples
                weight = dt if k in (0, knots - 1) else 2 * dt
                total += weight * gauss * ((cos - gauss) ** 2 + sin**2)
    return total / (views * len(axes)) * (1 if normalize_by_n else samples)


@pytest.mark.parametrize("normalize_by_n", [False, True])
@pytest.mark.parametrize("knots", [2, 17])
def test_the_statistic_equals_its_formula(knots: int, normalize_by_n: bool) -> None:
    z = cloud()
    axes = directions(12, 5, seed=0, micro_step=4)
    value = statistic(knots=knots, normalize_by_n=normalize_by_n)(z, micro_step=4)
    assert float(value) == pytest.approx(slow(z, axes, knots, normalize_by_n), rel=1e-12)


@pytest.mark.parametrize("slab", [1, 100, 2**22])
def test_the_gradient_is_right_however_little_is_held_at_a_time(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLAB_ELEMENTS", slab)
    z = cloud().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: statistic()(x, micro_step=0), (z,))
    transposed = cloud().transpose(0, 1).contiguous().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: statistic()(x.transpose(0, 1), micro_step=0), (transposed,))


def test_a_gaussian_cloud_scores_low_and_a_collapsed_one_high() -> None:
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(1, 2000, 16, generator=generator)
    flat = gauss.clone()
    flat[..., 2:] = 0
    values = [float(statistic(num_proj=256)(z, micro_step=0)) for z in (gauss, flat, torch.zeros_like(gauss))]
    assert values[0] < 2
    assert 100 * values[0] < values[1] < values[2]


def test_directions_are_unit_vectors_that_belong_to_seed_and_step() -> None:
    a = directions(64, 8, seed=0, micro_step=5)
    assert a.dtype == torch.float64
    torch.testing.assert_close(a.norm(dim=1), torch.ones(64, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.manual_seed(123)
    assert torch.equal(a, directions(64, 8, seed=0, micro_step=5))
    assert not torch.equal(a, directions(64, 8, seed=0, micro_step=6))
    assert not torch.equal(a, directions(64, 8, seed=1, micro_step=5))


def test_half_precision_runs_compute_it_in_float32() -> None:
    z = cloud(samples=64).float()
    z.requires_grad_()
    exact = statistic()(z, micro_step=0)
    exact.backward()
    expected = z.grad.clone()
    z.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = statistic()(z, micro_step=0)
        value.backward()
    assert value.dtype == torch.float32
    assert torch.equal(value, exact)
    assert torch.equal(z.grad, expected)
    half = statistic()(z.detach().bfloat16(), micro_step=0)
    assert half.dtype == torch.float32
    assert torch.equal(half, statistic()(z.detach().bfloat16().float(), micro_step=0))


def test_float64_stays_float64() -> None:
    assert statistic()(cloud(), micro_step=0).dtype == torch.float64


def test_nothing_of_the_size_of_all_angles_is_kept_for_the_backward_pass() -> None:
    z = cloud(samples=32).requires_grad_()
    kept = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        statistic(num_proj=64)(z, micro_step=0)
    # Sums per (cos or sin, knot, view, direction) are the largest; angles would be 32 times that.
    assert max(kept) <= 2 * 17 * 3 * 64


def half_of_the_batch(rank: int, world: int) -> list[torch.Tensor]:
    z = cloud(samples=8)[:, rank * 8 // world : (rank + 1) * 8 // world].clone().requires_grad_()
    value = statistic()(z, micro_step=2)
    value.backward()
    return [value.detach(), z.grad]


@pytest.mark.parametrize("world", [2])
def test_ranks_together_equal_one_process_in_value_and_gradient(world: int, tmp_path: Path) -> None:
    z = cloud(samples=8).requires_grad_()
    whole = statistic()(z, micro_step=2)
    whole.backward()
    parts = run_ranks(half_of_the_batch, world, tmp_path, world)
    for value, _ in parts:
        assert float(value) == pytest.approx(float(whole.detach()), rel=1e-13)
    # Averaging over ranks, as DDP does to parameter gradients, gives the one-process gradient.
    joined = torch.cat([grad for _, grad in parts], dim=1) / world
    assert float((joined - z.grad).abs().max()) <= 1e-12 * float(z.grad.abs().max())
