"""What a run writes about itself: the ``marey`` entry of its checkpoints, its receipt, its exposure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn

from marey import __version__
from marey.config.schema import describe
from marey.core.errors import UserError
from marey.training.averaging import Averaging
from marey.training.kinds.base import Consumed, Kind
from marey.training.metrics import MetricsCallback
from marey.training.receipt import Receipt, Status, now, open_receipt
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
    ) -> None:
        self.receipt: Receipt | None = None
        self.newest: Path | None = None
        """The checkpoint written last."""
        self.saved: list[str] = []
        """Names of the checkpoints that this run wrote and kept."""
        self._kind, self._config, self._plan = kind, kind.config, kind.plan
        self._run_dir, self._checkpoint_dir = run_dir, checkpoint_dir
        self._ledger, self._watch, self._metrics, self._averaging = ledger, watch, metrics, averaging

    def open(
        self,
        module: nn.Module,
        *,
        differences: list[str],
        command: list[str],
        resumed_from: dict[str, Any] | None,
    ) -> None:
        """Write the receipt of a run that starts."""
        self.receipt = open_receipt(
            self._kind,
            run_dir=self._run_dir,
            checkpoint_dir=self._checkpoint_dir,
            differences=differences,
            command=command,
            parameters=count_parameters(module),
            checkpoint_keys=self._keys(),
            resumed_from=resumed_from,
        )
        self._refresh()
        self.receipt.write()

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
            },
        }

    def written(self, path: Path, *, step: int, epoch: int, size: int, removed: list[Path]) -> None:
        """A checkpoint is on disk, and old ones may be gone: receipt and exposure follow."""
        assert self.receipt is not None
        self.newest = path
        gone = {str(old) for old in removed}
        entries = self.receipt.content["checkpoints"]
        entries[:] = [entry for entry in entries if entry["path"] != str(path)]
        for entry in entries:
            if entry["path"] in gone:
                entry["removed"] = True
        entries.append({"path": str(path), "step": step, "epoch": epoch, "bytes": size, "written": now()})
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
        """Say how the run ended."""
        if self.receipt is not None:
            self._refresh()
            self.receipt.close(status, sentence)

    def _refresh(self) -> None:
        if self.receipt is None:
            return
        self.receipt.content["consumed"] = self._kind.describe_consumed(self._ledger)
        if self._averaging is not None and self._averaging.ema is not None:
            self.receipt.content["ema"]["updates"] = self._averaging.ema.updates

    def _keys(self) -> dict[str, str]:
        ema = self._config.ema
        said = self._kind.summary_keys
        average = {ema.save_key: said["state_dict_ema"]} if ema.enabled else {}
        return {"state_dict": said["state_dict"], **average}


def count_parameters(module: nn.Module) -> dict[str, int]:
    """Trainable parameters of each top-level module that has any, and ``total``."""
    counts = {
        name: sum(p.numel() for p in child.parameters() if p.requires_grad) for name, child in module.named_children()
    }
    counts = {name: count for name, count in counts.items() if count}
    return {**counts, "total": sum(counts.values())}
