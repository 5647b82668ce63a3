"""The encoder's kind of run: clips of frames, the invariance objective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from marey.config.schema import EncoderConfig
from marey.core.pixelstats import IMAGENET_MEAN, IMAGENET_STD
from marey.core.tokens import TokenGroup, ViewChunk
from marey.objectives.collapse import embedding_std, rankme
from marey.objectives.registry import build, summary_keys
from marey.training.announce import opening_lines
from marey.training.batchplan import batch_plan, validation_steps
from marey.training.data import build_loader, open_train, open_val, validates_on_training_data
from marey.training.exposure import cut_exposure, per_source, write_exposure
from marey.training.kinds.base import Consumed, Kind, MicroStepRecord
from marey.training.ledger import Ledger
from marey.training.loader import MicroStepLoader
from marey.training.metrics import COLUMNS
from marey.training.online import COLUMNS as PROBE_COLUMNS
from marey.training.online import open_probe
from marey.training.receipt import published_differences


class EncoderKind(Kind):
    """Clips of ``data.train``, planned and opened."""

    name = "encoder"
    unit = "clips"
    columns: tuple[str, ...] = COLUMNS
    validation_columns = ("step", "epoch", "val/loss", "val/invariance", "val/sigreg")
    harmless = (
        "data.num_episodes",
        "loader.micro_batch_size",
        "loader.normalize_on_gpu",
        "probe",
    )
    partition = (
        "loader.batch_size",
        "projector.norm_group",
        "trainer.devices",
        "trainer.num_nodes",
        "trainer.strategy",
    )
    batch_key = "loader.batch_size"
    model_keys = ("frame_stride", "model")
    meaning = (
        "frame_stride",
        "model.attn_mode",
        "model.name",
        "model.patch_size",
        "model.rope_layout",
        "model.tubelet_size",
        "model.use_rope",
    )
    data_facts = ("version", "usable_episodes", "clips_per_epoch")
    summary_keys: ClassVar[Mapping[str, str]] = summary_keys

    def __init__(self, config: EncoderConfig, *, validates: bool) -> None:
        self.config: EncoderConfig = config
        self.validates = validates
        self._data = open_train(config)
        self._val = open_val(config) if validates else None
        self.plan = batch_plan(config, self._data.clips)
        self._probe = open_probe(config)
        if self._probe is not None:
            self.columns = (*COLUMNS, *PROBE_COLUMNS)

    def train_loader(self, *, pin_memory: bool) -> MicroStepLoader:
        """Micro-steps of ``list[ViewChunk]``."""
        assert self.plan.micro_steps_per_epoch is not None
        return build_loader(
            self._data,
            self.config,
            plan=self.plan,
            micro_steps=self.plan.micro_steps_per_epoch,
            pin_memory=pin_memory,
            fixed_epoch=bool(self.config.trainer.overfit_batches),
        )

    def val_loader(self, *, pin_memory: bool) -> MicroStepLoader:
        """The same for validation: one clip an episode, all tokens, views drawn for epoch 0 whatever the epoch."""
        assert self._val is not None
        steps = validation_steps(self.config, self._val.clips, statistic_batch=self.plan.statistic_batch)
        return build_loader(
            self._val,
            self.config,
            plan=self.plan,
            micro_steps=steps,
            pin_memory=pin_memory,
            fixed_epoch=True,
            from_the_top=True,
        )

    def objective(self) -> nn.Module:
        """Encoder, projector and loss."""
        return build(self.config)

    def ledger(self) -> Ledger:
        """Counts of clips."""
        return Ledger(
            self._data.order(self.config, self.plan.statistic_batch),
            sources=len(self._data.sources),
            fixed_epoch=bool(self.config.trainer.overfit_batches),
        )

    def start_exposure(self, run_dir: Path, *, rank: int, ledger: Consumed) -> None:
        """Counts per source are arithmetic: tables of an abandoned future go, and one that a kill cut off is made."""
        assert isinstance(ledger, Ledger)
        assert isinstance(ledger, Ledger)
        if rank == 0:
            cut_exposure(run_dir, step=ledger.optimizer_steps)
            if ledger.optimizer_steps:
                write_exposure(run_dir, step=ledger.optimizer_steps, sources=self._per_source(ledger))

    def move(self, batch: list[ViewChunk], device: torch.device, dtype: torch.dtype) -> list[ViewChunk]:  # noqa: ARG002
        """Patches and positions go to the device; identities stay on the CPU, where they are read."""

        def moved(group: TokenGroup) -> TokenGroup:
            return TokenGroup(*(tensor.to(device, non_blocking=True) for tensor in group))

        return [
            chunk._replace(views_global=moved(chunk.views_global), views_local=moved(chunk.views_local))
            for chunk in batch
        ]

    def check_position(self, batch: list[ViewChunk], *, epoch: int, micro_step: int, rank: int) -> None:
        """The first clip's position must be the loop's."""
        drawn = 0 if self.config.trainer.overfit_batches else epoch
        first = micro_step * self.plan.statistic_batch + rank * self.plan.batch_size
        found = batch[0].clips[0, 3:].tolist()
        if found != [drawn, first]:
            raise RuntimeError(
                f"the loop is at epoch {drawn}, position {first} and the loader delivered epoch {found[0]}, "
                f"position {found[1]}"
            )

    def record(
        self,
        batch: list[ViewChunk],
        output: Any,
        *,
        epoch: int,  # noqa: ARG002
        micro_step: int,
        rank: int,  # noqa: ARG002
    ) -> MicroStepRecord:
        """Which clips they were is in the batch itself."""
        return MicroStepRecord(
            micro_step=micro_step,
            output=output._replace(loss=output.loss.detach()),
            clips=torch.cat([chunk.clips for chunk in batch]),
            replaced=torch.cat([chunk.replaced for chunk in batch]),
            reasons=[reason for chunk in batch for reason in chunk.reasons],
        )

    def validate(
        self,
        objective: nn.Module,
        batch: list[ViewChunk],
        *,
        micro_step: int,
        rank: int,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """The training loss and its parts on validation clips, all tokens."""
        output = objective.forward_train_batch(batch, micro_step=micro_step)  # type: ignore[operator]
        return {"loss": output.loss, **output.parts}

    def counted(self, window: Sequence[MicroStepRecord], *, epoch: int, skipped: bool) -> None:
        """Nothing: the ledger knows."""

    def identity(self, clip: Sequence[int]) -> dict[str, Any]:
        """File, source, episode, step, draw."""
        source, episode, first, epoch, position = clip
        return {
            "file": self._data.file(source, episode),
            "source": source,
            "episode": episode,
            "first_step": first,
            "epoch": epoch,
            "position": position,
        }

    def model_name(self) -> str:
        """Its size's name."""
        return self.config.model.name

    def opening_lines(self) -> Iterator[str]:
        """Sources and steps."""
        yield from opening_lines(self.config, self.plan, self._data, validates=self.validates)
        if self._probe is not None:
            yield f"online probe  {self._probe.describe()}"

    def look(self, objective: nn.Module, *, step: int) -> dict[str, float]:
        """The online probe, at step 1 and at every ``probe.every_n_steps``-th."""
        if self._probe is None or (step != 1 and step % self._probe.every):
            return {}
        return self._probe.look(objective)

    def row(self, record: MicroStepRecord, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Signs of collapse, of rank 0's last micro-step."""
        embeddings, features = record.output.embeddings, record.output.features
        return {
            "train/embedding_rank": None if embeddings is None else float(rankme(embeddings)),
            "train/embedding_std": None if embeddings is None else float(embedding_std(embeddings)),
            "train/feature_rank": None if features is None else float(rankme(features)),
            "train/feature_std": None if features is None else float(embedding_std(features)),
            "padding_share": 0.0,  # the encoder's sequences are grouped by length: nothing is padded
            "same_episode_pairs": sums["pairs"],
        }

    def describe_train(self) -> list[dict[str, Any]]:
        """Stores and what they give."""
        return self._data.describe()

    def describe_data(self) -> dict[str, Any]:
        """Training and validation sources."""
        return {
            "name": self.config.data.name,
            "train": self._data.describe(),
            "val": None if self._val is None else self._val.describe(),
            "val_is_train": None if self._val is None else validates_on_training_data(self.config),
        }

    def describe_batch(self) -> dict[str, Any]:
        """The three numbers that say which experiment a batch is, and how they come about."""
        config, plan = self.config, self.plan
        return {
            "world_size": plan.world_size,
            "batch_size": plan.batch_size,
            "micro_batch_size": config.loader.micro_batch_size or plan.batch_size,
            "accumulate": plan.accumulate,
            "effective_batch": plan.effective_batch,
            "statistic_batch": plan.statistic_batch,
            "norm_group": plan.norm_group,
            "recipe": config.recipe.reference.model_dump(),
        }

    def describe_steps(self) -> dict[str, Any]:
        """How an epoch of clips becomes steps."""
        plan = self.plan
        return {
            "clips_per_epoch": plan.clips,
            "micro_steps_per_epoch": plan.micro_steps_per_epoch,
            "steps_per_epoch": plan.steps_per_epoch,
            "dropped_clips_per_epoch": plan.dropped_clips,
            "limited_clips_per_epoch": plan.limited_clips,
            "total_steps": plan.total_steps,
            "epochs": plan.epochs,
        }

    def describe_consumed(self, ledger: Ledger) -> dict[str, Any]:
        """Counts so far."""
        per_epoch = self.plan.micro_steps_per_epoch
        assert per_epoch is not None
        return {
            "optimizer_steps": ledger.optimizer_steps,
            "micro_steps": ledger.micro_steps,
            "epochs": ledger.micro_steps / per_epoch,
            "clips": ledger.clips_seen,
            "tokens": ledger.tokens,
            "same_episode_pairs": ledger.same_episode_pairs,
            "skipped_steps": ledger.skipped_steps,
            "per_source": self._per_source(ledger),
        }

    def published_differences(self) -> list[dict[str, str]]:
        """From the published code."""
        return published_differences(self.config)

    def preprocessing(self) -> dict[str, Any]:
        """From stored frames to what the encoder takes."""
        model = self.config.model
        rates = {source.rate for source in self._data.sources}
        return {
            "format": 1,
            "mean": list(IMAGENET_MEAN),
            "std": list(IMAGENET_STD),
            "layout": "B,C,T,H,W",
            "num_frames": model.num_frames,
            "frame_stride": self.config.frame_stride,
            "rate": rates.pop() if len(rates) == 1 else None,
            "img_size": model.img_size,
            "patch_size": model.patch_size,
            "tubelet_size": model.tubelet_size,
            "resize": "short side to img_size, bicubic, antialias",
            "crop": "centre",
        }

    def before_checkpoint(self, ledger: Ledger) -> None:
        """Nothing."""

    def after_checkpoint(self, run_dir: Path, ledger: Ledger, *, step: int) -> None:
        """A small table of what each source contributed."""
        write_exposure(run_dir, step=step, sources=self._per_source(ledger))

    def _per_source(self, ledger: Ledger) -> list[dict[str, Any]]:
        names = [source.name for source in self._data.sources]
        return per_source(ledger, names=names, frames_per_clip=self.config.model.num_frames)

    def out_of_memory(self) -> str:
        """Smaller chunks."""
        held = self.config.loader.micro_batch_size or self.plan.batch_size
        return (
            f"the device ran out of memory with {held} clips at a time; a smaller loader.micro_batch_size "
            "(it must divide loader.batch_size) needs less and gives the same results"
        )

    def partition_problem(self, *, old_world: int) -> str | None:  # noqa: ARG002
        """Draws belong to clips: any number of ranks can go on."""
        return None
