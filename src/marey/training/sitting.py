"""One sitting of a run: whether there is anything to do, the folders it takes for itself, the lines it begins with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from marey.config.runs import RunConfig
from marey.core.errors import UserError
from marey.training.batchplan import BatchPlan
from marey.training.folders import clean
from marey.training.kinds.base import Kind
from marey.training.loader import ignored_settings
from marey.training.lock import alone_in
from marey.training.record import count_parameters
from marey.training.refusals import clear_refusals
from marey.training.resume import Start
from marey.training.schedule import check_schedule


def saves(config: RunConfig) -> bool:
    """Whether this run writes checkpoints."""
    return config.trainer.enable_checkpointing is not False and not config.trainer.fast_dev_run


def check_length(config: RunConfig, plan: BatchPlan) -> None:
    """Refuse a run without an end, or without a step.

    Raises:
        UserError: naming the keys that end a run.
    """
    trainer = config.trainer
    if trainer.max_epochs is None and trainer.max_steps == -1 and trainer.max_time is None:
        raise UserError(
            "nothing ends this run: set trainer.max_epochs, trainer.max_steps or trainer.max_time "
            "(trainer.max_epochs=-1 trains until it is stopped)"
        )
    if plan.total_steps == 0:
        raise UserError(
            f"trainer.max_steps={trainer.max_steps} and trainer.max_epochs={trainer.max_epochs} "
            "leave no step to train; set them above 0"
        )
    check_schedule(config, plan.total_steps)


def check_something_left(start: Start | None, plan: BatchPlan) -> None:
    """Refuse to resume a run that is over.

    Raises:
        UserError: saying which limit to raise.
    """
    if start is not None and plan.total_steps is not None and start.step >= plan.total_steps:
        raise UserError(
            f"{start.path} has {start.step} optimizer steps and this run ends at {plan.total_steps}; "
            "raise trainer.max_steps (or trainer.max_epochs) to train further"
        )


def take_folders(held: ExitStack, config: RunConfig, *, run_dir: Path, checkpoint_dir: Path) -> list[str]:
    """Lock the run's folders for as long as ``held`` lasts, and remove what a killed run left half written there.

    Returns notes for people.

    Raises:
        UserError: another run is using one of them.
    """
    folders = [("hydra.run.dir", run_dir), *([("checkpoint.dirpath", checkpoint_dir)] if saves(config) else [])]
    notes = list(held.enter_context(alone_in(folders, run_dir=run_dir)))
    clear_refusals(run_dir)
    cleaned = clean([*(folder for _, folder in folders), run_dir / "exposure"])
    return notes + ([] if cleaned is None else [cleaned])


def run_lines(
    kind: Kind,
    module: nn.Module,
    *,
    on_cpu: bool,
    start: Start | None,
    resumed_from: dict[str, Any] | None,
) -> Iterator[str]:
    """Parameters, data and steps, then what is unusual about this run, then where it goes on and what has changed."""
    config = kind.config
    counts = count_parameters(module)
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if name != "total")
    yield f"model         {kind.model_name()}: {counts['total']:,} parameters ({parts})"
    yield from kind.opening_lines()
    ignored = ignored_settings(config.loader)
    if ignored:
        yield f"note          loader.num_workers=0: {', '.join(ignored)} have no effect"
    if on_cpu and str(config.trainer.precision).startswith(("bf16", "16")):
        yield (
            f"note          trainer.precision={config.trainer.precision} is kept and is slow on a CPU; "
            "trainer.precision=32-true is many times faster there"
        )
    if not saves(config):
        yield "note          checkpoints are off for this run"
    if start is not None:
        yield f"resumes       {start.path} at step {start.step}, epoch {start.epoch}"
    if resumed_from is None:
        return
    for note in resumed_from["notes"]:
        yield f"note          {note}"
    for what in ("harmless", "allowed"):
        changes = resumed_from[f"{what}_changes"]
        if changes:
            yield f"note          {what} changes since the checkpoint: {'; '.join(changes)}"
