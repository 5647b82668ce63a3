"""Sums and means over the ranks of a run; with no process group, or a group of one, the value itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Processes that take part in the run (1 when torch.distributed is not in use)."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is an all-reduce.

    With L_r the loss of rank r and s the sum, rank r's own gradient is ``d(L_1 + .. + L_W)/ds``, the sum over
    ranks of dL_r/ds, because its summand enters every rank's s. DDP and FSDP then average parameter gradients
    over ranks, which turns the gradient of the sum of losses into the gradient of their mean: the one-process
    gradient, exactly. (A reduction that autograd does not see, or whose backward keeps the local gradient,
    loses the factor W.)
    """

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def sum_over_ranks(x: Tensor) -> Tensor:
    """Differentiable sum of ``x`` (same shape and dtype on every rank), the same on every rank.

    Every rank must call it, and must run the backward pass of the result if any rank does.
    """
    if world_size() == 1:
        return x
    total: Tensor = _SumOverRanks.apply(x)
    return total


def mean_over_ranks(x: Tensor) -> Tensor:
    """Mean of ``x`` over ranks, without gradient, the same on every rank."""
    if world_size() == 1:
        return x.detach()
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total.div_(world_size())
