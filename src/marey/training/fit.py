"""One training run, from a checked configuration to its last checkpoint. The only way into Lightning."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from marey import __version__
from marey.config.schema import EncoderConfig, TrainerConfig, describe
from marey.core.errors import UserError
from marey.core.keys import derive
from marey.core.pixelstats import IMAGENET_MEAN, IMAGENET_STD
from marey.objectives.registry import build, summary_keys
from marey.training.averaging import Averaging
from marey.training.batchplan import batch_plan, fast_dev_steps
from marey.training.checkpoint import CheckpointWriter, check_retention
from marey.training.console import Console, Validation
from marey.training.data import (
    ClipData,
    build_loader,
    open_train,
    open_val,
    validates_on_training_data,
)
from marey.training.exposure import per_source, write_exposure
from marey.training.folders import LAST, checkpoints_in
from marey.training.ledger import Ledger
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
from marey.training.receipt import Receipt, open_receipt
from marey.training.resume import check_same_data, check_same_experiment, load_weights, read_checkpoint
from marey.training.schedule import check_schedule
from marey.training.signals import StopRequest
from marey.training.watch import Watch

Say = Callable[[str], None]


def fit(
    config: EncoderConfig,
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
    """
    if _rank() != 0:
        say = _silent
    refuse_foreign_callbacks()
    check_retention(config.checkpoint)
    _check_has_end(config.trainer)
    with quiet_lightning(), StopRequest(say) as stop:
        run = _Run(config, run_dir=run_dir, checkpoint_dir=checkpoint_dir, say=say, stop=stop)
        try:
            return run.train(differences=differences, command=command)
        except UserError:
            if _rank() != 0:
                sys.exit(2)  # rank 0 says it, once
            raise
        finally:
            run.close()


@dataclass(frozen=True)
class _Start:
    """Where an exact resume goes on."""

    path: Path
    step: int
    epoch: int
    micro_step: int
    state: dict[str, Any]
    """``marey.resume`` of the checkpoint."""


