"""The head in which views are compared: Linear, BatchNorm, GELU, Linear.

Legend: B clips of this rank's micro-step, V+1 views, D encoder width, H hidden width, O output width, G norm
groups.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from marey.config.schema import ProjectorConfig
from marey.core.errors import UserError
from marey.core.ranks import mean_over_ranks
from marey.models.init import make

MOMENTUM = 0.1
EPS = 1e-5


class GroupedBatchNorm(nn.Module):
    """BatchNorm (Ioffe & Szegedy 2015, arXiv 1502.03167) whose statistics come from groups of consecutive
    clips.

    A group is ``norm_group`` consecutive clips with all their views, pooled (null: all clips given). The
    running statistics follow the average over groups, and over ranks, of mean and unbiased variance, with
    momentum .1. With one group on one rank it is ``nn.BatchNorm1d``.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, norm_group: int | None) -> None:
        super().__init__()
        self.norm_group = norm_group
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, V+1, H]`` -> the same shape. In training B must be a multiple of ``norm_group``.

        Raises UserError when a group holds a single value per channel: it has no variance.
        """
        flat = x.flatten(0, 1)
        if not self.training:
            out = batch_norm(flat, self.running_mean, self.running_var, self.weight, self.bias, eps=EPS)
            return out.view_as(x)
        group = self.norm_group or x.shape[0]
        assert x.shape[0] % group == 0, (x.shape, group)
        if group * x.shape[1] == 1:
            raise UserError(
                "BatchNorm of one clip with one view has no variance: raise loader.batch_size "
                "(and projector.norm_group) or augmentation.local_crops_number"
            )
        parts = torch.split(flat, group * x.shape[1])
        # Momentum 1 makes batch_norm write a group's own mean and unbiased variance into these rows.
        means = self.running_mean.new_zeros(len(parts), x.shape[-1])
        variances = torch.ones_like(means)
        normed = [
            batch_norm(part, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=EPS)
            for part, mean, var in zip(parts, means, variances, strict=True)
        ]
        with torch.no_grad():
            mean, var = mean_over_ranks(torch.stack((means.mean(0), variances.mean(0))))
            self.running_mean.lerp_(mean, MOMENTUM)
            self.running_var.lerp_(var, MOMENTUM)
        return (normed[0] if len(normed) == 1 else torch.cat(normed)).view_as(x)


class Projector(nn.Module):
    """``[B, V+1, D]`` -> ``[B, V+1, O]``. Made by ``build_projector``."""

    def __init__(self, *, width: int, hidden_dim: int, output_dim: int, norm_group: int | None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden_dim)
        self.norm = GroupedBatchNorm(hidden_dim, norm_group=norm_group)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, V+1, D]`` -> ``[B, V+1, O]``."""
        out: Tensor = self.fc2(self.act(self.norm(self.fc1(x))))
        return out


def build_projector(config: ProjectorConfig, *, width: int, seed: int) -> Projector:
    """The projector behind an encoder of this width, PyTorch's default initialisation drawn from keys."""
    fan_in = {"fc1": width, "fc2": config.hidden_dim}

    def draw(name: str, values: Tensor, generator: torch.Generator) -> None:
        layer, kind = name.split(".")
        if layer in fan_in:
            # PyTorch's default for Linear: both uniform within 1/sqrt(fan_in).
            bound = 1.0 / math.sqrt(fan_in[layer])
            values.uniform_(-bound, bound, generator=generator)
        else:
            values.fill_(1.0 if kind == "weight" else 0.0)

    projector = make(
        lambda: Projector(
            width=width,
            hidden_dim=config.hidden_dim,
            output_dim=config.output_dim,
            norm_group=config.norm_group,
        ),
        prefix="projector.",
        seed=seed,
        draw=draw,
    )
    if not projector.norm.running_mean.is_meta:
        projector.norm.running_mean.zero_()
        projector.norm.running_var.fill_(1.0)
    return projector
