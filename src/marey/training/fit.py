"""One training run, from a checked configuration to its last checkpoint. The only way into Lightning."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from marey.config.runs import RunConfig
from marey.core.errors import UserError
from marey.core.keys import derive
from marey.training.averaging import Averaging
from marey.training.batchplan import BatchPlan, max_seconds
from marey.training.checkpoint import CheckpointWriter, check_retention
from marey.training.console import Console, Validation
from marey.training.kinds.base import open_kind
from marey.training.launched import launched_rank
from marey.training.lightning_setup import (
    build_trainer,
    quiet_lightning,
    refusals_in_words,
    refuse_foreign_callbacks,
)
from marey.training.loader import MicroStepLoader, ignored_settings
from marey.training.loggers import build_loggers
from marey.training.metrics import MetricsCallback, MetricsFile
from marey.training.module import TrainingModule
from marey.training.receipt import Ending
from marey.training.record import Record, count_parameters
from marey.training.refusals import clear_refusals, leave_refusal, refusal_elsewhere
from marey.training.resume import Start, begin
from marey.training.schedule import check_schedule
from marey.training.signals import ABORTED, StopRequest
from marey.training.watch import AgreedRefusalError, Watch

Say = Callable[[str], None]


def fit(
    config: RunConfig,
    *,
    run_dir: Path,
    checkpoint_dir: Path,
    differences: list[str],
    command: list[str],
    say: Say,
) -> Path | None:
    """Train, and return the newest checkpoint (None where checkpoints are off, and on ranks other than 0).

    ``say`` takes one plain line for people. A stop on request returns like a finished run.

    Raises:
        UserError: what cannot be run as asked, before or during training; files already complete are kept.
        KeyboardInterrupt: a second Ctrl-C.
    """
    if _rank() != 0:
        say = _silent
    else:
        clear_refusals(run_dir)
    refuse_foreign_callbacks()
    check_retention(config.checkpoint)
    loaders: list[MicroStepLoader] = []
    with quiet_lightning(), StopRequest(say) as stop:
        try:
            run = _Run(config, run_dir=run_dir, checkpoint_dir=checkpoint_dir, say=say, stop=stop, loaders=loaders)
            return run.train(differences=differences, command=command)
        except AgreedRefusalError:
            if _rank() != 0:
                sys.exit(0)  # rank 0 says it, once, and ends by itself
            raise
        except UserError as error:
            if _rank() != 0:
                # Lightning notices this exit code and ends the other ranks, which wait for this one in vain.
                leave_refusal(run_dir, rank=_rank(), error=error)
                print(f"marey: rank {_rank()}: {error}", file=sys.stderr, flush=True)
                sys.exit(2)
            raise
        finally:
            for loader in loaders:
                loader.close()


class _Run:
    """The parts of one run, and how they meet."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: Path,
        checkpoint_dir: Path,
        say: Say,
        stop: StopRequest,
        loaders: list[MicroStepLoader],
    ) -> None:
        self.run_dir, self.checkpoint_dir = run_dir, checkpoint_dir
        self.say, self.stop, self.loaders = say, stop, loaders
        self.saves = config.trainer.enable_checkpointing is not False and not config.trainer.fast_dev_run
        self.validates = config.trainer.limit_val_batches != 0 and not config.trainer.fast_dev_run
        _seed_libraries(config.seed)
        self.kind = open_kind(config, validates=self.validates)
        self.config = config = self.kind.config
        self.plan = self.kind.plan
        _check_length(config, self.plan)
        self.module = self._module()
        self.start, self.resumed_from = begin(self.kind, self.module)
        self._check_something_left()
        self.ledger = self.kind.ledger()
        self.watch = Watch(
            self.kind,
            ledger=self.ledger,
            loader=self.loaders[0],
            stop=stop,
            max_seconds=max_seconds(config.trainer),
            run_dir=run_dir,
            say=say,
        )
        self.metrics = MetricsCallback(
            self.kind,
            MetricsFile(run_dir / "metrics.csv", self.kind.columns),
            watch=self.watch,
            ledger=self.ledger,
            every=config.trainer.log_every_n_steps,
            after_step=self.done_steps,
        )
        averaging = Averaging(config.ema, watch=self.watch) if config.ema.enabled else None
        self.record = Record(
            self.kind,
            run_dir=run_dir,
            checkpoint_dir=checkpoint_dir,
            ledger=self.ledger,
            watch=self.watch,
            metrics=self.metrics,
            averaging=averaging,
        )
        self.writer = CheckpointWriter(checkpoint_dir, config.checkpoint, watch=self.watch, record=self.record)
        if self.start is not None:
            self._restore(self.start)
        self.trainer = self._trainer(averaging)

    @property
    def done_steps(self) -> int:
        """Optimizer steps made before this sitting."""
        return 0 if self.start is None else self.start.step

    def train(self, *, differences: list[str], command: list[str]) -> Path | None:
        """See ``fit``."""
        trainer, start = self.trainer, self.start
        if trainer.is_global_zero:
            self.record.open(self.module, differences=differences, command=command, resumed_from=self.resumed_from)
        self.kind.start_exposure(self.run_dir, rank=trainer.global_rank, ledger=self.ledger)
        for line in self._opening_lines():
            self.say(line)
        if start is not None:
            self.say(f"resumes       {start.path} at step {start.step}, epoch {start.epoch}")
        self.stop.forward = getattr(trainer.strategy.launcher, "kill", None)
        with self.record.closing(), refusals_in_words():
            self._fit()
            self.kind.before_checkpoint(self.ledger)
        ending: Ending = self.watch.ending or "finished"
        newest = self.record.newest
        where = "" if newest is None else f"; newest checkpoint {newest}"
        sentence = f"{ending} after {self.ledger.optimizer_steps} optimizer steps{where}"
        self.record.close(ending, sentence)
        self.say(sentence)
        return newest

    def _fit(self) -> None:
        trainer, module, start = self.trainer, self.module, self.start
        # Lightning restores weights before it converts precision: float64 weights would pass through float32.
        trainer.precision_plugin.convert_module(module)
        try:
            trainer.fit(
                module,
                ckpt_path=None if start is None else str(start.path),
                weights_only=None if start is None else True,
            )
        except SystemExit as error:
            # How Lightning leaves on a KeyboardInterrupt.
            raise KeyboardInterrupt(ABORTED) from error
        except torch.OutOfMemoryError as error:
            raise UserError(self.kind.out_of_memory()) from error
        except RuntimeError as error:
            # What a rank sees when another one has left.
            said = None if self.plan.world_size == 1 else refusal_elsewhere(self.run_dir)
            if said is None:
                raise
            raise AgreedRefusalError(said) from error

    def _opening_lines(self) -> Iterator[str]:
        """Parameters, data and steps, then what is unusual about this run."""
        config = self.config
        counts = count_parameters(self.module)
        parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if name != "total")
        yield f"model         {self.kind.model_name()}: {counts['total']:,} parameters ({parts})"
        yield from self.kind.opening_lines()
        ignored = ignored_settings(config.loader)
        if ignored:
            yield f"note          loader.num_workers=0: {', '.join(ignored)} have no effect"
        on_cpu = self.trainer.strategy.root_device.type == "cpu"
        if on_cpu and str(config.trainer.precision).startswith(("bf16", "16")):
            yield (
                f"note          trainer.precision={config.trainer.precision} is kept and is slow on a CPU; "
                "trainer.precision=32-true is many times faster there"
            )
        if not self.saves:
            yield "note          checkpoints are off for this run"

    def _module(self) -> TrainingModule:
        on_cuda = self.config.trainer.accelerator != "cpu" and torch.cuda.is_available()
        pin_memory = self.config.loader.pin_memory and on_cuda
        self.loaders.append(self.kind.train_loader(pin_memory=pin_memory))
        if self.validates:
            self.loaders.append(self.kind.val_loader(pin_memory=pin_memory))
        train_loader, val_loader = (*self.loaders, None)[:2]
        assert train_loader is not None
        return TrainingModule(self.kind.objective(), kind=self.kind, train_loader=train_loader, val_loader=val_loader)

    def _trainer(self, averaging: Averaging | None) -> pl.Trainer:
        config = self.config
        callbacks: list[pl.Callback] = [self.watch]
        if averaging is not None:
            callbacks.append(averaging)
        callbacks.append(self.metrics)
        if config.trainer.enable_progress_bar is not False:
            callbacks.append(self._console())
        if self.validates:
            columns = self.kind.validation_columns
            path = self.run_dir / "validation.csv"
            callbacks.append(Validation(path, columns, say=self.say, after_step=self.done_steps))
        if self.saves:
            callbacks.append(self.writer)
        trainer = build_trainer(
            config.trainer,
            world_size=self.plan.world_size,
            accumulate=self.plan.accumulate,
            total_steps=self.plan.total_steps,
            validates=self.validates,
            run_dir=self.run_dir,
            callbacks=callbacks,
            loggers=[] if config.trainer.fast_dev_run else build_loggers(config, self.run_dir),
        )
        if trainer.world_size != self.plan.world_size:
            raise UserError(
                f"trainer.devices={config.trainer.devices} on {config.trainer.num_nodes} nodes are "
                f"{self.plan.world_size} ranks and the launcher started {trainer.world_size}; make them agree"
            )
        return trainer

    def _console(self) -> Console:
        return Console(
            watch=self.watch, total_steps=self.plan.total_steps, done_steps=self.done_steps, unit=self.kind.unit
        )

    def _restore(self, start: Start) -> None:
        """What is neither weights, optimizer nor Lightning's counts; those, Lightning restores."""
        self.ledger.load_state_dict(start.state["consumed"])
        self.metrics.go_on(start.state["interval"])
        self.watch.trained_seconds = float(start.state["trained_seconds"])
        if start.path.resolve().parent == self.checkpoint_dir.resolve():
            names = start.state["saved"]
            self.writer.saved = [path for name in names if (path := self.checkpoint_dir / name).exists()]

    def _check_something_left(self) -> None:
        total = self.plan.total_steps
        if self.start is not None and total is not None and self.start.step >= total:
            raise UserError(
                f"{self.start.path} has {self.start.step} optimizer steps and this run ends at {total}; "
                "raise trainer.max_steps (or trainer.max_epochs) to train further"
            )


def _check_length(config: RunConfig, plan: BatchPlan) -> None:
    """Refuse a run without an end, or without a step."""
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


def _rank() -> int:
    """This process's rank as far as the environment tells, before there is a Trainer to ask."""
    return int(getattr(rank_zero_only, "rank", 0) or 0) or launched_rank()


def _seed_libraries(seed: int) -> None:
    """Nothing of ours draws from these; a library that does shall at least do it the same way each time."""
    value = derive(seed, "library")
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def _silent(_line: str, *_: Any) -> None:
    """What ranks other than 0 say."""
