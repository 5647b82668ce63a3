"""SIGReg: how far a batch of embeddings is from an isotropic Gaussian (Balestriero & LeCun 2025, arXiv
2511.08544).

Legend: V views, B samples of this rank, N samples over all ranks, O embedding width, M random directions, K
knots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from marey.config.schema import SigregKwargs
from marey.core.keys import torch_generator
from marey.core.ranks import sum_over_ranks, world_size

T_MAX = 3.0
# Elements of the [views, B, M] slab that is held at a time: the memory of the statistic, whatever B is.
SLAB_ELEMENTS = 2**22


def directions(count: int, width: int, *, seed: int, micro_step: int) -> Tensor:
    """float64 ``[M, O]`` on the CPU: random unit vectors, uniform on the sphere.

    Keyed (seed, "sigreg", micro_step): the same tensor on every rank. Directions drawn per rank would average
    statistics of different projections, and a collapse would hide in the average.
    """
    generator = torch_generator(seed, "sigreg", micro_step)
    drawn = torch.randn(count, width, generator=generator, dtype=torch.float64)
    lengths: Tensor = torch.linalg.vector_norm(drawn, dim=1, keepdim=True)
    return drawn / lengths


def _slabs(z: Tensor, count: int) -> list[tuple[int, int]]:
    """Runs of views whose projections fit a slab (one view at least)."""
    step = max(1, SLAB_ELEMENTS // max(1, z.shape[1] * count))
    return [(start, min(start + step, z.shape[0])) for start in range(0, z.shape[0], step)]


class _WaveSums(torch.autograd.Function):
    """Sums over samples of cos(t*p) and sin(t*p), p the projections, t the knots: ``[2, K, V, M]``.

    The angles are made again in the backward pass: kept, they would be V*B*M*K numbers, a gigabyte for a
    statistic of 1,536 clips and 11 views.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, axes: Tensor, knots: tuple[float, ...]) -> Tensor:
        ctx.save_for_backward(z, axes)
        ctx.knots = knots
        sums = z.new_empty(2, len(knots), z.shape[0], axes.shape[0])
        with torch.autocast(z.device.type, enabled=False):
            for start, stop in _slabs(z, axes.shape[0]):
                p = z[start:stop] @ axes.T
                angle, wave = torch.empty_like(p), torch.empty_like(p)
                for k, t in enumerate(knots):
                    torch.mul(p, t, out=angle)
                    torch.sum(torch.cos(angle, out=wave), dim=1, out=sums[0, k, start:stop])
                    torch.sum(torch.sin(angle, out=wave), dim=1, out=sums[1, k, start:stop])
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        z, axes = ctx.saved_tensors
        (grad,) = grads
        out = torch.empty_like(z)
        with torch.autocast(z.device.type, enabled=False):
            for start, stop in _slabs(z, axes.shape[0]):
                p = z[start:stop] @ axes.T
                angle, wave, slope = torch.empty_like(p), torch.empty_like(p), torch.zeros_like(p)
                for k, t in enumerate(ctx.knots):
                    torch.mul(p, t, out=angle)
                    of_cos, of_sin = (grad[i, k, start:stop].unsqueeze(1) for i in (0, 1))
                    slope.addcmul_(torch.sin(angle, out=wave), of_cos, value=-t)
                    slope.addcmul_(torch.cos(angle, out=wave), of_sin, value=t)
                out[start:stop] = slope @ axes
        return out, None, None


class SigReg(nn.Module):
    """The statistic of every view over the batch of all ranks, averaged over directions and views.

    For unit directions a and knots t on [0, 3], the empirical characteristic function of the projections p is
    compared with the standard Gaussian's: ``(mean cos(t*p) - exp(-t^2/2))^2 + (mean sin(t*p))^2``, integrated
    by the trapezoid rule with the window ``exp(-t^2/2)``, doubled for the symmetric half, and multiplied by N
    (not with ``normalize_by_n``). Computed in float32 whatever the precision of the run, in float64 for
    float64 embeddings. (float32 products follow torch's own switch; with TF32 turned on, the projections are
    rounded to it.)
    """

    def __init__(self, config: SigregKwargs, *, seed: int) -> None:
        super().__init__()
        self.num_proj, self.normalize_by_n, self.seed = config.num_proj, config.normalize_by_n, seed
        step = T_MAX / (config.knots - 1)
        self.knots = tuple(step * k for k in range(config.knots))
        self.step = step

    def forward(self, z: Tensor, *, micro_step: int) -> Tensor:
        """``[V, B, O]`` -> scalar. Every rank calls it with the same shape; the value is the same on every
        rank.
        """
        with torch.autocast(z.device.type, enabled=False):
            z = z if z.dtype == torch.float64 else z.float()
            axes = directions(self.num_proj, z.shape[2], seed=self.seed, micro_step=micro_step)
            sums: Tensor = _WaveSums.apply(z, axes.to(device=z.device, dtype=z.dtype), self.knots)
            n = z.shape[1] * world_size()
            mean_cos, mean_sin = (sum_over_ranks(sums) / n).unbind(0)
            t = torch.tensor(self.knots, dtype=z.dtype, device=z.device)
            gauss = torch.exp(-t.square() / 2)
            weights = 2 * self.step * gauss
            weights[0] /= 2
            weights[-1] /= 2
            errors = (mean_cos - gauss.view(-1, 1, 1)).square() + mean_sin.square()
            # Elementwise, not a product of matrices: a backward pass run under autocast would round that.
            statistic = (weights.view(-1, 1, 1) * errors).sum(dim=0)
            return statistic.mean() * (1 if self.normalize_by_n else n)
