from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from marey.config.schema import ProjectorConfig
from marey.core.errors import UserError
from marey.models.projector import GroupedBatchNorm, Projector, build_projector
from tests.distributed import run_ranks


def projector(norm_group: int | None = None, seed: int = 0) -> Projector:
    config = ProjectorConfig(hidden_dim=24, output_dim=6, norm_group=norm_group)
    return build_projector(config, width=10, seed=seed)


def embeddings(clips: int, views: int = 3, width: int = 10, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1 + 3 * torch.randn(clips, views, width, generator=generator, dtype=torch.float64)


def norms(channels: int) -> tuple[GroupedBatchNorm, nn.BatchNorm1d]:
    ours, theirs = GroupedBatchNorm(channels, norm_group=None).double(), nn.BatchNorm1d(channels).double()
    with torch.no_grad():
        for module in (ours, theirs):
            module.weight.copy_(torch.linspace(0.5, 2, channels))
            module.bias.copy_(torch.linspace(-1, 1, channels))
    return ours, theirs


def test_one_group_is_batchnorm_in_value_gradient_and_running_statistics() -> None:
    ours, theirs = norms(10)
    for step in range(3):
        x = embeddings(4, seed=step)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        out_a, out_b = ours(a), theirs(b.flatten(0, 1)).view_as(b)
        torch.testing.assert_close(out_a, out_b, rtol=0, atol=1e-12)
        for out in (out_a, out_b):
            (out**3).sum().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=0, atol=1e-12)
    x = embeddings(4, seed=9)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x.flatten(0, 1)).view_as(x), rtol=0, atol=1e-12)


def test_a_group_is_consecutive_clips_with_all_their_views() -> None:
    model = projector(norm_group=2).double()
    x = embeddings(6)
    whole = model(x)
    for start in (0, 2, 4):
        alone = projector(norm_group=None).double()
        torch.testing.assert_close(alone(x[start : start + 2]), whole[start : start + 2], rtol=0, atol=1e-12)
    # Two clips in one group do see each other.
    changed = x.clone()
    changed[1] += 1
    moved = (model(changed) - whole).abs().amax(dim=(1, 2)) > 1e-6
    assert moved.tolist() == [True, True, False, False, False, False]


def test_running_statistics_average_over_groups() -> None:
    norm = GroupedBatchNorm(10, norm_group=2).double()
    x = embeddings(6)
    norm(x)
    groups = x.view(3, 6, 10)
    torch.testing.assert_close(norm.running_mean, 0.1 * groups.mean(1).mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * groups.var(1).mean(0), rtol=0, atol=1e-12)


def running_statistics(rank: int) -> list[torch.Tensor]:
    norm = GroupedBatchNorm(10, norm_group=2).double()
    norm(embeddings(8)[4 * rank : 4 * rank + 4])
    return [norm.running_mean, norm.running_var]


def test_running_statistics_average_over_ranks(tmp_path: Path) -> None:
    norm = GroupedBatchNorm(10, norm_group=2).double()
    norm(embeddings(8))
    for mean, var in run_ranks(running_statistics, 2, tmp_path):
        torch.testing.assert_close(mean, norm.running_mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(var, norm.running_var, rtol=0, atol=1e-12)


def test_evaluation_needs_no_group() -> None:
    model = projector(norm_group=4).double().eval()
    x = embeddings(3)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=0, atol=1e-12)


def test_a_group_of_one_value_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"raise loader\.batch_size"):
        projector().double()(embeddings(1, views=1))


def test_initial_weights_are_pytorchs_default_drawn_from_the_seed() -> None:
    config = ProjectorConfig(hidden_dim=512, output_dim=64, norm_group=None)
    model = build_projector(config, width=192, seed=0)
    model.requires_grad_(False)
    for layer, fan_in in ((model.fc1, 192), (model.fc2, 512)):
        bound = 1 / math.sqrt(fan_in)
        for value in (layer.weight, layer.bias):
            assert bound * 0.9 < float(value.abs().max()) <= bound
        assert float(layer.weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert list(model.state_dict()) == [
        "fc1.weight",
        "fc1.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "fc2.weight",
        "fc2.bias",
    ]
    again, other = (build_projector(config, width=192, seed=s).state_dict() for s in (0, 1))
    state = model.state_dict()
    assert all(torch.equal(state[k], again[k]) for k in state)
    assert not torch.equal(state["fc1.weight"], other["fc1.weight"])
    assert bool((model.norm.running_mean == 0).all())
    assert bool((model.norm.running_var == 1).all())
