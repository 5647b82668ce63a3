"""One training run, from a checked configuration to its last checkpoint. The only way into Lightning."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import yaml
from lightning.fabric.utilities.rank_zero import rank_zero_only

from marey.config.runs import RunConfig
from marey.config.schema import describe
from marey.core.errors import UserError
from marey.core.files import write_text
from marey.core.keys import derive
from marey.training.again import Again
from marey.training.averaging import Averaging
from marey.training.batchplan import max_seconds
from marey.training.checkpoint import CheckpointWriter, check_retention
from marey.training.console import Console, Validation
from marey.training.kinds.base import open_kind
from marey.training.launched import launched_rank, started_by_launcher
from marey.training.lightning_setup import (
    SHARDED,
    build_trainer,
    quiet_lightning,
    refusals_in_words,
    refuse_foreign_callbacks,
)
from marey.training.loader import MicroStepLoader
from marey.training.loggers import build_loggers
from marey.training.metrics import MetricsCallback, MetricsFile
from marey.training.module import TrainingModule
from marey.training.receipt import Ending
from marey.training.record import Record
from marey.training.refusals import disk_in_words, leave_refusal, refusal_elsewhere
from marey.training.resume import Start, begin
from marey.training.signals import ABORTED, StopRequest
from marey.training.sitting import check_length, check_something_left, run_lines, saves, take_folders
from marey.training.watch import AgreedRefusalError, Watch

Say = Callable[[str], None]


def fit(
    config: RunConfig,
    *,
    run_dir: Path,
    checkpoint_dir: Path,
    differences: list[str],
    command: list[str],
    again: Again,
    say: Say,
) -> Path | None:
    """Train, and return the newest checkpoint (None where checkpoints are off, and on ranks other than 0).

    ``say`` takes one plain line for people; ``again`` knows the command that goes on with the run. A stop on request
    returns like a finished run. While it lasts, nobody else trains into ``run_dir`` or ``checkpoint_dir``.

    Raises:
        UserError: what cannot be run as asked, before or during training; files already complete are kept.
        KeyboardInterrupt: a second Ctrl-C.
    """
    if _rank() != 0:
        say = _silent
    refuse_foreign_callbacks()
    check_retention(config.checkpoint)
    loaders: list[MicroStepLoader] = []
    with quiet_lightning(), StopRequest(say) as stop, ExitStack() as held:
        if stop.before_training and not started_by_launcher():
            say("stopped on request before the first step; there is nothing to save")
            return None
        if _rank() == 0:
            for line in take_folders(held, config, run_dir=run_dir, checkpoint_dir=checkpoint_dir):
                say(f"note          {line}")
        try:
            run = _Run(
                config,
                run_dir=run_dir,
                checkpoint_dir=checkpoint_dir,
                again=again,
                say=say,
                stop=stop,
                loaders=loaders,
            )
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
        again: Again,
        say: Say,
        stop: StopRequest,
        loaders: list[MicroStepLoader],
    ) -> None:
        self.run_dir, self.checkpoint_dir = run_dir, checkpoint_dir
        self.say, self.stop, self.loaders = say, stop, loaders
        self.saves, self.sharded = saves(config), config.trainer.strategy == SHARDED
        self.validates = config.trainer.limit_val_batches != 0 and not config.trainer.fast_dev_run
        _seed_libraries(config.seed)
        self.given = config
        self.kind = open_kind(config, validates=self.validates)
        self.config = config = self.kind.config
        self.plan = self.kind.plan
        check_length(config, self.plan)
        self.module = self._module()
        self.start, self.resumed_from = begin(self.kind, self.module)
        check_something_left(self.start, self.plan)
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
        averaging = Averaging(config.ema, watch=self.watch, sharded=self.sharded) if config.ema.enabled else None
        self.record = Record(
            self.kind,
            run_dir=run_dir,
            checkpoint_dir=checkpoint_dir,
            ledger=self.ledger,
            watch=self.watch,
            metrics=self.metrics,
            averaging=averaging,
            again=again,
            say=say,
        )
        self.writer = CheckpointWriter(
            checkpoint_dir, config.checkpoint, watch=self.watch, record=self.record, sharded=self.sharded
        )
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
            with self._disk():
                self._open_record(differences=differences, command=command)
        self.kind.start_exposure(self.run_dir, rank=trainer.global_rank, ledger=self.ledger)
        on_cpu = trainer.strategy.root_device.type == "cpu"
        for line in run_lines(self.kind, self.module, on_cpu=on_cpu, start=start, resumed_from=self.resumed_from):
            self.say(line)
        self.stop.forward = getattr(trainer.strategy.launcher, "kill", None)
        try:
            with self.record.closing(), refusals_in_words(), self._disk():
                self._fit()
                self.kind.before_checkpoint(self.ledger)
        except BaseException:
            if start is not None or self.record.newest is not None:
                self.record.say_again()
            raise
        ending: Ending = self.watch.ending or "finished"
        newest = self.record.newest
        where = "" if newest is None else f"; newest checkpoint {newest}"
        sentence = f"{ending} after {self.ledger.optimizer_steps} optimizer steps{where}"
        self.record.close(ending, sentence)
        self.say(sentence)
        if ending == "stopped on request":
            self.record.say_again()
        return newest

    def _disk(self) -> AbstractContextManager[None]:
        return disk_in_words(run_dir=self.run_dir, checkpoint_dir=self.checkpoint_dir)

    def _open_record(self, *, differences: list[str], command: list[str]) -> None:
        self.record.open(
            self.module,
            differences=differences,
            command=command,
            start=self.start,
            resumed_from=self.resumed_from,
        )
        write_text(self.run_dir / "config.yaml", yaml.safe_dump(describe(self.given), sort_keys=False))

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

    def _module(self) -> TrainingModule:
        on_cuda = self.config.trainer.accelerator != "cpu" and torch.cuda.is_available()
        pin_memory = self.config.loader.pin_memory and on_cuda
        self.loaders.append(self.kind.train_loader(pin_memory=pin_memory))
        if self.validates:
            self.loaders.append(self.kind.val_loader(pin_memory=pin_memory))
        for loader in self.loaders:
            loader.say = self.say
        train_loader, val_loader = (*self.loaders, None)[:2]
        assert train_loader is not None
        return self._module_class()(
            self.kind.objective(), kind=self.kind, train_loader=train_loader, val_loader=val_loader
        )

    def _module_class(self) -> type[TrainingModule]:
        if not self.sharded:
            return TrainingModule
        from marey.training.sharded import ShardedModule  # deferred: other runs need none of what it imports

        return ShardedModule

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
            start = self.start
            due = start.epoch if start is not None and start.state.get("validation_due") else None
            callbacks.append(
                Validation(
                    path,
                    columns,
                    watch=self.watch,
                    say=self.say,
                    done_steps=self.done_steps,
                    due_in_epoch=due,
                )
            )
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
            loggers=[]
            if config.trainer.fast_dev_run
            else build_loggers(config, self.run_dir, after_step=self.done_steps),
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
        self.watch.skipped_in_a_row = int(start.state.get("skipped_in_a_row", 0))
        if start.path.resolve().parent == self.checkpoint_dir.resolve():
            names = start.state["saved"]
            self.writer.saved = [path for name in names if (path := self.checkpoint_dir / name).exists()]


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