class _Run:
    """The parts of one run, and how they meet."""

    def __init__(
        self, config: EncoderConfig, *, run_dir: Path, checkpoint_dir: Path, say: Say, stop: StopRequest
    ) -> None:
        self.config, self.run_dir, self.checkpoint_dir = config, run_dir, checkpoint_dir
        self.say, self.stop = say, stop
        self.receipt: Receipt | None = None
        self.loaders: list[MicroStepLoader] = []
        self.start: _Start | None = None
        self.saves = config.trainer.enable_checkpointing is not False and not config.trainer.fast_dev_run

    def close(self) -> None:
        """End what runs beside this process."""
        for loader in self.loaders:
            loader.close()

    def train(self, *, differences: list[str], command: list[str]) -> Path | None:
        """See ``fit``."""
        config = self.config
        _seed_everything(config.seed)
        self.data = open_train(config)
        self.val = open_val(config) if _validates(config) else None
        self.plan = batch_plan(config, self.data.clips)
        check_schedule(config, self.plan.total_steps)
        if self.plan.total_steps == 0:
            raise UserError(
                f"trainer.max_steps={config.trainer.max_steps} and trainer.max_epochs={config.trainer.max_epochs} "
                "leave no step to train; set one of them above 0"
            )
        with refusals_in_words():
            objective = build(config)
        module, resumed_from = self._module(objective)
        done = self.start.step if self.start else 0
        if self.plan.total_steps is not None and done >= self.plan.total_steps:
            raise UserError(
                f"{config.resume.ckpt_path} has {done} optimizer steps and this run ends at "
                f"{self.plan.total_steps}; raise trainer.max_steps (or trainer.max_epochs) to train further"
            )
        trainer = self._trainer(module)
        if trainer.world_size != self.plan.world_size:
            raise UserError(
                f"trainer.devices={config.trainer.devices} on {config.trainer.num_nodes} nodes are "
                f"{self.plan.world_size} ranks and the launcher started {trainer.world_size}; make them agree"
            )
        if trainer.is_global_zero:
            self.receipt = self._open_receipt(module, differences, command, resumed_from)
            self.receipt.write()
        self._announce(trainer, module)
        launcher = trainer.strategy.launcher
        self.stop.forward = getattr(launcher, "kill", None)
        with self._closing_receipt(), refusals_in_words():
            self._fit(trainer, module)
        return self._finish()

    def _module(self, objective: torch.nn.Module) -> tuple[TrainingModule, dict[str, Any] | None]:
        config, plan = self.config, self.plan
        assert plan.micro_steps_per_epoch is not None
        train_loader = self._loader(self.data, plan.micro_steps_per_epoch)
        val_loader = None
        if self.val is not None:
            steps = self.val.clips // plan.statistic_batch
            if steps < 1:
                raise UserError(
                    f"the validation data gives {self.val.clips} clips and one micro-step takes "
                    f"{plan.statistic_batch}; set trainer.limit_val_batches=0 or give more validation data"
                )
            val_loader = self._loader(self.val, steps, fixed_epoch=True)
        module = TrainingModule(objective, config=config, plan=plan, train_loader=train_loader, val_loader=val_loader)
        return module, self._resume(module)

    def _loader(self, data: ClipData, micro_steps: int, *, fixed_epoch: bool = False) -> MicroStepLoader:
        accelerated = self.config.trainer.accelerator != "cpu" and torch.cuda.is_available()
        loader = build_loader(
            data,
            self.config,
            plan=self.plan,
            micro_steps=micro_steps,
            pin_memory=self.config.loader.pin_memory and accelerated,
            fixed_epoch=fixed_epoch or bool(self.config.trainer.overfit_batches),
        )
        self.loaders.append(loader)
        return loader

    def _resume(self, module: TrainingModule) -> dict[str, Any] | None:
        """Load weights, or note where an exact resume starts; what the receipt says of it."""
        config = self.config
        if config.resume.ckpt_path is None:
            return None
        path = Path(config.resume.ckpt_path).expanduser()
        checkpoint = read_checkpoint(path)
        about = checkpoint["marey"]
        said: dict[str, Any] = {
            "path": str(path.resolve()),
            "run_id": about["receipt"].get("run_id"),
            "step": about["step"],
            "epoch": about["epoch"],
            "micro_step": about["micro_step"],
            "exact": not config.resume.weights_only,
            "weights": config.resume.weights if config.resume.weights_only else "online",
            "allowed_changes": [],
            "notes": [],
        }
        if config.resume.weights_only:
            load_weights(module, checkpoint, weights=config.resume.weights, ema_key=config.ema.save_key, path=path)
            return said
        if config.resume.weights == "ema":
            raise UserError(
                "resume.weights=ema starts a new run from averaged weights and resume.weights_only=false continues "
                "an old one; set resume.weights_only=true, or resume.weights=online"
            )
        allow = config.resume.allow_changes
        said["allowed_changes"] = check_same_experiment(about["config"], config, path=path, allow=allow)
        check_same_data(about["receipt"]["data"]["train"], self.data.describe(), path=path, allow=allow)
        if about["world_size"] != self.plan.world_size:
            said["notes"].append(
                f"written by {about['world_size']} ranks, continued by {self.plan.world_size}: "
                "equal within rounding, not bit by bit"
            )
        self.start = _Start(path, about["step"], about["epoch"], about["micro_step"], about["resume"])
        return said

    def _trainer(self, module: TrainingModule) -> pl.Trainer:
        config, done = self.config, self.start.step if self.start else 0
        fixed = bool(config.trainer.overfit_batches)
        order = self.data.order(config, self.plan.statistic_batch)
        self.ledger = Ledger(order, sources=len(self.data.sources), fixed_epoch=fixed)
        self.watch = Watch(
            config,
            self.plan,
            ledger=self.ledger,
            loader=module.train_dataloader(),
            stop=self.stop,
            max_seconds=_seconds(config.trainer.max_time),
            run_dir=self.run_dir,
            say=self.say,
            file_of=self.data.file,
        )
        self.metrics = MetricsCallback(
            MetricsFile(self.run_dir / "metrics.csv"),
            watch=self.watch,
            ledger=self.ledger,
            every=config.trainer.log_every_n_steps,
            after_step=done,
        )
        self.averaging = Averaging(config.ema, watch=self.watch) if config.ema.enabled else None
        callbacks: list[pl.Callback] = [self.watch]
        if self.averaging is not None:
            callbacks.append(self.averaging)
        callbacks.append(self.metrics)
        if config.trainer.enable_progress_bar is not False:
            callbacks.append(Console(watch=self.watch, total_steps=self.plan.total_steps, done_steps=done))
        if self.val is not None:
            callbacks.append(Validation(self.run_dir / "validation.csv", say=self.say, after_step=done))
        self.writer = CheckpointWriter(
            self.checkpoint_dir,
            config.checkpoint,
            watch=self.watch,
            complete=self._complete,
            written=self._written,
            keep_names=self._names_of_another_run(),
        )
        if self.saves:
            callbacks.append(self.writer)
        if self.start is not None:
            self._restore(self.start)
        return build_trainer(
            config.trainer,
            world_size=self.plan.world_size,
            accumulate=self.plan.accumulate,
            total_steps=self.plan.total_steps,
            run_dir=self.run_dir,
            callbacks=callbacks,
            loggers=[] if config.trainer.fast_dev_run else build_loggers(config, self.run_dir),
        )

    def _names_of_another_run(self) -> frozenset[str]:
        """Weights taken from a checkpoint start another run: in the same folder it must not write over the first."""
        if self.start is not None:
            return frozenset()
        return frozenset(path.name for path in checkpoints_in(self.checkpoint_dir)) - {LAST}

    def _restore(self, start: _Start) -> None:
        """What is neither weights, optimizer nor Lightning's counts; those, Lightning restores."""
        self.ledger.load_state_dict(start.state["consumed"])
        self.metrics.go_on(start.state["interval"])
        self.watch.trained_seconds = float(start.state["trained_seconds"])
        if start.path.resolve().parent == self.checkpoint_dir.resolve():
            names = start.state["saved"]
            self.writer.saved = [path for name in names if (path := self.checkpoint_dir / name).exists()]

    def _fit(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        # Lightning restores weights before it converts precision: float64 weights would pass through float32.
        trainer.precision_plugin.convert_module(module)
        try:
            trainer.fit(
                module,
                ckpt_path=None if self.start is None else str(self.start.path),
                weights_only=True if self.start is not None else None,
            )
        except SystemExit as error:
            # How Lightning leaves on a KeyboardInterrupt.
            raise KeyboardInterrupt from error
        except torch.OutOfMemoryError as error:
            held = self.config.loader.micro_batch_size or self.plan.batch_size
            raise UserError(
                f"the device ran out of memory with {held} clips at a time; a smaller loader.micro_batch_size "
                "(it must divide loader.batch_size) needs less and gives the same results"
            ) from error

    def _complete(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """Everything in a checkpoint that is this program's own. Plain values and tensors only."""
        config, plan = self.config, self.plan
        ema = self.averaging.ema if self.averaging is not None else None
        if ema is not None:
            checkpoint[config.ema.save_key] = ema.state_dict()
        micro_step = trainer.fit_loop.epoch_loop.batch_idx + 1
        self._refresh_receipt()
        keys = dict(summary_keys)
        if config.ema.save_key != "state_dict_ema":
            keys[config.ema.save_key] = keys.pop("state_dict_ema")
        if not config.ema.enabled:
            keys.pop(config.ema.save_key)
        checkpoint["marey"] = {
            "format": 1,
            "kind": "encoder",
            "version": __version__,
            "config": describe(config),
            "receipt": self.receipt.content if self.receipt is not None else {},
            "preprocessing": self._preprocessing(),
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "micro_step": micro_step,
            "world_size": plan.world_size,
            "effective_batch": plan.effective_batch,
            "statistic_batch": plan.statistic_batch,
            "norm_group": plan.norm_group,
            "ema": None if ema is None else ema.describe(),
            "keys": keys,
            "resume": {
                "consumed": self.ledger.state_dict(),
                "interval": self.metrics.interval(),
                "trained_seconds": self.watch.trained_seconds,
                "saved": [path.name for path in self.writer.saved],
            },
        }

    def _preprocessing(self) -> dict[str, Any]:
        model = self.config.model
        rates = {source.rate for source in self.data.sources}
        return {
            "format": 1,
            "mean": list(IMAGENET_MEAN),
            "std": list(IMAGENET_STD),
            "layout": "B,C,T,H,W",
            "num_frames": model.num_frames,
            "frame_stride": self.config.frame_stride,
            "rate": rates.pop() if len(rates) == 1 else None,
            "img_size": model.img_size,
            "patch_size": model.patch_size,
            "tubelet_size": model.tubelet_size,
            "resize": "short side to img_size, bicubic, antialias",
            "crop": "centre",
        }

    def _written(self, path: Path, step: int, epoch: int, removed: list[Path]) -> None:
        """A checkpoint is on disk: the receipt and the exposure follow it."""
        assert self.receipt is not None
        entries: list[dict[str, Any]] = self.receipt.content["checkpoints"]
        entries[:] = [entry for entry in entries if entry["path"] != str(path)]
        gone = {str(old) for old in removed}
        for entry in entries:
            if entry["path"] in gone:
                entry["removed"] = True
        entries.append({"path": str(path), "step": step, "epoch": epoch, "bytes": path.stat().st_size})
        self._refresh_receipt()
        self.receipt.write()
        write_exposure(self.run_dir, step=step, sources=self._per_source())

    def _per_source(self) -> list[dict[str, Any]]:
        names = [source.name for source in self.data.sources]
        return per_source(self.ledger, names=names, frames_per_clip=self.config.model.num_frames)

    def _refresh_receipt(self) -> None:
        if self.receipt is None:
            return
        ledger = self.ledger
        per_epoch = self.plan.micro_steps_per_epoch
        assert per_epoch is not None
        self.receipt.content["consumed"] = {
            "optimizer_steps": ledger.optimizer_steps,
            "micro_steps": ledger.micro_steps,
            "epochs": ledger.micro_steps / per_epoch,
            "clips": ledger.clips_seen,
            "tokens": ledger.tokens,
            "same_episode_pairs": ledger.same_episode_pairs,
            "skipped_steps": ledger.skipped_steps,
            "per_source": self._per_source(),
        }
        if self.averaging is not None and self.averaging.ema is not None:
            self.receipt.content["ema"]["updates"] = self.averaging.ema.updates

    def _open_receipt(
        self,
        module: TrainingModule,
        differences: list[str],
        command: list[str],
        resumed_from: dict[str, Any] | None,
    ) -> Receipt:
        config = self.config
        return open_receipt(
            config,
            run_dir=self.run_dir,
            checkpoint_dir=self.checkpoint_dir,
            plan=self.plan,
            differences=differences,
            command=command,
            data={
                "name": config.data.name,
                "train": self.data.describe(),
                "val": None if self.val is None else self.val.describe(),
                "val_is_train": None if self.val is None else validates_on_training_data(config),
            },
            parameters=_parameters(module),
            checkpoint_keys=dict(summary_keys),
            resumed_from=resumed_from,
        )

    @contextmanager
    def _closing_receipt(self) -> Iterator[None]:
        """Whatever ends the run, its receipt says so."""
        try:
            yield
        except UserError as error:
            self._close_receipt("refused", " ".join(str(error).split()))
            raise
        except KeyboardInterrupt:
            self._close_receipt("failed", "aborted by a second Ctrl-C; what was saved before is complete")
            raise
        except BaseException as error:
            self._close_receipt("failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
            raise

    def _close_receipt(self, status: Any, sentence: str) -> None:
        if self.receipt is not None:
            self._refresh_receipt()
            self.receipt.close(status, sentence)

    def _finish(self) -> Path | None:
        ending = self.watch.ending or "finished"
        newest = self.writer.saved[-1] if self.writer.saved else None
        where = f"; newest checkpoint {newest}" if newest else ""
        if newest is None and self.config.checkpoint.save_last and self.saves:
            where = f"; newest checkpoint {self.checkpoint_dir / LAST}"
        sentence = f"{ending} after {self.ledger.optimizer_steps} optimizer steps{where}"
        self._close_receipt(ending, sentence)
        self.say(sentence)
        return newest

    def _announce(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        config, plan, say = self.config, self.plan, self.say
        counts = _parameters(module)
        parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if name != "total")
        say(f"model         {config.model.name}: {counts['total']:,} parameters ({parts})")
        for source in self.data.describe():
            dropped = f", {source['dropped_short']:,} too short and dropped" if source["dropped_short"] else ""
            say(
                f"data          {source['name']}: {source['usable_episodes']:,} episodes{dropped}, "
                f"{source['clips_per_epoch']:,} clips per epoch ({source['path']})"
            )
            if source["refused"]:
                say(f"              {len(source['refused'])} files refused, the first: {source['refused'][0]}")
        total = "until it is stopped" if plan.total_steps is None else f"{plan.total_steps:,} in all"
        if plan.total_steps is not None and plan.epochs is not None:
            total += f", {plan.epochs:.3g} epochs"
        say(
            f"steps         {plan.steps_per_epoch:,} optimizer steps per epoch, {total}; "
            f"{plan.dropped_clips:,} clips of an epoch fill no step"
        )
        if config.ema.enabled:
            say(f"average       {self._ema_line()}")
        if self.start is not None:
            say(f"resumes       {self.start.path} at step {self.start.step}, epoch {self.start.epoch}")
        ignored = ignored_settings(config.loader)
        if ignored:
            say(f"note          loader.num_workers=0: {', '.join(ignored)} have no effect")
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if on_cpu and str(config.trainer.precision).startswith(("bf16", "16")):
            say(
                f"note          trainer.precision={config.trainer.precision} is kept and is slow on a CPU; "
                "trainer.precision=32-true is many times faster there"
            )
        if self.val is not None and validates_on_training_data(config):
            say(
                "warning       validation looks at the training data: its loss is no measure of generalisation "
                "(set data.val to held-out videos)"
            )
        if not self.saves:
            say("note          checkpoints are off for this run")

    def _ema_line(self) -> str:
        from marey.training.ema import describe_rule

        return describe_rule(self.config.ema)


def _rank() -> int:
    """This process's rank as far as the environment tells, before there is a Trainer to ask."""
    return int(getattr(rank_zero_only, "rank", 0) or 0)


def _parameters(module: torch.nn.Module) -> dict[str, int]:
    """Trainable parameters of each top-level module that has any, and ``total``."""
    counts = {
        name: sum(p.numel() for p in child.parameters() if p.requires_grad) for name, child in module.named_children()
    }
    counts = {name: count for name, count in counts.items() if count}
    return {**counts, "total": sum(counts.values())}


def _validates(config: EncoderConfig) -> bool:
    return bool(config.trainer.limit_val_batches) and fast_dev_steps(config.trainer) is None


def _check_has_end(trainer: TrainerConfig) -> None:
    if trainer.max_epochs is None and trainer.max_steps == -1 and trainer.max_time is None:
        raise UserError(
            "nothing ends this run: set trainer.max_epochs, trainer.max_steps or trainer.max_time "
            "(trainer.max_epochs=-1 trains until it is stopped)"
        )


def _seconds(limit: str | dict[str, int] | None) -> float | None:
    """``trainer.max_time`` as Lightning writes it: ``DD:HH:MM:SS`` or ``{days, hours, minutes, seconds}``."""
    if limit is None:
        return None
    try:
        if isinstance(limit, dict):
            return timedelta(**limit).total_seconds()
        days, hours, minutes, seconds = (int(part) for part in limit.split(":"))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"trainer.max_time={limit} is not a time; write days:hours:minutes:seconds, as in 00:12:00:00"
        ) from error
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


def _seed_everything(seed: int) -> None:
    """Nothing of ours draws from these; a library that does shall at least do it the same way each time."""
    value = derive(seed, "library")
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def _silent(_line: str) -> None:
    """What ranks other than 0 say."""
