"""What a run writes about itself: the ``marey`` entry of its checkpoints, its receipt, its exposure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn

from marey import __version__
from marey.config.schema import describe
from marey.core.errors import UserError
from marey.core.files import read_seal
from marey.training.again import Again, launcher_note
from marey.training.attempts import earlier_sittings
from marey.training.averaging import Averaging
from marey.training.console import validation_due
from marey.training.folders import checkpoint_name, listed_hash, size_of
from marey.training.kinds.base import Consumed, Kind
from marey.training.metrics import MetricsCallback
from marey.training.receipt import Receipt, Status, open_receipt
from marey.training.resume import Start
from marey.training.signals import ABORTED
from marey.training.watch import Watch


class Record:
    """Keeps the receipt (on rank 0) and completes checkpoints (on all ranks alike)."""

    def __init__(
        self,
        kind: Kind,
        *,
        run_dir: Path,
        checkpoint_dir: Path,
        ledger: Consumed,
        watch: Watch,
        metrics: MetricsCallback,
        averaging: Averaging | None,
        again: Again,
        say: Callable[[str], None],
    ) -> None:
        self.receipt: Receipt | None = None
        self.newest: Path | None = None
        """The checkpoint written last."""
        self.saved: list[str] = []
        """Names of the checkpoints that this run wrote and kept."""
        self._kind, self._config, self._plan = kind, kind.config, kind.plan
        self._run_dir, self._checkpoint_dir = run_dir, checkpoint_dir
        self._ledger, self._watch, self._metrics, self._averaging = ledger, watch, metrics, averaging
        self._again, self._say = again, say

    def open(
        self,
        module: nn.Module,
        *,
        differences: list[str],
        command: list[str],
        start: Start | None,
        resumed_from: dict[str, Any] | None,
    ) -> None:
        """Write the receipt of a sitting that starts.

        Raises:
            UserError: the folder holds the records of another run.
        """
        earlier = earlier_sittings(
            self._run_dir,
            config=describe(self._config),
            step=None if start is None else start.step,
            origin=None if start is None else start.receipt,
        )
        self.receipt = open_receipt(
            self._kind,
            run_dir=self._run_dir,
            checkpoint_dir=self._checkpoint_dir,
            differences=differences,
            command=command,
            parameters=count_parameters(module),
            checkpoint_keys=self._keys(),
            resumed_from=resumed_from,
            from_step=0 if start is None else start.step,
            earlier=earlier,
            resume_command=self._again.command(None),
        )
        if start is not None:
            self._add_unlisted(start)
        self._refresh()
        self.receipt.write()

    def _add_unlisted(self, start: Start) -> None:
        """List the checkpoint to go on from, where a kill came between its last byte and the receipt's."""
        assert self.receipt is not None
        entries, settings = self.receipt.content["checkpoints"], self._config.checkpoint
        name = checkpoint_name(
            settings.filename, epoch=start.epoch, step=start.step, insert_names=settings.auto_insert_metric_name
        )
        path = self._checkpoint_dir / name
        same = path.exists() and start.path.exists() and path.samefile(start.path)
        if same and all(entry["step"] != start.step for entry in entries):
            entries.append(_entry(path, step=start.step, epoch=start.epoch))

    def complete(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint what is this program's own. Plain values and tensors only."""
        config, plan = self._config, self._plan
        ema = self._averaging.ema if self._averaging is not None else None
        self._kind.before_checkpoint(self._ledger)
        if ema is not None:
            checkpoint[config.ema.save_key] = ema.state_dict()
        self._refresh()
        checkpoint["marey"] = {
            "format": 1,
            "kind": self._kind.name,
            "version": __version__,
            "config": describe(config),
            "receipt": self.receipt.content if self.receipt is not None else {},
            "preprocessing": self._kind.preprocessing(),
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "micro_step": trainer.fit_loop.epoch_loop.batch_idx + 1,
            "world_size": plan.world_size,
            "effective_batch": plan.effective_batch,
            "statistic_batch": plan.statistic_batch,
            "norm_group": plan.norm_group,
            "ema": None if ema is None else ema.describe(),
            "keys": self._keys(),
            "resume": {
                "consumed": self._ledger.state_dict(),
                "interval": self._metrics.interval(),
                "trained_seconds": self._watch.trained_seconds,
                "saved": list(self.saved),
                "skipped_in_a_row": self._watch.skipped_in_a_row,
                "validation_due": self._kind.validates and (self._watch.broke_off or validation_due(trainer)),
            },
        }

    def written(self, path: Path, *, last: Path, step: int, epoch: int, removed: list[Path]) -> None:
        """A checkpoint is on disk, and old ones are about to go: receipt and exposure follow.

        ``last`` is the name to go on from: ``last.ckpt`` is there whatever moment a kill finds.
        """
        assert self.receipt is not None
        self.newest = path
        self.receipt.content["resume_command"] = self._again.command(last)
        gone = {str(old) for old in removed}
        entries = self.receipt.content["checkpoints"]
        entries[:] = [entry for entry in entries if entry["path"] != str(path)]
        for entry in entries:
            if entry["path"] in gone:
                entry["removed"] = True
        entries.append(_entry(path, step=step, epoch=epoch))
        self._refresh()
        self.receipt.write()
        self._kind.after_checkpoint(self._run_dir, self._ledger, step=step)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Whatever goes wrong, the receipt says so."""
        try:
            yield
        except UserError as error:
            self.close("refused", " ".join(str(error).split()))
            raise
        except KeyboardInterrupt:
            self.close("failed", ABORTED)
            raise
        except BaseException as error:
            self.close("failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
            raise

    def close(self, status: Status, sentence: str) -> None:
        """Say how this sitting ended; a disk that cannot take it must not hide how that was."""
        if self.receipt is None:
            return
        self._refresh()
        try:
            self.receipt.close(status, sentence)
        except OSError as error:
            self._say(f"note          {self.receipt.path} cannot be written ({error.strerror or error})")

    def say_again(self) -> None:
        """Print the command that goes on with the run."""
        line = None if self.receipt is None else self.receipt.content["resume_command"]
        if line is not None:
            note = launcher_note()
            self._say("resume with" + ("" if note is None else f" ({note})"))
            self._say(f"    {line}")

    def _refresh(self) -> None:
        if self.receipt is None:
            return
        self.receipt.content["consumed"] = self._kind.describe_consumed(self._ledger)
        self.receipt.content["attempts"][-1]["to_step"] = self._ledger.optimizer_steps
        if self._averaging is not None and self._averaging.ema is not None:
            self.receipt.content["ema"]["updates"] = self._averaging.ema.updates

    def _keys(self) -> dict[str, str]:
        ema = self._config.ema
        said = self._kind.summary_keys
        average = {ema.save_key: said["state_dict_ema"]} if ema.enabled else {}
        return {"state_dict": said["state_dict"], **average}


def _entry(path: Path, *, step: int, epoch: int) -> dict[str, Any]:
    """A checkpoint as the receipt lists it."""
    status = path.stat()
    written = datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="seconds")
    seal = listed_hash(path) if path.is_dir() else read_seal(path)
    facts = {"bytes": size_of(path), "sha256": seal, "written": written}
    return {"path": str(path), "step": step, "epoch": epoch, **facts}


def count_parameters(module: nn.Module) -> dict[str, int]:
    """Trainable parameters of each top-level module that has any, and ``total``."""
    counts = {
        name: sum(p.numel() for p in child.parameters() if p.requires_grad) for name, child in module.named_children()
    }
    counts = {name: count for name, count in counts.items() if count}
    return {**counts, "total": sum(counts.values())}
