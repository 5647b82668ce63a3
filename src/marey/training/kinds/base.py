"""What a kind of run is to the trainer. A new kind is one class here, one objective and one YAML.

The trainer owns steps, ranks, precision, checkpoints, averages, signals and files. A kind owns its data, its
objective, what one micro-step leaves behind, and what metrics and receipt say of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from marey.config.runs import RunConfig
from marey.training.batchplan import BatchPlan
from marey.training.loader import MicroStepLoader


class MicroStepRecord(NamedTuple):
    """What one micro-step of this rank leaves for metrics, receipt and the watch over non-finite values.

    micro_step: within the epoch. output: the objective's, loss detached. clips: int64 ``[B, 5]`` (source, clip within
    the source, where in the clip, epoch, position). replaced: int64 ``[n, 3]``, source index first; reasons: n
    sentences. details: whatever the kind needs to count what reached the optimizer.
    """

    micro_step: int
    output: Any
    clips: Tensor
    replaced: Tensor
    reasons: list[str]
    details: Any = None


class Consumed(Protocol):
    """Counts over all ranks of what a run has consumed; saved with every checkpoint."""

    micro_steps: int
    optimizer_steps: int
    skipped_steps: int
    replaced: list[int]
    """By source."""

    @property
    def clips_seen(self) -> int:
        """Samples of all sources that reached a step."""

    def count(
        self,
        *,
        epoch: int,
        micro_steps: Sequence[int],
        tokens: int,
        replaced: Sequence[int],
        skipped: bool,
        numbers: Sequence[float],
    ) -> int:
        """Add one optimizer step; returns its pairs of clips of one episode. ``numbers``: over all ranks."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a saved state."""
        ...


