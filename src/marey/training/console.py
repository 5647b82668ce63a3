"""What a person sees while a run goes on: a bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from marey.core.progress import Progress
from marey.training.metrics import MetricsFile
from marey.training.watch import Watch


class Console(pl.Callback):
    """Progress in optimizer steps, with loss, rate and time left. Rank 0 only."""

    def __init__(self, *, watch: Watch, total_steps: int | None, done_steps: int, unit: str) -> None:
        self._watch, self._unit = watch, unit
        self._total = None if total_steps is None else total_steps - done_steps
        self._stack = ExitStack()
        self._progress: Progress | None = None

    def on_train_start(self, trainer: pl.Trainer, _pl_module: pl.LightningModule) -> None:
        """Show the bar."""
        if trainer.is_global_zero:
            self._progress = self._stack.enter_context(Progress("train", total=self._total, unit="steps"))

    def on_train_batch_end(
        self,
        _trainer: pl.Trainer,
        _pl_module: pl.LightningModule,
        _outputs: Any,
        _batch: Any,
        batch_idx: int,
    ) -> None:
        """One step further."""
        if self._progress is None or not self._watch.stepped(batch_idx):
            return
        report = self._watch.report
        assert report is not None
        rate = report.clips / max(report.seconds, 1e-9)
        self._progress.advance(
            1, note=f"step {report.step}, epoch {report.epoch}, loss {report.loss:.4f}, {rate:.1f} {self._unit}/s"
        )

    def on_train_end(self, _trainer: pl.Trainer, _pl_module: pl.LightningModule) -> None:
        """Leave the terminal as it was."""
        self._stack.close()

    def on_exception(self, _trainer: pl.Trainer, _pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the terminal as it was, without a line that says the work is done."""
        self._stack.__exit__(type(exception), exception, exception.__traceback__)


def validation_due(trainer: pl.Trainer) -> bool:
    """Whether Lightning validates after the micro-step just made because its turn has come, not because a run ends."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    stops, trainer.should_stop = trainer.should_stop, False
    try:
        return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
    finally:
        trainer.should_stop = stops


class Validation(pl.Callback):
    """Averages the validation losses over micro-steps and ranks, and writes ``validation.csv``.

    Where micro-steps have a ``weight``, what they give are sums, and the average is the sum of all over the weights
    of all: micro-steps then may be of unequal size.
    """

    def __init__(
        self,
        path: Path,
        columns: tuple[str, ...],
        *,
        watch: Watch,
        say: Callable[[str], None],
        done_steps: int,
        due_in_epoch: int | None,
    ) -> None:
        self._file = MetricsFile(path, columns)
        self._watch = watch
        self._say, self._done, self._due_in = say, done_steps, due_in_epoch
        self._sums: dict[str, Any] = {}
        self._count = 0

    def on_fit_start(self, trainer: pl.Trainer, _pl_module: pl.LightningModule) -> None:
        """Open the file."""
        if trainer.is_global_zero:
            # A row of the restored step itself was due, and is made again, or is of a stop's own last look.
            self._file.start(after_step=self._done - 1)

    def on_train_start(self, trainer: pl.Trainer, _pl_module: pl.LightningModule) -> None:
        """Make up for a validation that was due right after the checkpoint: Lightning takes it as done."""
        if self._due_in is None:
            return
        loop = trainer.fit_loop.epoch_loop
        first = trainer._logger_connector._first_loop_iter
        loop.val_loop.restarting = False  # from its first batch
        trainer.validating = True
        loop.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first
        self._due_in = None

    def on_validation_epoch_start(self, _trainer: pl.Trainer, _pl_module: pl.LightningModule) -> None:
        """Begin anew."""
        self._sums, self._count = {}, 0

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        _pl_module: pl.LightningModule,
        outputs: Any,
        _batch: Any,
        _batch_idx: int,
        _dataloader_idx: int = 0,
    ) -> None:
        """Add one micro-step; on a request to stop it is the last."""
        if not trainer.sanity_checking and self._watch.breaks_off(trainer):
            raise StopIteration  # Lightning's loop over batches ends with it
        self._count += 1
        for name, value in outputs.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach()

    def on_validation_epoch_end(self, trainer: pl.Trainer, _pl_module: pl.LightningModule) -> None:
        """One row."""
        if not self._count or trainer.sanity_checking or self._watch.broke_off:
            return
        means = self._means(trainer)
        if trainer.is_global_zero:
            row = {f"val/{name}": value for name, value in means.items()}
            epoch = trainer.current_epoch if self._due_in is None else self._due_in
            self._file.append({"step": trainer.global_step, "epoch": epoch, **row})
            self._say(f"validation at step {trainer.global_step}: loss {means['loss']:.4f}")
            for logger in trainer.loggers:
                logger.log_metrics(row, step=trainer.global_step)

    def _means(self, trainer: pl.Trainer) -> dict[str, float]:
        if "weight" not in self._sums:
            return {
                name: float(trainer.strategy.reduce(total / self._count, reduce_op="mean"))
                for name, total in self._sums.items()
            }
        whole = {name: float(trainer.strategy.reduce(total, reduce_op="sum")) for name, total in self._sums.items()}
        weight = whole.pop("weight")
        return {name: total / weight for name, total in whole.items()}
