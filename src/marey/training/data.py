"""From the configuration's paths to micro-steps: sources, the clips they give, the order of every epoch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marey.config.schema import EncoderConfig, SourceConfig
from marey.core.errors import UserError
from marey.core.tokens import ViewChunk
from marey.pixels.dataset import ClipDataset, build_train_dataset, collate
from marey.pixels.digits import demo_source
from marey.pixels.episodes import EpisodeSource
from marey.pixels.open import STALL_S, open_source
from marey.sampling.order import Draw, EpochPlan, MicroBatchSampler, rank_positions
from marey.training.batchplan import BatchPlan
from marey.training.loader import MicroStepLoader
from marey.training.workers import CLIP_MODULES

DEMO = "demo:"
DECODERS_IN_A_ROW = 4
"""How many of them may hang, one after another, within loader.timeout."""


@dataclass(frozen=True)
class ClipData:
    """The clips of ``data.train`` or ``data.val``."""

    sources: list[EpisodeSource]
    dataset: ClipDataset
    clips_per_video: list[int]

    @property
    def clips(self) -> int:
        """Clips of one epoch, nothing dropped."""
        return sum(n * k for n, k in zip(self.dataset.sizes, self.clips_per_video, strict=True))

    def order(self, config: EncoderConfig, statistic_batch: int) -> EpochPlan:
        """The order of its epochs."""
        return EpochPlan(
            self.dataset.sizes,
            self.clips_per_video,
            seed=config.seed,
            statistic_batch=statistic_batch,
            episode_distinct=config.loader.episode_distinct,
        )

    def file_of(self, draw: Draw) -> str:
        """The video file behind a draw, for messages."""
        return self.file(draw.source, int(self.dataset.indexes[draw.source].episodes[draw.episode]))

    def file(self, source: int, episode: int) -> str:
        """The video file of an episode of a source, for messages."""
        opened = self.sources[source]
        return f"{opened.files[episode]} ({opened.name}, episode {episode})"

    def describe(self) -> list[dict[str, Any]]:
        """What the receipt says of each source. Plain values."""
        return [
            {
                "name": source.name,
                "path": source.path,
                "version": source.version,
                "rate": source.rate,
                "episodes": len(source.lengths),
                "frames": int(source.lengths.sum()),
                "usable_episodes": len(index),
                "dropped_short": index.dropped_short,
                "padded_short": index.padded_short,
                "frame_stride": index.frame_stride,
                "clips_per_video": per_video,
                "clips_per_epoch": len(index) * per_video,
                "refused": [str(refusal) for refusal in getattr(source, "refused", [])],
            }
            for source, index, per_video in zip(self.sources, self.dataset.indexes, self.clips_per_video, strict=True)
        ]


def open_train(config: EncoderConfig) -> ClipData:
    """The training clips.

    Raises:
        UserError: a source that cannot be opened, or has no episode long enough.
    """
    return _open(config, config.data.train, clips_per_video=None)


def open_val(config: EncoderConfig) -> ClipData:
    """The validation clips: one per episode, with all their tokens. ``data.val`` left null is ``data.train``.

    Raises:
        UserError: as ``open_train``.
    """
    # Tokens are dropped in training alone: whatever evaluates sees all of them.
    whole = config.model.model_copy(update={"token_drop_rate": 0.0})
    config = config.model_copy(update={"model": whole})
    return _open(config, config.data.val if config.data.val is not None else config.data.train, clips_per_video=1)


def validates_on_training_data(config: EncoderConfig) -> bool:
    """Whether validation would look at what training sees."""
    if config.data.val is None or config.data.val == config.data.train:
        return True
    train = {_resolved(entry.path) for entry in _entries(config, config.data.train)}
    return any(_resolved(entry.path) in train for entry in _entries(config, config.data.val))


class ClipSteps:
    """Draws of clips, micro-step by micro-step; ``fixed_epoch`` repeats those of epoch 0 in every epoch."""

    batch_key = "loader.micro_batch_size"

    def __init__(self, data: ClipData, config: EncoderConfig, plan: BatchPlan, *, fixed_epoch: bool) -> None:
        self._order = data.order(config, plan.statistic_batch)
        self._data, self._world, self._fixed_epoch = data, plan.world_size, fixed_epoch
        self._batch = config.loader.batch_size
        self._micro_batch = config.loader.micro_batch_size or config.loader.batch_size
        self.chunks = self._batch // self._micro_batch

    def requests(self, epoch: int, micro_step: int, rank: int) -> list[list[Draw]]:
        """The draws of one micro-step, ``loader.micro_batch_size`` at a time."""
        return list(
            MicroBatchSampler(
                self._order,
                epoch=0 if self._fixed_epoch else epoch,
                first_micro_step=micro_step,
                micro_steps=1,
                batch=self._batch,
                micro_batch=self._micro_batch,
                world=self._world,
                rank=rank,
            )
        )

    def files(self, epoch: int, micro_step: int, rank: int, chunk: int) -> list[str]:
        """The video files of one chunk."""
        first = rank_positions(micro_step, batch=self._batch, world=self._world, rank=rank).start
        start = first + chunk * self._micro_batch
        draws = self._order.draws(0 if self._fixed_epoch else epoch, start, start + self._micro_batch)
        return [self._data.file_of(draw) for draw in draws]

    def assemble(self, chunks: list[ViewChunk]) -> list[ViewChunk]:
        """A micro-step is the list of its chunks."""
        return chunks


def build_loader(
    data: ClipData,
    config: EncoderConfig,
    *,
    plan: BatchPlan,
    micro_steps: int,
    pin_memory: bool,
    fixed_epoch: bool,
    from_the_top: bool = False,
) -> MicroStepLoader:
    """Micro-steps of ``data`` (``list[ViewChunk]``), of rank 0 until the loader's ``rank`` is set."""
    return MicroStepLoader(
        data.dataset,
        ClipSteps(data, config, plan, fixed_epoch=fixed_epoch),
        config=config.loader,
        micro_steps=micro_steps,
        collate=collate,
        preload=CLIP_MODULES,
        pin_memory=pin_memory,
        from_the_top=from_the_top,
    )


def _open(config: EncoderConfig, data: str | list[SourceConfig], *, clips_per_video: int | None) -> ClipData:
    entries = _entries(config, data)
    sources = [
        open_source(
            _resolved(entry.path),
            name=entry.name,
            video_rate=config.data.video_rate,
            video_episode_length=config.data.video_episode_length,
            read_stall_s=_read_stall_s(config.loader.timeout),
        )
        for entry in entries
    ]
    dataset = build_train_dataset(config, sources, data=entries)
    per_video = dataset.clips_per_video if clips_per_video is None else [clips_per_video] * len(sources)
    return ClipData(sources=sources, dataset=dataset, clips_per_video=per_video)


def _read_stall_s(timeout: int) -> float:
    """A decoder that hangs is stopped, and its clip replaced, well before the loader gives up on the batch."""
    return min(STALL_S, timeout / DECODERS_IN_A_ROW) if timeout else STALL_S


def _entries(config: EncoderConfig, data: str | list[SourceConfig]) -> list[SourceConfig]:
    if isinstance(data, str):
        return [SourceConfig(path=data, name=config.data.name)]
    if not data:
        raise UserError("data.train is an empty list; name at least one source, as in data.train=STORE.lance")
    return data


def _resolved(path: str) -> str:
    """``demo:train`` and ``demo:heldout`` are built on first use; every other path is itself."""
    if path.startswith(DEMO):
        return str(demo_source(path.removeprefix(DEMO)))
    return str(Path(path).expanduser())
