"""The causal latent-video run's configuration, typed (``conf/causal_video.yaml`` holds the defaults).

Sections shared with the encoder (trainer, optimizer, schedule, EMA, checkpoint, resume) are the encoder's
own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from marey.config.schema import (
    CheckpointConfig,
    EmaConfig,
    Fraction,
    NonNegativeInt,
    OptimizerConfig,
    PadShort,
    PositiveInt,
    RecipeConfig,
    ResumeConfig,
    SchedulerConfig,
    Section,
    TrainerConfig,
    WandbConfig,
    WeightDecayScheduleConfig,
)
from marey.core.errors import nearest

DEMO = "demo:"
"""What begins the name of an embedded set: ``demo:train``."""
MODES = ("strict", "padded", "bucket", "packed")
Positive = Annotated[float, Field(gt=0)]
IntPair = Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)]  # a list from YAML


class LatentLoaderConfig(Section):
    """How samples reach the model."""

    num_workers: NonNegativeInt = Field(description="loader processes per rank")
    persistent_workers: bool = Field(description="keep loader processes between epochs (ignored with 0 workers)")
    prefetch_factor: PositiveInt | None = Field(description="microbatches each worker prepares ahead")
    pin_memory: bool = Field(description="page-locked host memory (only where there is an accelerator)")
    timeout: NonNegativeInt = Field(
        description="seconds without a batch before the run says which file stalls (0: never)"
    )


class BatchingConfig(Section):
    """How samples share a forward pass. None of it adds a parameter or a checkpoint key."""

    mode: Literal["strict", "padded", "bucket", "packed"] = Field(
        description="strict: equal shapes, stacked; padded: to the longest; bucket: pools sorted by length, then "
        "padded; packed: valid tokens only"
    )
    bucket_pool_size: PositiveInt = Field(description="samples per rank sorted together, in whole microbatches")
    bucket_order: Literal["shuffled", "sorted"] = Field(
        description="order of a pool's microbatches: keyed, or ascending in length"
    )
    pad_to_multiple_of: PositiveInt = Field(description="latent frames: capacity is rounded up to a multiple")
    drop_last_train: bool = Field(
        description="draws that fill no whole optimizer step: dropped, or (false) completed by repeats; both counted"
    )
    max_tokens: PositiveInt | None = Field(
        description="video tokens of one forward pass, packed only; the batch is cut in order, loss and gradient stay"
    )
    # These two have defaults, so that configurations inside older checkpoints stay readable.
    fill_tokens: PositiveInt | None = Field(
        default=None,
        description="packed only: each microbatch is filled up to so many video tokens (text is not counted), in place "
        "of data.train_batch_size samples; null: counted in samples",
    )
    balance: Literal["none", "longest_first"] = Field(
        default="none",
        description="packed only: longest_first gives all ranks of a micro-step like work, by modelled FLOPs: its "
        "samples are dealt out longest first, as many to each; where microbatches are filled, those of like work meet",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _known_mode(cls, value: Any) -> Any:
        if value not in MODES:
            if value == "sorted":
                hint = "mode=bucket with data.batching.bucket_order=sorted sorts by length"
            else:
                close = nearest(str(value), MODES)
                hint = f"did you mean {close}?" if close else f"choose one of {', '.join(MODES)}"
            raise ValueError(f"data.batching.mode={value} is not a mode; {hint}")
        return value

    @model_validator(mode="after")
    def _budget_is_packed(self) -> BatchingConfig:
        if self.max_tokens is not None and self.mode != "packed":
            raise ValueError(
                f"data.batching.max_tokens={self.max_tokens} needs data.batching.mode=packed, not {self.mode}; "
                "set the mode or max_tokens=null"
            )
        if self.fill_tokens is not None and self.mode != "packed":
            raise ValueError(
                f"data.batching.fill_tokens={self.fill_tokens} needs data.batching.mode=packed, not {self.mode}; "
                "set the mode or fill_tokens=null"
            )
        if self.balance != "none" and self.mode != "packed":
            raise ValueError(
                f"data.batching.balance={self.balance} needs data.batching.mode=packed, not {self.mode}, whose cost "
                "padding decides; set the mode or balance=none"
            )
        return self


class LatentSourceConfig(Section):
    """One source of a mixture."""

    name: str = Field(min_length=1, description="what the exposure log calls it; its draws are keyed by this name")
    manifest: str = Field(min_length=1, description="CSV or Parquet, one clip a row")
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0, description="what it counts is data.weights; 0: never drawn"
    )
    layout: Literal["CTHW", "THWC"] | None = Field(
        default=None, description="axes of the stored tensors (null: what the file declares, else CTHW)"
    )


class TextConfig(Section):
    """Where conditioning text comes from when ``data.text_conditioning`` is ``task_prompt``."""

    encoder: str = Field(
        description="hashing (built in, for demonstrations), or the fingerprint that the index must have"
    )
    index: str | None = Field(description="embeddings computed beforehand; null with hashing")
    width: Annotated[int, Field(ge=2)] = Field(description="channels of the hashing encoder")
    token_limit: PositiveInt = Field(description="tokens of a text at most; the index must have been made with it")

    @model_validator(mode="after")
    def _index_matches_encoder(self) -> TextConfig:
        if self.encoder == "hashing" and self.index is not None:
            raise ValueError(
                f"data.text.index={self.index} needs data.text.encoder to name the encoder that wrote it, not hashing"
            )
        if self.encoder != "hashing" and self.index is None:
            raise ValueError(
                f"data.text.encoder={self.encoder} needs data.text.index, the file of its embeddings; only hashing is "
                "built in"
            )
        return self


class CodecConfig(Section):
    """Turns frames into latents when the data is a frame store; manifests hold latents already."""

    name: str = Field(description="patch, wan, encoder, or a registered one")
    options: dict[str, str | int | float | bool | None] | None = Field(
        description="the codec's own keywords, as in '{patch: 8}'; null takes its defaults"
    )


class LatentDataConfig(Section):
    """Which samples, in which shares, and how they are batched."""

    name: str = Field(description="what the receipt calls this data")
    train: str | None = Field(description="one manifest, a frame store (encoded once through data.codec) or demo:train")
    sources: Annotated[list[LatentSourceConfig], Field(min_length=1)] | None = Field(
        description="a mixture of manifests; instead of train"
    )
    val: str | Annotated[list[LatentSourceConfig], Field(min_length=1)] | None = Field(
        description="held-out manifest, store or sources (null: val_fraction of each source, by physical_key)"
    )
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(description="share held out where val is null")
    weights: Literal["by_draw", "by_size", "by_hours", "by_frames", "by_tokens"] = Field(
        description="a source's share of draws is its weight (by_draw), or its weight times its windows (by_size), "
        "hours, frames or tokens"
    )
    epoch_draws: PositiveInt | None = Field(
        description="draws of an epoch, all ranks together (null: number of windows)"
    )
    buckets: Annotated[list[IntPair], Field(min_length=1)] = Field(
        description="(prefix, future) latent frames; each window's is a hash among those that fit"
    )
    window_stride: PositiveInt | None = Field(
        description="latent frames between windows of a clip (null: the longest bucket, so they do not overlap)"
    )
    train_batch_size: PositiveInt = Field(
        description="samples per rank and micro-step; not used where data.batching.fill_tokens is set"
    )
    val_batch_size: PositiveInt = Field(description="samples per rank")
    shape_bucketed_batching: bool = Field(
        description="every microbatch of one canvas, by plan; needs height and width in the manifests"
    )
    batching: BatchingConfig
    text_conditioning: Literal["task_prompt", "disabled"] = Field(description="condition on each clip's text, or not")
    text: TextConfig
    codec: CodecConfig
    on_bad_clip: Literal["stop", "replace"] = Field(
        description="a clip that cannot be read: stop, or take a keyed one of the same source and shape, counted"
    )
    check_files: bool = Field(description="look for every file of a manifest when it is read (one listing a folder)")
    verify_sha256: bool = Field(description="compare checksums at every read, where the manifest has them")
    pad_short: PadShort = Field(
        default="drop", description="drop alone: episodes shorter than the shortest bucket give no window"
    )
    video_rate: Positive = Field(default=15.0, description="frames/s, for encoding straight from video files")
    video_episode_length: PositiveInt = Field(default=128, description="frames, for encoding straight from video files")
    num_episodes: PositiveInt | None = Field(default=None, description="published episode count, if any")

    @field_validator("pad_short")
    @classmethod
    def _nothing_is_padded(cls, value: PadShort) -> PadShort:
        if value != "drop":
            raise ValueError(
                f"data.pad_short={value} has no meaning for latent video, where a clip that is too short gives no "
                "window; set data.pad_short=drop, or add shorter data.buckets"
            )
        return value

    @model_validator(mode="after")
    def _one_description_of_the_data(self) -> LatentDataConfig:
        if (self.train is None) == (self.sources is None):
            given = "both are given" if self.train is not None else "neither is"
            raise ValueError(f"give either data.train (a manifest, a store, demo:train) or data.sources; {given}")
        for key, sources in (("data.sources", self.sources), ("data.val", self.val)):
            if isinstance(sources, list):
                names = [source.name for source in sources]
                twice = sorted({name for name in names if names.count(name) > 1})
                if twice:
                    raise ValueError(f"{key} names {twice[0]} twice; give each source a name of its own")
        if self.batching.fill_tokens is not None and not self.shape_bucketed_batching:
            raise ValueError(
                f"data.batching.fill_tokens={self.batching.fill_tokens} gives each microbatch one canvas, by plan; "
                "set data.shape_bucketed_batching=true, or fill_tokens=null"
            )
        if self.sources is not None and not any(source.weight > 0 for source in self.sources):
            raise ValueError("data.sources: every weight is 0; give one source a weight above 0")
        if len(set(self.buckets)) < len(self.buckets):
            again = next(b for i, b in enumerate(self.buckets) if b in self.buckets[:i])
            raise ValueError(f"data.buckets holds [{again[0]}, {again[1]}] twice; list each (prefix, future) once")
        return self


class VideoModelConfig(Section):
    """The shared video transformer."""

    channels: PositiveInt | None = Field(
        description="latent channels C (null: read from the first clip, then recorded)"
    )
    hidden: PositiveInt = Field(description="width")
    layers: PositiveInt = Field(description="blocks")
    heads: PositiveInt
    patch: PositiveInt = Field(description="latent cells, side of a token")
    patch_t: PositiveInt = Field(description="latent frames of a token; packed needs 1")
    mlp_ratio: Positive = Field(description="hidden width of the MLP over hidden")

    @model_validator(mode="after")
    def _heads_are_even(self) -> VideoModelConfig:
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(
                f"model.hidden={self.hidden} over model.heads={self.heads} does not give an even number of channels "
                "per head; choose heads that divide half of hidden"
            )
        return self


class ProgramConfig(Section):
    """What the model sees and predicts."""

    name: Literal["prefix_suffix", "chunked_conditioned"] = Field(
        description="prefix_suffix: denoise the future given the first frames; chunked_conditioned: chunk by chunk, "
        "given a condition frame"
    )
    levels: Annotated[int, Field(ge=2)] = Field(description="noise levels, linear from 1 to 0 before the shift")
    shift: Positive = Field(description="s' = shift*s / (1 + (shift-1)*s)")
    visibility: Literal["full", "prefix_causal"] = Field(
        description="full: every frame of a sample sees every other; prefix_causal: the prefix sees itself alone"
    )
    text_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        description="probability that the blank embedding replaces a text; guidance at rollout needs it above 0"
    )
    chunk_size: IntPair = Field(description="latent frames, range drawn from (chunked_conditioned)")
    chunk_window: IntPair = Field(description="chunks, range drawn from (chunked_conditioned)")
    condition_noise: Fraction = Field(description="probability of a mildly noised condition (chunked_conditioned)")

    @model_validator(mode="after")
    def _ranges_ascend(self) -> ProgramConfig:
        for key in ("chunk_size", "chunk_window"):
            low, high = getattr(self, key)
            if low > high:
                raise ValueError(f"program.{key}=[{low}, {high}] must ascend")
        return self


class FlowLossConfig(Section):
    """The video decoder's reduction."""

    weighting: Literal["uniform", "logit_bell"] = Field(description="weight of a frame by its noise level")
    normalize_over: Literal["microbatch", "step"] = Field(
        description="valid elements that divide the sum: of the microbatch, or of the optimizer step over all ranks"
    )