class Kind(ABC):
    """One kind of run, its data opened. ``config`` may have what the data alone can tell filled in."""

    name: ClassVar[str]
    """In checkpoints and receipts."""
    unit: ClassVar[str]
    """What a batch counts."""
    columns: tuple[str, ...]
    """Of ``metrics.csv``."""
    validation_columns: ClassVar[tuple[str, ...]]
    harmless: ClassVar[tuple[str, ...]]
    """Keys whose change an exact resume accepts without asking, besides the trainer's own."""
    partition: ClassVar[tuple[str, ...]]
    """Keys that say how ranks share one experiment's batches."""
    batch_key: str
    """The key that says how large a rank's batch is."""
    model_keys: ClassVar[tuple[str, ...]]
    """Keys and sections that say what the weights compute."""
    meaning: ClassVar[tuple[str, ...]]
    """Those whose change no weight's shape shows, although other weights would be needed after it."""
    data_facts: ClassVar[tuple[str, ...]]
    """What must be equal in the description of every training source for an exact resume."""
    summary_keys: ClassVar[Mapping[str, str]]
    """Checkpoint key -> what it is for."""
    sums: int = 0
    """How many numbers ``numbers`` gives."""

    config: Any
    plan: BatchPlan
    validates: bool

    @abstractmethod
    def train_loader(self, *, pin_memory: bool) -> MicroStepLoader:
        """Micro-steps of the training data."""

    @abstractmethod
    def val_loader(self, *, pin_memory: bool) -> MicroStepLoader:
        """Micro-steps of the validation data."""

    @abstractmethod
    def objective(self) -> nn.Module:
        """The objective, weights initialised from the seed."""

    @abstractmethod
    def ledger(self) -> Consumed:
        """Counts that begin at nothing."""

    @abstractmethod
    def start_exposure(self, run_dir: Path, *, rank: int, ledger: Consumed) -> None:
        """Before the first step (of this sitting): where the log of what was seen goes."""

    # -- what the training loop asks for

    @abstractmethod
    def move(self, batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
        """The batch on ``device``, for weights of ``dtype``; what is read on the CPU stays there."""

    def payload(self, batch: Any) -> Any:
        """What the objective takes of a batch."""
        return batch

    @abstractmethod
    def check_position(self, batch: Any, *, epoch: int, micro_step: int, rank: int) -> None:
        """Raise RuntimeError where the loader delivered another position than the loop is at."""

    @abstractmethod
    def record(self, batch: Any, output: Any, *, epoch: int, micro_step: int, rank: int) -> MicroStepRecord:
        """What the micro-step just computed leaves behind."""

    @abstractmethod
    def validate(self, objective: nn.Module, batch: Any, *, micro_step: int, rank: int) -> dict[str, Tensor]:
        """Losses of one validation micro-step; with ``weight``, they are sums of which ``weight`` is the count."""

    def numbers(self, window: Sequence[MicroStepRecord]) -> list[float]:
        """``sums`` numbers of one optimizer step on this rank, to be added up over ranks and into metrics."""
        assert self.sums == 0, window
        return []

    def gradient_scale(self, numbers: Sequence[float]) -> float | None:
        """What gradients are multiplied by before clipping, given ``numbers`` over all ranks; None: nothing."""
        assert len(numbers) == self.sums
        return None

    def means(
        self, loss: float, parts: dict[str, float], *, made: int, numbers: Sequence[float]
    ) -> tuple[float, dict[str, float]]:
        """Loss and parts of an optimizer step from their sums over ``made`` micro-steps of all ranks."""
        assert len(numbers) == self.sums
        return loss / made, {name: value / made for name, value in parts.items()}

    @abstractmethod
    def counted(self, window: Sequence[MicroStepRecord], *, epoch: int, skipped: bool) -> None:
        """An optimizer step of this rank was taken, or skipped."""

    @abstractmethod
    def identity(self, clip: Sequence[int]) -> dict[str, Any]:
        """A row of ``MicroStepRecord.clips`` in words."""

    # -- what people and files are told

    @abstractmethod
    def model_name(self) -> str:
        """The model's size in a few words."""

    @abstractmethod
    def opening_lines(self) -> Iterator[str]:
        """Data and steps, then what is unusual about this run."""

    def look(self, objective: nn.Module, *, step: int) -> dict[str, float]:  # noqa: ARG002
        """What a small fixed set says of the weights after optimizer step ``step``, by column of ``metrics.csv``.

        Called on every rank for every row; empty where nothing is due. Nothing of the objective may change.
        """
        return {}

    @abstractmethod
    def row(self, record: MicroStepRecord, sums: Mapping[str, Any]) -> dict[str, Any]:
        """This kind's own columns; ``sums`` are those of the row: clips, tokens, pairs, seconds, numbers."""

    @abstractmethod
    def describe_train(self) -> list[dict[str, Any]]:
        """The training sources, as the receipt has them. Plain values."""

    @abstractmethod
    def describe_data(self) -> dict[str, Any]:
        """Both sides of the data, as the receipt has them."""

    @abstractmethod
    def describe_batch(self) -> dict[str, Any]:
        """The receipt's ``batch``."""

    @abstractmethod
    def describe_steps(self) -> dict[str, Any]:
        """The receipt's ``steps``."""

    @abstractmethod
    def describe_consumed(self, ledger: Any) -> dict[str, Any]:
        """The receipt's ``consumed``."""

    @abstractmethod
    def published_differences(self) -> list[dict[str, str]]:
        """Where this program departs from the reference on purpose: what, published, here, restore."""

    @abstractmethod
    def preprocessing(self) -> dict[str, Any]:
        """What a user of a checkpoint must do to data. Plain values."""

    @abstractmethod
    def before_checkpoint(self, ledger: Any) -> None:
        """On every rank, before a checkpoint is written, and at the end."""

    @abstractmethod
    def after_checkpoint(self, run_dir: Path, ledger: Any, *, step: int) -> None:
        """On rank 0, once a checkpoint is on disk."""

    @abstractmethod
    def out_of_memory(self) -> str:
        """What to do about it: one sentence."""

    @abstractmethod
    def partition_problem(self, *, old_world: int) -> str | None:
        """Why a run of ``old_world`` ranks cannot go on exactly on this many; None: it can."""


def open_kind(config: RunConfig, *, validates: bool) -> Kind:
    """Open the data of ``config`` and plan its steps.

    Raises:
        UserError: data that cannot be opened, or that cannot fill one optimizer step.
    """
    if config.objective == "invariance":
        from marey.training.kinds.encoder import EncoderKind

        return EncoderKind(config, validates=validates)
    from marey.training.kinds.causal import CausalKind

    return CausalKind(config, validates=validates)
