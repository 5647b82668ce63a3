"""Learning rate and weight decay as pure functions of the optimizer step."""

from __future__ import annotations

import math
from typing import Literal

from marey.config.runs import RunConfig
from marey.core.errors import UserError


def lr_at(step: int, *, peak_step: int, start_lr: float, lr: float, end_lr: float, total_steps: int | None) -> float:
    """Learning rate of the update that follows ``step`` completed optimizer steps.

    Linear from ``start_lr`` to ``lr`` at ``peak_step``, then a half cosine to ``end_lr`` at ``total_steps`` and
    flat from there. ``end_lr == lr`` is flat after the warmup and needs no ``total_steps``.
    """
    if step < peak_step:
        return start_lr + (lr - start_lr) * step / peak_step
    if end_lr == lr:
        return lr
    assert total_steps is not None, "a decay needs to know where it ends"
    span = max(total_steps - peak_step, 1)
    share = min((step - peak_step) / span, 1.0)
    return end_lr + (lr - end_lr) * 0.5 * (1.0 + math.cos(math.pi * share))


def weight_decay_at(
    step: int,
    *,
    start_value: float,
    end_value: float,
    total_steps: int,
    schedule_type: Literal["cosine", "linear"],
) -> float:
    """Weight decay of the update that follows ``step`` completed optimizer steps.

    From ``start_value`` at step 0 to ``end_value`` at ``total_steps``, flat from there.
    """
    share = min(step / max(total_steps, 1), 1.0)
    if schedule_type == "cosine":
        share = 0.5 * (1.0 - math.cos(math.pi * share))
    return start_value + (end_value - start_value) * share


def check_schedule(config: RunConfig, total_steps: int | None) -> None:
    """Refuse a schedule whose end nobody knows.

    Raises:
        UserError: a decay in a run that has no last step.
    """
    if total_steps is not None:
        return
    if config.scheduler.end_lr != config.optimizer.lr:
        raise UserError(
            f"scheduler.end_lr={config.scheduler.end_lr} differs from optimizer.lr={config.optimizer.lr} and this "
            "run has no last step to reach it at; set trainer.max_steps or trainer.max_epochs"
        )
    if config.weight_decay_scheduler.enabled:
        raise UserError(
            "weight_decay_scheduler.enabled=true needs a last step to end at; "
            "set trainer.max_steps or trainer.max_epochs"
        )
