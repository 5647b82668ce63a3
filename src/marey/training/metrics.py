"""``metrics.csv``: what a run measured, one row per ``trainer.log_every_n_steps`` optimizer steps.

Losses, rates and counts of a row cover the optimizer steps since the row before it, over all ranks; ranks and
spreads of embeddings are of rank 0's last micro-step. A row cut short by the end of a sitting is written without
starting a new interval and removed by a resume, so a resumed run's rows are those of a run that was never interrupted.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from marey.core.files import file_named, write_text
from marey.training.kinds.base import Consumed, Kind
from marey.training.module import TrainingModule
from marey.training.watch import StepReport, Watch

COLUMNS = (
    "step",
    "epoch",
    "wall_seconds",
    "train/loss",
    "train/invariance",
    "train/sigreg",
    "train/embedding_rank",
    "train/embedding_std",
    "train/feature_rank",
    "train/feature_std",
    "lr",
    "clips_per_second",
    "tokens_per_second",
    "padding_share",
    "data_wait_seconds",
    "same_episode_pairs",
    "skipped_steps",
    "clips_seen",
)
TIME_COLUMNS = ("wall_seconds", "clips_per_second", "samples_per_second", "tokens_per_second", "data_wait_seconds")
"""What differs between two runs of the same experiment."""


class MetricsFile:
    """A CSV that is appended to row by row, each on disk before the next step."""

    def __init__(self, path: Path, columns: tuple[str, ...] = COLUMNS) -> None:
        self.path, self.columns = path, columns

    def start(self, *, after_step: int) -> None:
        """Begin a new file, or keep an existing one's rows up to ``after_step`` (0 keeps none)."""
        kept: list[dict[str, str]] = []
        if after_step > 0 and self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                # A row that a kill cut off has no number of steps, or not all of its columns.
                kept = [
                    row
                    for row in csv.DictReader(file)
                    if None not in row.values() and (row.get("step") or "").isdigit() and int(row["step"]) <= after_step
                ]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        write_text(self.path, text.getvalue())

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row; None is left empty, floats keep all their digits."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        writer.writerow({key: "" if value is None else value for key, value in row.items()})
        with file_named(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(text.getvalue())


class _Sums:
    """Since the last row: plain numbers that are equal on all ranks."""

    def __init__(self) -> None:
        self.steps = self.good_steps = self.clips = self.tokens = self.pairs = self.skipped = 0
        self.loss = self.seconds = self.wait = 0.0
        self.parts: dict[str, float] = {}
        self.numbers: list[float] = []

    def add(self, report: StepReport) -> None:
        self.steps += 1
        self.clips += report.clips
        self.tokens += report.tokens
        self.pairs += report.same_episode_pairs
        self.seconds += report.seconds
        self.wait += report.wait_seconds
        self.skipped += report.skipped
        self.numbers = [a + b for a, b in zip(self.numbers or [0.0] * len(report.numbers), report.numbers, strict=True)]
        if not report.skipped:  # one value that is not finite would hide the rest of the interval
            self.good_steps += 1
            self.loss += report.loss
            for name, value in report.parts.items():
                self.parts[name] = self.parts.get(name, 0.0) + value


class MetricsCallback(pl.Callback):
    """Writes rows, and hands them to the loggers."""

    def __init__(
        self, kind: Kind, file: MetricsFile, *, watch: Watch, ledger: Consumed, every: int, after_step: int
    ) -> None:
        self._kind, self._file, self._watch, self._ledger, self._every = kind, file, watch, ledger, every
        self._after_step = after_step
        self._sums = _Sums()
        self.last_row: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, _pl_module: pl.LightningModule) -> None:
        """Open the file; rows after the restored step go, and so does one that the last stop cut short there."""
        if trainer.is_global_zero:
            cut_short = self._sums.steps > 0  # an interval that is still open has no row of its own yet
            self._file.start(after_step=self._after_step - cut_short)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        _outputs: Any,
        _batch: Any,
        batch_idx: int,
    ) -> None:
        """A row at the first step, at every ``every``-th, and at the last."""
        if not self._watch.stepped(batch_idx):
            return
        report = self._watch.report
        assert report is not None
        self._sums.add(report)
        regular = report.step % self._every == 0 or report.step == 1
        if not regular and self._watch.ending is None:
            return
        assert isinstance(pl_module, TrainingModule)
        looked: dict[str, float] = {}
        if regular:
            # On every rank: where weights are sharded, all must gather them.
            looked = pl_module.with_weights(lambda: self._kind.look(pl_module.objective, step=report.step))
        if trainer.is_global_zero:
            self.last_row = {**self._row(report), **looked}
            self._file.append(self.last_row)
            numbers = {key: value for key, value in self.last_row.items() if value is not None and key != "step"}
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=report.step)
        if regular:
            self._sums = _Sums()

    def _row(self, report: StepReport) -> dict[str, Any]:
        sums = self._sums
        good = sums.good_steps
        seconds = max(sums.seconds, 1e-9)
        unit = self._kind.unit
        return {
            "step": report.step,
            "epoch": report.epoch,
            "wall_seconds": round(self._watch.trained_seconds, 3),
            "train/loss": sums.loss / good if good else math.nan,
            **{f"train/{name}": value / good for name, value in sums.parts.items()},
            "lr": report.lr,
            f"{unit}_per_second": round(sums.clips / seconds, 3),
            "tokens_per_second": round(sums.tokens / seconds, 1),
            "data_wait_seconds": round(sums.wait, 4),
            "skipped_steps": sums.skipped,
            f"{unit}_seen": self._ledger.clips_seen,
            **self._kind.row(report.last, vars(sums)),
        }

    def interval(self) -> dict[str, Any]:
        """The interval that is still open, as plain values, for the checkpoint."""
        return dict(vars(self._sums))

    def go_on(self, interval: Mapping[str, Any]) -> None:
        """Continue an interval that a checkpoint cut."""
        self._sums = _Sums()
        vars(self._sums).update(interval)
        self._sums.parts = dict(self._sums.parts)
        self._sums.numbers = list(self._sums.numbers)
