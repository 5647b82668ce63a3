"""Keeps the averaged weights of a run: on rank 0, which writes checkpoints; of a sharded run, each rank its own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from marey.config.schema import EmaConfig
from marey.training.ema import Ema, average_key
from marey.training.watch import Watch


class Averaging(pl.Callback):
    """Moves the average after every optimizer step, and takes it through checkpoints."""

    def __init__(self, config: EmaConfig, *, watch: Watch, sharded: bool = False) -> None:
        self.ema: Ema | None = None
        self._config, self._watch, self._sharded = config, watch, sharded

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Before a checkpoint is restored and before the weights move to their device."""
        if trainer.is_global_zero and not self._sharded:
            self.ema = Ema(pl_module, self._config)

    def on_load_checkpoint(
        self, _trainer: pl.Trainer, _pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the average and its count; without one in the checkpoint, start it from the checkpoint's weights."""
        if self.ema is None:
            return
        key = average_key(checkpoint)
        if key is not None:
            self.ema.load(checkpoint[key], updates=checkpoint["marey"]["ema"]["updates"])
        else:
            self.ema.load({name: checkpoint["state_dict"][name] for name in self.ema.copy}, updates=0)

    def on_fit_start(self, _trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the average where the weights are: there are shards from now on, and a checkpoint is restored after."""
        if self._sharded:
            self.ema = Ema(pl_module, self._config)
        if self.ema is not None:
            self.ema.to(pl_module.device)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        _outputs: Any,
        _batch: Any,
        batch_idx: int,
    ) -> None:
        """Follow the weights."""
        if self.ema is not None and self._watch.stepped(batch_idx):
            self.ema.after_step(pl_module, trainer.global_step)