class CausalConfig(Section):
    """The whole configuration of ``marey train --config-name causal_video``."""

    objective: Literal["latent_video"] = Field(description="what is learned")
    accumulate_grad_batches: PositiveInt = Field(description="micro-steps per optimizer step")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(description="of every draw and of the initial weights")
    loader: LatentLoaderConfig
    model: VideoModelConfig
    program: ProgramConfig
    noise: Literal["collated", "per_sample"] = Field(
        description="random tensors drawn at the collated capacity (the reference), or from each sample's own key"
    )
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    weight_decay_scheduler: WeightDecayScheduleConfig
    ema: EmaConfig
    loss: FlowLossConfig
    checkpoint: CheckpointConfig
    resume: ResumeConfig
    on_nonfinite: Literal["stop", "skip"] = Field(
        description="a loss or gradient that is not finite: stop the run, or skip the optimizer step and count it"
    )
    # These two have defaults, so that configurations inside older checkpoints stay readable.
    max_skipped_in_a_row: NonNegativeInt | None = Field(
        default=10,
        description="on_nonfinite=skip: more skipped optimizer steps in a row than this end the run; null: no bound",
    )
    max_skipped_steps: NonNegativeInt | None = Field(
        default=None,
        description="on_nonfinite=skip: more skipped optimizer steps in all than this end the run; null: no bound",
    )
    trainer: TrainerConfig
    data: LatentDataConfig
    wandb: WandbConfig
    recipe: RecipeConfig

    @model_validator(mode="after")
    def _choices_agree(self) -> CausalConfig:
        mode = self.data.batching.mode
        if mode == "packed" and self.model.patch_t != 1:
            raise ValueError(
                f"data.batching.mode=packed needs model.patch_t=1, not {self.model.patch_t}; set it, or choose "
                "strict, padded or bucket"
            )
        if self.program.name == "chunked_conditioned":
            if mode != "strict":
                raise ValueError(
                    f"program.name=chunked_conditioned works on data.batching.mode=strict alone, not {mode}; set the "
                    "mode to strict, or program.name=prefix_suffix"
                )
            if self.model.patch_t != 1:
                raise ValueError(
                    f"program.name=chunked_conditioned needs model.patch_t=1, not {self.model.patch_t}; set it, or "
                    "program.name=prefix_suffix"
                )
        if self.program.text_dropout > 0 and self.data.text_conditioning == "disabled":
            raise ValueError(
                f"program.text_dropout={self.program.text_dropout} has no text to drop; set "
                "data.text_conditioning=task_prompt or program.text_dropout=0"
            )
        pad = self.data.batching.pad_to_multiple_of
        if pad > 1 and pad % self.model.patch_t:
            raise ValueError(
                f"data.batching.pad_to_multiple_of={pad} frames do not divide by model.patch_t={self.model.patch_t}; "
                "use a multiple of it, or 1"
            )
        odd = [b for b in self.data.buckets if b[0] % self.model.patch_t or b[1] % self.model.patch_t]
        if odd:
            raise ValueError(
                f"data.buckets: [{odd[0][0]}, {odd[0][1]}] frames do not divide by model.patch_t={self.model.patch_t}; "
                "change the bucket or the patch"
            )
        return self
