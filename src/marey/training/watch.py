"""One look at every optimizer step before it is made: is it finite, what did it cost, should it be the last.

Everything the ranks must agree on travels in one small all-reduce per optimizer step: whether a value is not
finite, whether someone asked to stop, and the sums that metrics and receipt are made of. So all ranks skip, stop
and count alike, and metrics do not depend on where a checkpoint falls.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from marey.core.errors import UserError
from marey.core.files import write_json
from marey.training.kinds.base import Consumed, Kind, MicroStepRecord
from marey.training.loader import MicroStepLoader
from marey.training.local import local
from marey.training.module import TrainingModule
from marey.training.receipt import Ending
from marey.training.signals import StopRequest


class AgreedRefusalError(UserError):
    """A refusal that every rank raises at the same point, so that none needs to end the others."""


@dataclass
class StepReport:
    """One optimizer step over all ranks. Losses are means over its clips."""

    step: int
    """Optimizer steps completed with this one."""
    epoch: int
    lr: float
    loss: float
    parts: dict[str, float]
    clips: int
    tokens: int
    wait_seconds: float
    """Seconds a rank waited for data, averaged over ranks."""
    seconds: float
    """Since the last optimizer step ended."""
    same_episode_pairs: int
    skipped: bool
    numbers: list[float]
    """The kind's own, over all ranks."""
    last: MicroStepRecord
    """This rank's last micro-step."""


