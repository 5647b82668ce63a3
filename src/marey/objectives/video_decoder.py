"""The video decoder: targets, weights and the one reduction of the video loss. Nobody else divides.

Legend: B samples, C channels, T latent frames, H and W the latent canvas.

The loss is ``sum of w(time) * (prediction - target)^2 over valid supervised elements / their count``, over the whole
microbatch: not a mean of per-video means, which would weigh the elements of short videos more.

``normalize_over`` says which count divides. ``microbatch``: that of the microbatch, here, at once; then the gradient
depends on how samples were partitioned, since every microbatch is divided by its own count. ``step``: the loss is the
sum, and gradients are divided once, before clipping, by the count of all ranks and accumulated microbatches
(``step_gradient_scale``); then it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from marey.objectives.flow import TIME_SCALE, FlowSchedule

NormalizeOver = Literal["microbatch", "step"]
Weighting = Literal["uniform", "logit_bell"]


class VideoStepOutput(NamedTuple):
    """One micro-step of one rank; everything but ``loss`` is detached. The first six are every objective's.

    loss: scalar, to be differentiated. parts: ``flow``, the loss averaged over this microbatch's elements.
    embeddings, features: None, there are none. clips: samples. tokens: valid video tokens.
    total, elements: float scalar sum of weighted squared errors and how many elements it has; averages over
    microbatches divide the sum of one by the sum of the other. divided: whether ``loss`` is ``total / elements``; where
    false, gradients are still to be multiplied by ``step_gradient_scale``.
    tokens_seen: video tokens that the heavy layers saw, padding included. pairs, pairs_seen: query-key pairs of
    self-attention that are visible, and that were computed.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    embeddings: None
    features: None
    clips: int
    tokens: int
    total: Tensor
    elements: int
    divided: bool
    tokens_seen: int
    pairs: int
    pairs_seen: int

    @property
    def padding_share(self) -> float:
        """Share of what the heavy layers saw that is padding."""
        return 1 - self.tokens / self.tokens_seen

    @property
    def attention_utilisation(self) -> float:
        """Visible pairs among the computed ones."""
        return self.pairs / self.pairs_seen


def step_gradient_scale(*, elements: int, world: int, accumulate: int) -> float:
    """What the gradients of an optimizer step are multiplied by under ``normalize_over: step``, before clipping.

    ``elements`` is the sum over all ranks and accumulated microbatches. Data parallelism has averaged over ``world``
    ranks and accumulation over ``accumulate`` microbatches; both are undone.
    """
    assert elements > 0
    return world * accumulate / elements


def _bell(times: Tensor) -> Tensor:
    return torch.exp(-2 * ((times - TIME_SCALE / 2) / TIME_SCALE) ** 2)


@dataclass(frozen=True)
class VideoDecoder:
    """Weights and the reduction. No parameters."""

    schedule: FlowSchedule = field(default_factory=FlowSchedule)
    weighting: Weighting = "uniform"
    normalize_over: NormalizeOver = "microbatch"

    @cached_property
    def _bell_range(self) -> tuple[float, float]:
        """Minimum of the bell over the grid, and mean of what is left above it."""
        bell = _bell(TIME_SCALE * self.schedule.grid())
        return float(bell.min()), float((bell - bell.min()).mean())

    def weights(self, times: Tensor) -> Tensor:
        """w of model times, any shape; its mean over the grid of levels is 1."""
        if self.weighting == "uniform":
            return torch.ones_like(times)
        low, mean = self._bell_range
        return (_bell(times) - low) / mean

    def total(self, prediction: Tensor, target: Tensor, *, supervised: Tensor, times: Tensor) -> Tensor:
        """Scalar: weighted squared errors, summed over supervised frames, in float32 (float64 of float64).

        ``prediction`` and ``target`` are ``[B, C, T, H, W]``, ``supervised`` bool and ``times`` model times ``[B, T]``.
        """
        real = torch.float64 if prediction.dtype == torch.float64 else torch.float32
        per_frame = (prediction.to(real) - target.to(real)).square().sum(dim=(1, 3, 4))
        weighted = per_frame * self.weights(times.to(real))
        return torch.where(supervised, weighted, 0.0).sum()

    def loss(self, total: Tensor, elements: int) -> Tensor:
        """What the backward pass starts from."""
        return total / elements if self.normalize_over == "microbatch" else total
