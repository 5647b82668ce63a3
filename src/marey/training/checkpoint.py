"""Checkpoints: complete or absent, every n optimizer steps and at the end, the step in every name.

A checkpoint is one file that carries its own proof: written under a temporary name, sealed with the SHA-256 of its
content (``core.files``), flushed to disk, renamed. Only then does ``last.ckpt`` point at it; only then do old ones go.
"""

from __future__ import annotations

import copy
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from marey.config.schema import CheckpointConfig
from marey.core.errors import UserError
from marey.core.files import atomic_write, sync_folder
from marey.training.console import validation_due
from marey.training.folders import LAST, checkpoint_name, discard
from marey.training.record import Record
from marey.training.sealed import save_sealed
from marey.training.watch import Watch


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes under a temporary name, seals, flushes to disk, renames. Reads tensors and plain values only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """``torch.save`` of ``checkpoint``, whole and sealed or not at all.

        Raises:
            UserError: the disk refuses.
        """
        assert storage_options is None
        try:
            save_sealed(checkpoint, path)
        except OSError as error:
            raise UserError(
                f"the checkpoint {path} cannot be written ({error.strerror or error}); earlier checkpoints are "
                "untouched: free the disk or set checkpoint.dirpath, then resume from the newest"
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = "cpu",
        weights_only: bool | None = True,  # noqa: ARG002  # a file that would run code is never loaded
    ) -> dict[str, Any]:
        """What a file holds, or the folder of a sharded run, its tensors whole; executes nothing from them."""
        if Path(path).is_dir():
            from marey.training.shards import load_folder  # deferred: few runs have one to read

            return load_folder(Path(path))
        content: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
        return content


class CheckpointWriter(Checkpoint):
    """Saves right after the optimizer step, before the loop moves on, so that a resume starts where this ended.

    ``record`` completes each checkpoint and is told of it once it is on disk.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        watch: Watch,
        record: Record,
        sharded: bool = False,
    ) -> None:
        self.folder, self.config = folder, config
        self.saved: list[Path] = []
        """What this run wrote and kept, oldest first."""
        self._watch, self._record, self._sharded = watch, record, sharded
        self._loops: dict[str, Any] | None = None
        """Lightning's counts as of the last step, where no checkpoint of it is written and a validation follows."""

    def on_train_start(self, trainer: pl.Trainer, _pl_module: pl.LightningModule) -> None:
        """Count the epoch that a resume begins, where Lightning forgets to.

        Resuming from the last step of an epoch, Lightning 2.6 closes that epoch and starts the next without counting
        it as started; a checkpoint of such a run could not be resumed in its turn.
        """
        progress = trainer.fit_loop.epoch_progress
        if trainer.ckpt_path is not None and progress.current.ready == trainer.current_epoch:
            progress.increment_ready()
            progress.increment_started()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        _pl_module: pl.LightningModule,
        _outputs: Any,
        _batch: Any,
        batch_idx: int,
    ) -> None:
        """Every n optimizer steps, and at the run's last."""
        if not self._watch.stepped(batch_idx):
            return
        self._loops = None
        if trainer.global_step % self.config.every_n_train_steps == 0 or self._watch.ending is not None:
            self.save(trainer)
        elif validation_due(trainer):
            self._loops = copy.deepcopy(trainer._checkpoint_connector._get_loops_state_dict())

    def on_train_epoch_end(self, trainer: pl.Trainer, _pl_module: pl.LightningModule) -> None:
        """A request broke off the validation after the last step: save that step, the validation still to come."""
        if self._watch.broke_off and self._loops is not None:
            self.save(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, _pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the ``marey`` entry and the averaged weights."""
        if self._watch.broke_off and self._loops is not None:
            checkpoint["loops"] = self._loops
        self._record.complete(trainer, checkpoint)

    def save(self, trainer: pl.Trainer) -> None:
        """Write the checkpoint of this step; then point ``last.ckpt`` at it; then remove what is too old."""
        path = self.folder / self._name(epoch=trainer.current_epoch, step=trainer.global_step)
        self.saved = [*(old for old in self.saved if old != path), path]
        old = self._too_old(trainer)
        # What is about to go is named too: a kill before it is gone leaves it to the resumed run's retention.
        self._record.saved = [kept.name for kept in self.saved]
        trainer.save_checkpoint(path)
        if not trainer.is_global_zero:
            return
        try:
            last = link_last(path) if self.config.save_last else path
        except OSError as error:
            raise UserError(
                f"{path.with_name(LAST)} cannot be written ({error.strerror or error}); {path} and the checkpoints "
                "before it are complete: free the disk, then resume from there"
            ) from error
        # The receipt comes before the old ones go: the command in it must never name a file that is gone.
        self._record.written(
            last if path in old else path,
            last=last,
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            removed=old,
        )
        for gone in old:
            discard(gone)
        self.saved = [kept for kept in self.saved if kept not in old]

    def _name(self, *, epoch: int, step: int) -> str:
        return checkpoint_name(
            self.config.filename, epoch=epoch, step=step, insert_names=self.config.auto_insert_metric_name
        )

    def _too_old(self, trainer: pl.Trainer) -> list[Path]:
        """What ``save_top_k`` no longer keeps; never the file that this run was resumed from."""
        keep = self.config.save_top_k
        if keep < 0 or len(self.saved) <= keep:
            return []
        resumed = None if trainer.ckpt_path is None else Path(trainer.ckpt_path).resolve()
        old = self.saved[: len(self.saved) - keep]
        if self._sharded and self.config.save_last:
            old = [path for path in old if path != self.saved[-1]]  # ``last.ckpt`` is a name for it, no second one
        return [path for path in old if path.resolve() != resumed]


def link_last(path: Path) -> Path:
    """Make ``last.ckpt`` beside ``path`` the same file, in one step; a copy where the disk has no hard links.

    A folder, which has no hard links anywhere, gets a symbolic one.
    """
    last = path.with_name(LAST)
    temporary = path.with_name(f".{LAST}.{secrets.token_hex(4)}.tmp")
    if path.is_dir():
        temporary.symlink_to(path.name)
        temporary.replace(last)
        sync_folder(path.parent)
        return last
    try:
        os.link(path, temporary)
        temporary.replace(last)
        # Renaming one hard link onto another of the same file does nothing and leaves the first.
        temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        with atomic_write(last) as target, path.open("rb") as source:
            shutil.copyfileobj(source, target)
    return last


def check_retention(config: CheckpointConfig) -> None:
    """Refuse to train for nothing.

    Raises:
        UserError: a configuration that would keep no checkpoint at all.
    """
    checkpoint_name(config.filename, epoch=0, step=0)
    if config.save_top_k == 0 and not config.save_last:
        raise UserError(
            "checkpoint.save_top_k=0 with checkpoint.save_last=false would keep no checkpoint at all; set "
            "checkpoint.save_top_k=1 or checkpoint.save_last=true"
        )