class Watch(pl.Callback):
    """Goes first: the other callbacks read ``report`` and ``ending`` after each optimizer step."""

    def __init__(
        self,
        kind: Kind,
        *,
        ledger: Consumed,
        loader: MicroStepLoader,
        stop: StopRequest,
        max_seconds: float | None,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        self.report: StepReport | None = None
        self.ending: Ending | None = None
        """Why the step just made is the last one; None when more follow."""
        self.trained_seconds = 0.0
        """Of the whole run, earlier sittings included."""
        self._kind, self._ledger, self._loader = kind, ledger, loader
        self._config, self._plan = kind.config, kind.plan
        self._stop, self._max_seconds, self._run_dir, self._say = stop, max_seconds, run_dir, say
        self._stop_agreed = self._time_is_up = False
        self.broke_off = False
        """Whether a validation was left unfinished on request."""
        self.skipped_in_a_row = 0
        """Optimizer steps just skipped, one after the other."""
        self._buffers: dict[str, Tensor] = {}
        self._clock = time.perf_counter()
        self._waited = 0.0

    def on_train_start(self, _trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock; take the signals back from Lightning."""
        self._stop.listen()
        self._clock = time.perf_counter()
        self._waited = self._loader.waited
        self._keep_buffers(pl_module)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Gradients are complete and averaged over ranks; nothing has been updated yet."""
        assert isinstance(pl_module, TrainingModule)
        window = pl_module.take_window()
        names = list(window[0].output.parts)
        finite_here = self._finite(window, pl_module, trainer)
        mine = torch.tensor(
            [
                0.0 if finite_here else 1.0,
                1.0 if self._stop.requested else 0.0,
                1.0 if trainer.is_global_zero and self._out_of_time() else 0.0,
                self._loader.waited - self._waited,
                sum(record.output.tokens for record in window),
                *self._replaced(window),
                *self._kind.numbers(window),
            ],
            dtype=torch.float64,
        )
        losses = [torch.stack([r.output.loss, *r.output.parts.values()]) for r in window]
        summed = torch.stack([_float64(values) for values in losses]).sum(0)
        sums = torch.cat([mine.to(summed.device), summed])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        bad, stop, time_up, waited, tokens, *rest = sums.tolist()
        sources = len(self._ledger.replaced)
        own = sources + self._kind.sums
        replaced, numbers, (loss, *parts) = rest[:sources], rest[sources:own], rest[own:]
        self._stop_agreed, self._time_is_up = self._stop_agreed or stop > 0, self._time_is_up or time_up > 0
        self._waited = self._loader.waited
        skipped = bad > 0
        step = trainer.global_step + 1
        if skipped:
            self._not_finite(window, pl_module, trainer, optimizer, step)
        else:
            self.skipped_in_a_row = 0
            self._rescale(pl_module, numbers)
        pairs = self._ledger.count(
            epoch=trainer.current_epoch,
            micro_steps=[record.micro_step for record in window],
            tokens=round(tokens),
            replaced=[round(value) for value in replaced],
            skipped=skipped,
            numbers=numbers,
        )
        self._kind.counted(window, epoch=trainer.current_epoch, skipped=skipped)
        made = self._plan.world_size * len(window)
        mean_loss, mean_parts = self._kind.means(loss, dict(zip(names, parts, strict=True)), made=made, numbers=numbers)
        self.report = StepReport(
            step=step,
            epoch=trainer.current_epoch,
            lr=optimizer.param_groups[0]["lr"],
            loss=mean_loss,
            parts=mean_parts,
            clips=made * self._plan.batch_size,
            tokens=round(tokens),
            wait_seconds=waited / self._plan.world_size,
            seconds=0.0,
            same_episode_pairs=pairs,
            skipped=skipped,
            numbers=numbers,
            last=window[-1],
        )
        for record in window:
            for reason in record.reasons:
                self._say(f"replaced a clip that cannot be read: {reason}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Complete the report of the optimizer step just made, and decide whether it is the last."""
        if not self.stepped(batch_idx):
            return
        assert self.report is not None
        now = time.perf_counter()
        self.report.seconds, self._clock = now - self._clock, now
        self.trained_seconds += self.report.seconds
        if not self.report.skipped:
            self._keep_buffers(pl_module)
        self.ending = self._why_end(trainer)
        if self.ending is not None:
            trainer.should_stop = True
        if self.ending == "stopped on request":
            # Lightning would validate because the loop ends; one whose turn has come is made by the resumed run.
            trainer.fit_loop.epoch_loop._skip_next_val = True

    def breaks_off(self, trainer: pl.Trainer) -> bool:
        """Whether the validation going on ends here, on request. All ranks come here together, and agree.

        That of a run's last step goes on to its end: no resumed run would make it.
        """
        if self.ending == "finished":
            return False
        asked = torch.tensor([1.0 if self._stop.requested else 0.0], device=trainer.strategy.root_device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(asked)
        if not asked.item():
            return False
        self.broke_off = self._stop_agreed = True
        self.ending = self.ending or self._why_end(trainer)
        trainer.should_stop = True
        return True

    def stepped(self, batch_idx: int) -> bool:
        """Whether micro-step ``batch_idx`` of an epoch completed an optimizer step."""
        return (batch_idx + 1) % self._plan.accumulate == 0

    def _why_end(self, trainer: pl.Trainer) -> Ending | None:
        step = trainer.global_step
        if self._plan.total_steps is not None and step >= self._plan.total_steps:
            return "finished"
        if self._stop_agreed:
            # Lightning would go on to trainer.min_steps or min_epochs; a person who asks to stop means it.
            trainer.fit_loop.epoch_loop.min_steps = None
            trainer.fit_loop.min_epochs = 0
            return "stopped on request"
        if self._time_is_up and step >= (self._config.trainer.min_steps or 0):
            done = trainer.current_epoch
            return "time limit reached" if done >= (self._config.trainer.min_epochs or 0) else None
        return None

    def _out_of_time(self) -> bool:
        running = self.trained_seconds + time.perf_counter() - self._clock
        return self._max_seconds is not None and running >= self._max_seconds

    def _rescale(self, module: TrainingModule, numbers: list[float]) -> None:
        """A reduction that only all ranks and micro-steps together know is finished here, before clipping."""
        scale = self._kind.gradient_scale(numbers)
        if scale is not None:
            torch._foreach_mul_([local(p.grad) for p in module.parameters() if p.grad is not None], scale)

    def _finite(self, window: list[MicroStepRecord], module: TrainingModule, trainer: pl.Trainer) -> bool:
        total = torch.stack([record.output.loss for record in window]).sum()
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            # With a loss scaler, gradients that overflow are its own business: it skips and rescales.
            gradients = [local(p.grad) for p in module.parameters() if p.grad is not None]
            total = total + torch.stack(torch._foreach_norm(gradients)).sum()
        return bool(torch.isfinite(total))

    def _replaced(self, window: list[MicroStepRecord]) -> list[float]:
        counts = [0.0] * len(self._ledger.replaced)
        for record in window:
            for source in record.replaced[:, 0].tolist():
                counts[source] += 1
        return counts

    def _not_finite(
        self,
        window: list[MicroStepRecord],
        module: TrainingModule,
        trainer: pl.Trainer,
        optimizer: torch.optim.Optimizer,
        step: int,
    ) -> None:
        """All ranks come here together."""
        path = self._run_dir / "nonfinite.json"
        mine = self._identities(window, trainer.global_rank)
        ranks: list[Any] = [mine]
        if dist.is_available() and dist.is_initialized():
            ranks = [None] * self._plan.world_size
            dist.all_gather_object(ranks, mine)
        if trainer.is_global_zero:
            earlier = json.loads(path.read_text()) if path.exists() else []
            epoch = trainer.current_epoch
            write_json(path, [*earlier, {"step": step, "epoch": epoch, "micro_steps": list(chain(*ranks))}])
        if self._config.on_nonfinite == "stop":
            raise AgreedRefusalError(
                f"the loss or a gradient is not finite at step {step}, before its update; {path} lists the step's "
                "clips; lower optimizer.lr, look at those clips, or set on_nonfinite=skip"
            )
        self.skipped_in_a_row += 1
        self._check_limits(step, path)
        self._say(f"step {step} is not finite and is skipped; {path} lists its clips")
        # Without gradients AdamW touches neither weights nor moments, and no weight decays.
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(self._buffers[name])

    def _check_limits(self, step: int, path: Path) -> None:
        """Skipping is for a bad sample now and then, not for a run that has come apart."""
        in_a_row, every = self.skipped_in_a_row, self._ledger.skipped_steps + 1
        for count, key, limit, words in (
            (in_a_row, "max_skipped_in_a_row", self._config.max_skipped_in_a_row, " in a row"),
            (every, "max_skipped_steps", self._config.max_skipped_steps, ""),
        ):
            if limit is not None and count > limit:
                raise AgreedRefusalError(
                    f"{count} optimizer steps{words} are not finite, the last at step {step}, and {key}={limit}; "
                    f"{path} lists their clips: lower optimizer.lr, look at those clips, or resume from an earlier "
                    "checkpoint"
                )

    def _keep_buffers(self, module: pl.LightningModule) -> None:
        """Running statistics as of the last good step: the forward pass of a bad one has already spoilt them."""
        if self._config.on_nonfinite == "skip":
            self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

    def _identities(self, window: list[MicroStepRecord], rank: int) -> list[dict[str, Any]]:
        found = []
        for record in window:
            features = record.output.features
            finite = None if features is None else torch.isfinite(features).all(dim=1).tolist()
            loss = float(record.output.loss)
            found.append(
                {
                    "rank": rank,
                    "micro_step": record.micro_step,
                    "loss": loss if math.isfinite(loss) else str(loss),
                    "clips": [
                        {**self._kind.identity(clip), **({} if finite is None else {"features_finite": finite[row]})}
                        for row, clip in enumerate(record.clips.tolist())
                    ],
                }
            )
        return found


def _float64(values: Tensor) -> Tensor:
    # Apple's accelerator has no float64.
    return (values.cpu() if values.device.type == "mps" else values).double()
