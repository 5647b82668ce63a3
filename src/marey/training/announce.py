"""What a run says before its first step."""

from __future__ import annotations

from collections.abc import Iterator

from marey.config.schema import EncoderConfig
from marey.training.batchplan import BatchPlan
from marey.training.data import ClipData, validates_on_training_data
from marey.training.ema import describe_rule


def opening_lines(
    config: EncoderConfig,
    plan: BatchPlan,
    data: ClipData,
    *,
    validates: bool,
) -> Iterator[str]:
    """An encoder run's data and steps, then what is unusual about it."""
    for source in data.describe():
        dropped = f", {source['dropped_short']:,} too short and dropped" if source["dropped_short"] else ""
        yield (
            f"data          {source['name']}: {source['usable_episodes']:,} episodes{dropped}, "
            f"{source['clips_per_epoch']:,} clips per epoch ({source['path']})"
        )
        if source["padded_short"]:
            yield f"              {source['padded_short']:,} too short for a clip: their last frame is repeated"
        if source["refused"]:
            yield f"              {len(source['refused'])} files refused, the first: {source['refused'][0]}"
    total = "until it is stopped" if plan.total_steps is None else f"{plan.total_steps:,} in all"
    if plan.epochs is not None:
        total += f", {plan.epochs:.3g} epochs"
    yield (
        f"steps         {plan.steps_per_epoch:,} optimizer steps per epoch, {total}; "
        f"{plan.dropped_clips:,} clips of an epoch fill no step"
    )
    if plan.limited_clips:
        yield f"              trainer limits leave out {plan.limited_clips:,} more clips of each epoch"
    yield f"average       {describe_rule(config.ema)}"
    if validates and validates_on_training_data(config):
        yield (
            "warning       validation looks at the training data: its loss is no measure of generalisation "
            "(set data.val to held-out videos)"
        )
