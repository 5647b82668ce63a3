"""AdamW, with weight decay kept off what a decay only hurts, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from marey.config.schema import OptimizerConfig


def decay_groups(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[list[str], list[str]]:
    """Names of the parameters that decay and of those that do not, each in the order given.

    No decay: biases, norms, every 1-D tensor, and ``cls_token`` (which has three dimensions, and would decay if
    the shape alone decided).
    """
    decay: list[str] = []
    keep: list[str] = []
    for name, parameter in named_parameters:
        parts = name.split(".")
        is_norm = any(part.rstrip("0123456789") == "norm" for part in parts[:-1])
        exempt = parts[-1] in ("bias", "cls_token") or is_norm or parameter.ndim <= 1
        (keep if exempt else decay).append(name)
    return decay, keep


def build_adamw(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) over the trainable parameters of ``module``.

    Group 0 decays, group 1 does not; with ``exclude_bias_norm`` off, group 0 holds everything. Names travel with
    the optimizer's state, so a resume matches parameters by name.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    decay, keep = decay_groups(parameters.items()) if config.exclude_bias_norm else (list(parameters), [])
    groups: list[dict[str, Any]] = [
        {"params": [(name, parameters[name]) for name in names], "weight_decay": weight_decay}
        for names, weight_decay in ((decay, config.weight_decay), (keep, 0.0))
        if names
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
