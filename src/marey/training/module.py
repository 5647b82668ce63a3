"""The objective as Lightning sees it: steps, optimizer, schedule; state dicts keep the objective's names."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from marey.config.schema import EncoderConfig
from marey.core.tokens import TokenGroup, ViewChunk
from marey.objectives.base import StepOutput
from marey.training.batchplan import BatchPlan
from marey.training.loader import MicroStepLoader
from marey.training.optimizer import build_adamw
from marey.training.schedule import lr_at, weight_decay_at


class MicroStepRecord(NamedTuple):
    """What one micro-step of this rank leaves for metrics, receipt and the watch over non-finite values.

    micro_step: within the epoch. clips: int64 ``[B, 5]``, replaced: int64 ``[n, 3]``, reasons: n sentences, as in
    ``ViewChunk``.
    """

    micro_step: int
    output: StepOutput
    clips: Tensor
    replaced: Tensor
    reasons: list[str]


class TrainingModule(pl.LightningModule):
    """Trains ``objective``. Holds no randomness: every draw has the key of a clip or of a micro-step.

    The objective's children become this module's own, so that ``state_dict`` has ``encoder.*`` and ``projector.*``
    and no wrapper's prefix.
    """

    def __init__(
        self,
        objective: nn.Module,
        *,
        config: EncoderConfig,
        plan: BatchPlan,
        train_loader: MicroStepLoader,
        val_loader: MicroStepLoader | None = None,
    ) -> None:
        super().__init__()
        for name, child in objective.named_children():
            self.add_module(name, child)
        # Kept out of the registry of submodules: registering it would list every weight twice.
        object.__setattr__(self, "objective", objective)
        self.objective: nn.Module
        self.config = config
        self.plan = plan
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

    def training_step(self, batch: list[ViewChunk], batch_idx: int) -> Tensor:
        """The loss of one micro-step; ``take_window`` gives what else came out of it."""
        self._check_position(batch, batch_idx)
        assert self.plan.micro_steps_per_epoch is not None
        micro_step = self.current_epoch * self.plan.micro_steps_per_epoch + batch_idx
        output = self._forward(batch, micro_step=micro_step)
        self._window.append(
            MicroStepRecord(
                micro_step=batch_idx,
                output=output._replace(loss=output.loss.detach()),
                clips=torch.cat([chunk.clips for chunk in batch]),
                replaced=torch.cat([chunk.replaced for chunk in batch]),
                reasons=[reason for chunk in batch for reason in chunk.reasons],
            )
        )
        return output.loss

    def validation_step(self, batch: list[ViewChunk], batch_idx: int) -> dict[str, Tensor]:
        """The training loss and its parts on validation clips, all tokens, views of epoch 0 whatever the epoch."""
        output = self._forward(batch, micro_step=batch_idx)
        return {"loss": output.loss, **output.parts}

    def _forward(self, batch: list[ViewChunk], *, micro_step: int) -> StepOutput:
        output: StepOutput = self.objective.forward_train_batch(batch, micro_step=micro_step)  # type: ignore[operator]
        return output

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
        return rate / peak

    def transfer_batch_to_device(
        self,
        batch: list[ViewChunk],
        device: torch.device,
        dataloader_idx: int,  # noqa: ARG002  # Lightning's signature
    ) -> list[ViewChunk]:
        """Patches and positions go to the device; identities stay on the CPU, where they are read."""

        def moved(group: TokenGroup) -> TokenGroup:
            return TokenGroup(*(tensor.to(device, non_blocking=True) for tensor in group))

        return [
            chunk._replace(views_global=moved(chunk.views_global), views_local=moved(chunk.views_local))
            for chunk in batch
        ]

    def _check_position(self, batch: list[ViewChunk], batch_idx: int) -> None:
        """The loop's count and the loader's must be one, or a resumed run would quietly see other data."""
        epoch = 0 if self.config.trainer.overfit_batches else self.current_epoch
        first = batch_idx * self.plan.statistic_batch + self.global_rank * self.plan.batch_size
        found = batch[0].clips[0, 3:].tolist()
        if found != [epoch, first]:
            raise RuntimeError(
                f"the loop is at epoch {epoch}, position {first} and the loader delivered epoch {found[0]}, "
                f"position {found[1]}"
            )
