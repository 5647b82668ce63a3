"""The objective as Lightning sees it: steps, optimizer, schedule; state dicts keep the objective's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from marey.training.kinds.base import Kind, MicroStepRecord
from marey.training.loader import MicroStepLoader
from marey.training.optimizer import build_adamw
from marey.training.schedule import lr_at, weight_decay_at

T = TypeVar("T")


class TrainingModule(pl.LightningModule):
    """Trains ``objective``. Holds no randomness: every draw has the key of a clip or of a micro-step.

    The objective's children and buffers become this module's own, so that ``state_dict`` has the objective's names
    (``encoder.*`` and ``projector.*``, or ``model.*``) and no wrapper's prefix.
    """

    def __init__(
        self,
        objective: nn.Module,
        *,
        kind: Kind,
        train_loader: MicroStepLoader,
        val_loader: MicroStepLoader | None = None,
    ) -> None:
        super().__init__()
        for name, child in objective.named_children():
            self.add_module(name, child)
        for name, buffer in objective.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        # Kept out of the registry of submodules: registering it would list every weight twice.
        object.__setattr__(self, "objective", objective)
        self.objective: nn.Module
        self.kind = kind
        self.config, self.plan = kind.config, kind.plan
        self._window: list[MicroStepRecord] = []
        self._configured: list[dict[str, Any]] = []
        self._loaders = (train_loader, val_loader)

    def train_dataloader(self) -> MicroStepLoader:
        """Micro-steps of this rank."""
        self._loaders[0].rank = self._rank()
        return self._loaders[0]

    def val_dataloader(self) -> MicroStepLoader | list[Any]:
        """Validation micro-steps; none when validation is off."""
        if self._loaders[1] is None:
            return []
        self._loaders[1].rank = self._rank()
        return self._loaders[1]

    def _rank(self) -> int:
        # The loaders are made before there is a Trainer, which alone knows the rank for certain.
        return self.global_rank if self._trainer is not None else 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of one micro-step; ``take_window`` gives what else came out of it."""
        self._check_position(batch, batch_idx)
        assert self.plan.micro_steps_per_epoch is not None
        micro_step = self.current_epoch * self.plan.micro_steps_per_epoch + batch_idx
        output = self._forward(batch, micro_step=micro_step)
        self._window.append(
            self.kind.record(batch, output, epoch=self.current_epoch, micro_step=batch_idx, rank=self.global_rank)
        )
        loss: Tensor = output.loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """The losses of one validation micro-step, the same whatever the epoch."""
        return self.kind.validate(self.objective, batch, micro_step=batch_idx, rank=self.global_rank)

    def _forward(self, batch: Any, *, micro_step: int) -> Any:
        return self.objective.forward_train_batch(self.kind.payload(batch), micro_step=micro_step)  # type: ignore[operator]

    def with_weights(self, look: Callable[[], T]) -> T:
        """``look()``, which calls the objective outside of a step and wants no gradient. All ranks call it together."""
        return look()

    def take_window(self) -> list[MicroStepRecord]:
        """The micro-steps since the last call: those that one optimizer step is made of."""
        window, self._window = self._window, []
        return window

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the weight decay of this update, where it follows a schedule."""
        schedule = self.config.weight_decay_scheduler
        if not schedule.enabled:
            return
        assert self.plan.total_steps is not None
        optimizer.param_groups[0]["weight_decay"] = weight_decay_at(
            self.trainer.global_step,
            start_value=schedule.start_value,
            end_value=schedule.end_value,
            total_steps=self.plan.total_steps,
            schedule_type=schedule.schedule_type,
        )

    def configure_optimizers(self) -> Any:
        """AdamW, and a learning rate that is a function of the optimizer step."""
        optimizer = build_adamw(self, self.config.optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._share_of_peak)
        kept = ("initial_lr", "weight_decay", "betas")
        self._configured = [{key: group[key] for key in kept} for group in optimizer.param_groups]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
        }

    def on_train_start(self) -> None:
        """Make a resumed optimizer and schedule this configuration's: Lightning restores the checkpoint's settings.

        Where nothing was changed, the same numbers are computed again, bit by bit.
        """
        if self.trainer.ckpt_path is None:
            return
        optimizer, scheduler = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler
        scheduler.base_lrs = [group["initial_lr"] for group in self._configured]
        for group, configured in zip(optimizer.param_groups, self._configured, strict=True):
            group.update(configured)
            group["lr"] = configured["initial_lr"] * self._share_of_peak(scheduler.last_epoch)

    def _share_of_peak(self, step: int) -> float:
        config = self.config
        peak = config.optimizer.lr
        rate = lr_at(
            step,
            peak_step=config.scheduler.peak_step,
            start_lr=config.scheduler.start_lr,
            lr=peak,
            end_lr=config.scheduler.end_lr,
            total_steps=self.plan.total_steps,
        )
        return float(rate / peak)

    def transfer_batch_to_device(
        self,
        batch: Any,
        device: torch.device,
        dataloader_idx: int,  # noqa: ARG002  # Lightning's signature
    ) -> Any:
        """What the model computes with goes to the device; identities stay on the CPU, where they are read."""
        return self.kind.move(batch, device, next(self.parameters()).dtype)

    def _check_position(self, batch: Any, batch_idx: int) -> None:
        """The loop's count and the loader's must be one, or a resumed run would quietly see other data."""
        self.kind.check_position(batch, epoch=self.current_epoch, micro_step=batch_idx, rank=self.global_rank)
