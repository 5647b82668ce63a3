"""The causal kind of run: windows of stored latent video, a program on them, in any batching mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from marey.batching.transport import LatentBatch
from marey.config.causal import CausalConfig
from marey.objectives.video_decoder import step_gradient_scale
from marey.objectives.video_program import VideoProgram
from marey.objectives.video_registry import build_causal, summary_keys
from marey.sampling.planner import PlannedBatch
from marey.training.batchplan import latent_plan, resolve_devices
from marey.training.kinds.base import Consumed, Kind, MicroStepRecord
from marey.training.latent_batch import ReadBatch
from marey.training.latent_exposure import Exposure
from marey.training.latent_ledger import MEASURED, LatentLedger, measure
from marey.training.latent_receipt import (
    latent_preprocessing,
    opening_lines,
    partition_problem,
    reference_differences,
    source_facts,
    validates_on_training_data,
    validation_facts,
)
from marey.training.latents import (
    LatentSteps,
    Walk,
    build_reader,
    latent_channels,
    open_streams,
    resolve_data,
    text_encoder,
)
from marey.training.loader import MicroStepLoader
from marey.training.workers import LATENT_MODULES

OWN = ("total", "elements", "tokens_seen", "pairs", "pairs_seen")
"""Numbers of a step, before those measured by source."""


class CausalKind(Kind):
    """Windows of ``data.train`` or ``data.sources``, planned and opened."""

    name = "causal"
    unit = "samples"
    columns = (
        "step",
        "epoch",
        "wall_seconds",
        "train/loss",
        "train/flow",
        "lr",
        "samples_per_second",
        "tokens_per_second",
        "padding_share",
        "attention_utilisation",
        "data_wait_seconds",
        "skipped_steps",
        "samples_seen",
        "tokens_seen",
    )
    validation_columns = ("step", "epoch", "val/loss")
    harmless = (
        "data.batching.max_tokens",
        "data.check_files",
        "data.num_episodes",
        "data.val_batch_size",
        "data.verify_sha256",
    )
    partition = ("data.train_batch_size", "trainer.devices", "trainer.num_nodes", "trainer.strategy")
    model_keys = ("model", "program", "data.text.encoder")
    meaning = (
        "data.text.encoder",
        "model.channels",
        "model.patch",
        "model.patch_t",
        "program.name",
        "program.visibility",
    )
    data_facts = ("version", "windows")
    summary_keys: ClassVar[Mapping[str, str]] = summary_keys

    def __init__(self, config: CausalConfig, *, validates: bool) -> None:
        self.validates = validates
        world = resolve_devices(config.trainer) * config.trainer.num_nodes
        resolved = config.model_copy(update={"data": resolve_data(config.data)})
        self.streams = open_streams(resolved, world=world, validates=validates)
        self.planner = self.streams.counting
        sources = self.streams.sources
        drawn = [source for source in sources.train if source.weight > 0]
        channels = latent_channels(config, [*drawn, *(sources.val if validates else [])])
        model = config.model.model_copy(update={"channels": channels})
        self.config: CausalConfig = config.model_copy(update={"model": model})
        self.text = text_encoder(config)
        filled = config.data.batching.fill_tokens is not None
        self.batch_key = "data.batching.fill_tokens" if filled else "data.train_batch_size"
        self.counts = self.planner.counts(0)
        self.plan = latent_plan(
            self.config,
            draws=self.counts.drawn,
            dropped=self.counts.dropped,
            micro_steps=self.counts.micro_steps,
            world_size=world,
            planned=self.counts.planned,
        )
        self.names = self.planner.windows.names
        self.sums = len(OWN) + len(self.names) * len(MEASURED)
        self._fixed = bool(config.trainer.overfit_batches)
        assert self.plan.micro_steps_per_epoch is not None
        self._positions = Walk(self.planner)
        self._steps = LatentSteps(
            self.streams.train,
            per_epoch=self.plan.micro_steps_per_epoch,
            fixed_epoch=self._fixed,
            walk=self._positions,
        )
        self._program: VideoProgram | None = None
        self._exposure = Exposure(self.planner, model, config.program)
        self._consumed: Any = None
        # Read once, before anything is trained: a record that cannot be read is refused here, not at a checkpoint.
        self._preprocessing = latent_preprocessing(self.config, self.streams.sources.train, self.text)

    # -- loaders, objective, counts

    def _loader(self, steps: LatentSteps, micro_steps: int, *, pin_memory: bool, top: bool) -> MicroStepLoader:
        dataset, collate = build_reader(self.config)
        return MicroStepLoader(
            dataset,
            steps,
            config=self.config.loader,
            micro_steps=micro_steps,
            collate=collate,
            preload=LATENT_MODULES,
            pin_memory=pin_memory,
            from_the_top=top,
        )

    def train_loader(self, *, pin_memory: bool) -> MicroStepLoader:
        """Micro-steps of ``ReadBatch``."""
        assert self.plan.micro_steps_per_epoch is not None
        return self._loader(self._steps, self.plan.micro_steps_per_epoch, pin_memory=pin_memory, top=False)

    def val_loader(self, *, pin_memory: bool) -> MicroStepLoader:
        """The same held-out windows in order, each once, whatever the epoch."""
        assert self.streams.val is not None
        steps = self.streams.val.planner.micro_steps(0)
        return self._loader(
            LatentSteps(self.streams.val, per_epoch=steps, fixed_epoch=True), steps, pin_memory=pin_memory, top=True
        )

    def objective(self) -> nn.Module:
        """The program, weights initialised from the seed."""
        channels = self.config.model.channels
        assert channels is not None
        self._program = build_causal(
            self.config,
            channels=channels,
            text_channels=None if self.text is None else self.text.width,
            blank_text=self.text.blank() if self.config.program.text_dropout > 0 else None,
        )
        return self._program

    def _ledger(self) -> LatentLedger:
        assert self.plan.micro_steps_per_epoch is not None
        return LatentLedger(
            self.planner,
            self.streams.shares,
            own=len(OWN),
            per_epoch=self.plan.micro_steps_per_epoch,
            fixed_epoch=self._fixed,
            walk=self._positions,
        )

    def ledger(self) -> LatentLedger:
        """Counts by source."""
        return self._ledger()

    def start_exposure(self, run_dir: Path, *, rank: int, ledger: Consumed) -> None:
        """Counts by clip go to ``exposure/``, one file a rank and span of micro-steps."""
        self._exposure.start(run_dir, rank=rank, micro_steps=ledger.micro_steps)
        self._consumed = ledger

    # -- what the training loop asks for

    def payload(self, batch: ReadBatch) -> LatentBatch:
        """The batch without what the reader said of it."""
        return batch.batch

    def move(self, batch: ReadBatch, device: torch.device, dtype: torch.dtype) -> ReadBatch:
        """Latents on the device, in the precision of the weights."""
        latents = batch.batch.to(device, non_blocking=True)
        return ReadBatch(replace(latents, latents=latents.latents.to(dtype)), batch.replaced)

    def _planned(self, epoch: int, micro_step: int, rank: int) -> tuple[int, PlannedBatch]:
        drawn, place = self._positions.at(self._steps.overall(epoch, micro_step))
        return drawn, self.planner.batch_at(drawn, place, rank)

    def check_position(self, batch: ReadBatch, *, epoch: int, micro_step: int, rank: int) -> None:
        """Every draw must be the planned one."""
        drawn, planned = self._planned(epoch, micro_step, rank)
        wanted = [
            (drawn, position, repeat)
            for position, repeat in zip(planned.position.tolist(), planned.repeat.tolist(), strict=True)
        ]
        if list(batch.batch.draws) != wanted:
            raise RuntimeError(f"the loop is at draws {wanted} and the loader delivered {list(batch.batch.draws)}")

    def record(self, batch: ReadBatch, output: Any, *, epoch: int, micro_step: int, rank: int) -> MicroStepRecord:
        """Measure what the model saw: the batch's own identities and lengths."""
        assert self._program is not None
        drawn, planned = self._planned(epoch, micro_step, rank)
        supervised = self._program.supervised_frames(batch.batch)
        measured = self._exposure.measure(batch.batch, planned, batch.replaced, supervised=supervised)
        columns = (planned.source, measured.rows, measured.starts, np.full_like(planned.position, drawn))
        return MicroStepRecord(
            micro_step=micro_step,
            output=output._replace(loss=output.loss.detach()),
            clips=torch.from_numpy(np.stack([*columns, planned.position], axis=1).astype(np.int64)),
            replaced=torch.tensor(measured.stand_ins, dtype=torch.int64).reshape(-1, 3),
            reasons=[item.reason for _, item in batch.replaced],
            details=measured,
        )

    def validate(self, objective: nn.Module, batch: ReadBatch, *, micro_step: int, rank: int) -> dict[str, Tensor]:
        """Sum of the loss over supervised elements, each window with random tensors of its own."""
        assert isinstance(objective, VideoProgram)
        assert self.streams.val is not None
        output = objective.forward_validation_batch(batch.batch)
        counts = len(self.streams.val.planner.batch_at(0, micro_step, rank).position) > 0
        real = torch.float32 if output.total.device.type == "mps" else torch.float64
        total = output.total.to(real)
        return {"loss": total * counts, "weight": torch.full_like(total, output.elements * counts)}

    def numbers(self, window: Sequence[MicroStepRecord]) -> list[float]:
        """``OWN``, then ``MEASURED`` by source."""
        outputs = [record.output for record in window]
        own = [float(sum(float(getattr(output, name)) for output in outputs)) for name in OWN]
        return own + measure([seen for record in window for seen in record.details.seen], self.names)

    def gradient_scale(self, numbers: Sequence[float]) -> float | None:
        """Under ``normalize_over: step`` backward passes carried sums: they are divided here."""
        if self.config.loss.normalize_over == "microbatch":
            return None
        return step_gradient_scale(
            elements=round(numbers[1]), world=self.plan.world_size, accumulate=self.plan.accumulate
        )

    def means(
        self, loss: float, parts: dict[str, float], *, made: int, numbers: Sequence[float]
    ) -> tuple[float, dict[str, float]]:
        """``loss`` is what was minimised; ``flow`` is always the mean over supervised elements of the step."""
        flow = numbers[0] / numbers[1]
        assert parts.keys() == {"flow"}
        return (loss / made if self.config.loss.normalize_over == "microbatch" else flow), {"flow": flow}

    def counted(self, window: Sequence[MicroStepRecord], *, epoch: int, skipped: bool) -> None:
        """Every appearance of every clip, by rank; draws that no step takes are rank 0's to count."""
        for record in window:
            self._exposure.count(
                record.details, ledger=self._consumed, epoch=epoch, micro_step=record.micro_step, skipped=skipped
            )

    def identity(self, clip: Sequence[int]) -> dict[str, Any]:
        """File, source, clip, window, draw."""
        source, row, start, epoch, position = clip
        found = self.planner.windows.sources[source].manifest.clip(row)
        return {
            "file": found.path,
            "source": self.names[source],
            "clip_id": found.clip_id,
            "start": start,
            "epoch": epoch,
            "position": position,
        }

    # -- what people and files are told

    def model_name(self) -> str:
        """Width, depth, heads."""
        model = self.config.model
        return f"{model.hidden} wide, {model.layers} layers, {model.heads} heads, {self.config.program.name}"

    def opening_lines(self) -> Iterator[str]:
        """Sources, batching and steps."""
        yield from opening_lines(self.config, self.plan, self.streams, self.counts, validates=self.validates)

    def row(self, record: MicroStepRecord, sums: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """What the heavy layers saw that was not needed."""
        _, _, tokens_seen, pairs, pairs_seen = sums["numbers"][: len(OWN)]
        # Counted, since microbatches that are filled to a budget differ.
        samples = sum(sums["numbers"][len(OWN) + MEASURED.index("reached") :: len(MEASURED)])
        return {
            "samples_per_second": round(samples / max(sums["seconds"], 1e-9), 3),
            "padding_share": 1 - sums["tokens"] / tokens_seen,
            "attention_utilisation": pairs / pairs_seen,
            "tokens_seen": self._consumed.tokens,
        }

    def describe_train(self) -> list[dict[str, Any]]:
        """Manifests and what they give."""
        return source_facts(self.streams.sources.train, self.planner, self.streams.shares)

    def describe_data(self) -> dict[str, Any]:
        """Training and validation sources."""
        val = self.streams.val
        return {
            "name": self.config.data.name,
            "weights": self.config.data.weights,
            "train": self.describe_train(),
            "val": None if val is None else validation_facts(self.streams.sources.val, val),
            "val_is_train": None if val is None else validates_on_training_data(self.config.data),
        }

    def describe_batch(self) -> dict[str, Any]:
        """How samples become a step."""
        plan, data = self.plan, self.config.data
        return {
            "world_size": plan.world_size,
            "batch_size": plan.batch_size,
            "accumulate": plan.accumulate,
            "effective_batch": plan.effective_batch,
            "statistic_batch": plan.statistic_batch,
            "norm_group": None,
            **data.batching.model_dump(mode="json"),
            "shape_bucketed_batching": data.shape_bucketed_batching,
            "normalize_over": self.config.loss.normalize_over,
            "noise": self.config.noise,
            "recipe": self.config.recipe.reference.model_dump(),
        }

    def describe_steps(self) -> dict[str, Any]:
        """How an epoch of draws becomes steps; counts are of the first epoch."""
        plan = self.plan
        return {
            "clips_per_epoch": plan.clips,
            "micro_steps_per_epoch": plan.micro_steps_per_epoch,
            "steps_per_epoch": plan.steps_per_epoch,
            "dropped_clips_per_epoch": plan.dropped_clips,
            "tail_repeats_per_epoch": self.counts.repeated,
            "limited_clips_per_epoch": plan.limited_clips,
            "total_steps": plan.total_steps,
            "epochs": plan.epochs,
        }

    def describe_consumed(self, ledger: LatentLedger) -> dict[str, Any]:
        """Counts so far; shares are of the samples that reached the optimizer."""
        per_source = ledger.per_source(self.names)
        return {
            "optimizer_steps": ledger.optimizer_steps,
            "micro_steps": ledger.micro_steps,
            "epochs": ledger.micro_steps / self.counts.micro_steps,
            "clips": ledger.clips_seen,
            "tokens": ledger.tokens,
            "skipped_steps": ledger.skipped_steps,
            **{key: sum(source[key] for source in per_source) for key in ("repeats", "tail_repeats", "dropped")},
            "per_source": per_source,
        }

    def published_differences(self) -> list[dict[str, str]]:
        """From the reference method."""
        return reference_differences(self.config)

    def preprocessing(self) -> dict[str, Any]:
        """Which latents and texts the weights understand."""
        return self._preprocessing

    def before_checkpoint(self, ledger: LatentLedger) -> None:
        """Write what was seen since the last one."""
        self._exposure.flush(ledger.micro_steps)

    def after_checkpoint(self, run_dir: Path, ledger: LatentLedger, *, step: int) -> None:
        """Nothing: every rank has written its own."""

    def out_of_memory(self) -> str:
        """Smaller forward passes."""
        batching = self.config.data.batching
        if batching.fill_tokens is not None:
            return (
                f"the device ran out of memory in a microbatch of up to {batching.fill_tokens} video tokens; "
                "data.batching.max_tokens bounds those of a forward pass and gives the same results"
            )
        if batching.mode == "packed":
            return (
                f"the device ran out of memory with {self.plan.batch_size} samples; data.batching.max_tokens bounds "
                "the tokens of a forward pass and gives the same results"
            )
        return (
            f"the device ran out of memory with {self.plan.batch_size} samples at a time; lower "
            "data.train_batch_size and raise accumulate_grad_batches, or set data.batching.mode=packed with "
            "data.batching.max_tokens"
        )

    def partition_problem(self, *, old_world: int) -> str | None:
        """Only draws that belong to samples, and one division a step, survive another number of ranks."""
        return partition_problem(self.config, self.planner, old_world=old_world, world=self.plan.world_size)
