"""Lightning's Trainer from the configuration, quiet where Lightning only advertises, loud where it refuses."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy

from marey.config.schema import TrainerConfig
from marey.core.errors import UserError
from marey.training.checkpoint import AtomicCheckpointIO

CALLBACK_GROUP = "lightning.pytorch.callbacks_factory"
SHARDED = "fsdp2"
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false", SHARDED)
# Ours to decide: what we compute ourselves, or what this program's promises fix.
OURS = frozenset(
    {
        "accelerator",
        "accumulate_grad_batches",
        "barebones",
        "callbacks",
        "default_root_dir",
        "enable_model_summary",
        "enable_progress_bar",
        "fast_dev_run",
        "limit_train_batches",
        "limit_val_batches",
        "logger",
        "max_epochs",
        "max_steps",
        "max_time",
        "overfit_batches",
        "plugins",
        "strategy",
    }
)


def refuse_foreign_callbacks() -> None:
    """Refuse callbacks that another installed package would put into every Trainer.

    Raises:
        UserError: naming each package and its entry point.
    """
    found = [
        f"{entry.name} ({'unknown package' if entry.dist is None else entry.dist.name})"
        for entry in metadata.entry_points(group=CALLBACK_GROUP)
    ]
    if found:
        raise UserError(
            f"installed packages add their own callbacks to every training run: {', '.join(found)}; "
            "uninstall them or use an environment without them, since they could change what this run computes"
        )


def build_trainer(
    config: TrainerConfig,
    *,
    world_size: int,
    accumulate: int,
    total_steps: int | None,
    validates: bool,
    run_dir: Path,
    callbacks: Sequence[pl.Callback],
    loggers: Sequence[Logger],
) -> pl.Trainer:
    """The Trainer that ``trainer.*`` describes.

    Steps, epochs and limits reach it as one number of optimizer steps (``total_steps``; None runs until it is
    stopped): the loaders' lengths have the limits in them already, and time is kept by the run itself.

    Raises:
        UserError: what Lightning refuses, and strategies that shard the model or start ranks otherwise.
    """
    arguments: dict[str, Any] = {name: value for name, value in config.model_dump().items() if name not in OURS}
    if not callbacks_save(callbacks):
        arguments["enable_checkpointing"] = False
    plugins = _plugins()
    if config.strategy == SHARDED and str(config.precision) in ("64", "64-true"):
        # Lightning's list of precisions for this strategy lacks it; as a plugin it is taken.
        arguments["precision"] = None
        plugins.append(DoublePrecision())
    with refusals_in_words(ValueError, TypeError, ImportError):
        return pl.Trainer(
            **arguments,
            accelerator=config.accelerator,
            strategy=_strategy(config, world_size),
            accumulate_grad_batches=accumulate,
            limit_train_batches=1.0,
            limit_val_batches=1.0 if validates else 0,
            max_epochs=-1,
            max_steps=-1 if total_steps is None else total_steps,
            max_time=None,
            fast_dev_run=False,
            overfit_batches=0.0,
            callbacks=list(callbacks),
            logger=list(loggers) or False,
            plugins=plugins,
            enable_progress_bar=False,
            enable_model_summary=bool(config.enable_model_summary),
            default_root_dir=config.default_root_dir or run_dir,
            barebones=False,
        )


def callbacks_save(callbacks: Sequence[pl.Callback]) -> bool:
    """Whether one of the callbacks writes checkpoints."""
    return any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks)


def _plugins() -> list[Any]:
    plugins: list[Any] = [AtomicCheckpointIO()]
    if SLURMEnvironment.detect():
        # Requeueing would start the command again without resume.*, as another run in the same folder.
        plugins.append(SLURMEnvironment(auto_requeue=False))
    return plugins


def _strategy(config: TrainerConfig, world_size: int) -> str | Strategy:
    if config.strategy not in STRATEGIES:
        raise UserError(
            f"trainer.strategy={config.strategy} is not supported; "
            + (
                f"sharding is trainer.strategy={SHARDED} here"
                if config.strategy.startswith("fsdp")
                else f"choose one of {', '.join(STRATEGIES)}"
            )
        )
    if config.strategy == SHARDED:
        if world_size == 1:
            raise UserError(
                f"trainer.strategy={SHARDED} shards a model over ranks and this run has one; set trainer.strategy=auto"
            )
        from marey.training.sharded import ShardedStrategy  # deferred: other runs need none of what it imports

        return ShardedStrategy(world_size=world_size)
    if config.strategy == "auto" and world_size == 1:
        return "auto"
    # Running statistics are averaged over ranks by the projector itself: broadcasting rank 0's would undo that.
    return DDPStrategy(
        broadcast_buffers=False,
        find_unused_parameters=config.strategy.endswith("_true"),
        gradient_as_bucket_view=True,
    )


@contextlib.contextmanager
def refusals_in_words(*also: type[Exception]) -> Iterator[None]:
    """Lightning's own refusals as one sentence, and the errors ``also`` where they can mean nothing else."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (MisconfigurationException, *also)):
            raise
        raise UserError(f"Lightning refuses this run: {_first_sentence(str(error))}") from error


def _first_sentence(text: str) -> str:
    flat = " ".join(text.split())
    head, stop, _ = flat.partition(". ")
    return head + ("." if stop else "")


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's tips and remarks; warnings about the run and all errors still show."""
    names = ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Advice on things this program decides: workers, logging intervals, a folder that is not empty.
        warnings.filterwarnings("ignore", category=PossibleUserWarning)
        warnings.filterwarnings("ignore", message=r".*Checkpoint directory .* exists and is not empty.*")
        warnings.filterwarnings("ignore", message=r".*does not have many workers.*")
        # What these libraries' own code does with others is theirs to change.
        for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=r"(lightning|tensorboard|torch)\..*")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
