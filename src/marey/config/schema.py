"""The encoder run's configuration, typed. The YAML under ``conf/`` holds the defaults; this holds the checks.

Every key of the composed configuration is declared here with its unit; a key that is not, is refused.
``trainer.*`` are the arguments of Lightning's Trainer, all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from marey.config.sizes import SIZES
from marey.core.errors import nearest
from marey.core.tokencount import DropMode

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
# A list from YAML; its elements are as strict as everything else.
Range = Annotated[tuple[Fraction, Fraction], Field(strict=False)]
PadShort = Literal["drop", "repeat"]
LIMIT = "micro-steps of an epoch as a whole number, or a share of them from 0.0 to 1.0"


class Section(BaseModel):
    """A node of the configuration: unknown keys are refused, values keep their kind (an int may be a float)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class LoaderConfig(Section):
    """How clips reach the model."""

    batch_size: PositiveInt = Field(
        description="clips per rank and micro-step: what BatchNorm and SIGReg see of one rank"
    )
    micro_batch_size: PositiveInt | None = Field(
        description="clips the encoder holds at a time (null: batch_size); activations are recomputed; "
        "memory follows it, the method does not"
    )
    timeout: NonNegativeInt = Field(
        description="seconds without a batch before the run says which file stalls (0: never)"
    )
    num_workers: NonNegativeInt = Field(description="loader processes per rank")
    persistent_workers: bool = Field(description="keep loader processes between epochs (ignored with 0 workers)")
    prefetch_factor: PositiveInt | None = Field(description="micro-batches each worker prepares ahead")
    pin_memory: bool = Field(description="page-locked host memory (only where there is an accelerator)")
    clips_per_video: PositiveInt = Field(description="clips drawn from each stored episode per epoch")
    normalize_on_gpu: bool = Field(description="ship uint8 and normalise on the device (same numbers either way)")
    episode_distinct: bool = Field(
        description="a statistic batch avoids two clips of one episode while it can (false: plain shuffle)"
    )

    @model_validator(mode="after")
    def _micro_batch_divides(self) -> LoaderConfig:
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"loader.micro_batch_size={self.micro_batch_size} must divide loader.batch_size={self.batch_size}"
            )
        return self


class AugmentationConfig(Section):
    """One global view (crop only) and V local views (crop, flip, colour), one draw per view for all its frames."""

    local_size: PositiveInt = Field(description="pixels, side of a local view")
    local_crops_number: NonNegativeInt = Field(description="local views per clip, V")
    local_crops_scale: Range = Field(description="share of the frame's area")
    global_crops_scale: Range = Field(description="share of the frame's area")
    hflip: bool = Field(description="flip local views with probability 0.5")
    color_jitter_prob: Fraction = Field(
        description="of local views; brightness .4, contrast .4, saturation .2, hue below"
    )
    grayscale_prob: Fraction = Field(description="of local views")
    gaussian_blur_prob: Fraction = Field(description="of local views")
    color_jitter_hue: Annotated[float, Field(ge=0.0, le=0.5)] = Field(
        description="turns of the colour circle, either way"
    )
    # It has a default, so that configurations inside older checkpoints stay readable.
    sparse: bool = Field(
        default=False,
        description="make only the patches that are kept (false: whole views as published, then their patches); the "
        "same crops bit by bit; where colours change, one grey level in fifty or so differs, most by 1",
    )

    @model_validator(mode="after")
    def _ranges_ascend(self) -> AugmentationConfig:
        for key in ("local_crops_scale", "global_crops_scale"):
            low, high = getattr(self, key)
            if not 0 < low <= high:
                raise ValueError(f"augmentation.{key}=[{low}, {high}] must be 0 < low <= high <= 1")
        return self


class ModelConfig(Section):
    """The video encoder."""

    name: str = Field(description=f"size: {', '.join(SIZES)}")
    img_size: PositiveInt = Field(description="pixels, side of the global view")
    patch_size: PositiveInt = Field(description="pixels")
    num_frames: PositiveInt = Field(description="frames per clip, T")
    tubelet_size: PositiveInt = Field(description="frames per token")
    use_rope: bool = Field(description="rotary positions over (t, h, w); false: fixed sine-cosine embeddings")
    token_drop_rate: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(description="share of tokens dropped in training")
    token_drop_mode: DropMode = Field(
        default="random",
        description="random: each token for itself; tube: the same places of the image in all frames, an ablation",
    )
    attn_mode: Literal["full", "block_causal"] = Field(
        description="block_causal: a frame sees itself and earlier frames; [CLS] sees all and is seen by none"
    )
    rope_layout: Literal["tiled", "rotary"] = Field(
        description="tiled: what the published weights were trained with, no true rotation; rotary: the true rotation"
    )

    @model_validator(mode="after")
    def _sizes_divide(self) -> ModelConfig:
        if self.name not in SIZES:
            close = nearest(self.name, SIZES)
            hint = f"did you mean {close}?" if close else f"choose one of {', '.join(SIZES)}"
            raise ValueError(f"model.name={self.name} is not a known size; {hint}")
        if self.img_size % self.patch_size:
            raise ValueError(f"model.img_size={self.img_size} is not a multiple of model.patch_size={self.patch_size}")
        if self.num_frames % self.tubelet_size:
            raise ValueError(
                f"model.num_frames={self.num_frames} is not a multiple of model.tubelet_size={self.tubelet_size}"
            )
        return self


class ProjectorConfig(Section):
    """The head in which views are compared."""

    hidden_dim: PositiveInt = Field(description="width between the two Linear layers")
    output_dim: PositiveInt = Field(description="width of the embeddings that are compared")
    norm_group: PositiveInt | None = Field(
        description="clips per BatchNorm group (null: all clips of one rank's batch)"
    )


class OptimizerConfig(Section):
    """AdamW."""

    type: Literal["AdamW"] = Field(description="the only one")
    lr: Annotated[float, Field(gt=0)] = Field(description="at the peak of the schedule")
    weight_decay: Annotated[float, Field(ge=0)] = Field(description="decoupled, AdamW's")
    exclude_bias_norm: bool = Field(description="no decay on biases, norms, 1-D tensors and cls_token")
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ]


class SchedulerConfig(Section):
    """Linear warmup from start_lr to optimizer.lr at peak_step, then cosine to end_lr (end == peak: flat)."""

    name: Literal["LinearWarmupCosineAnnealing"]
    interval: Literal["step"] = Field(description="counted in optimizer steps")
    peak_step: NonNegativeInt = Field(description="optimizer step at which the warmup ends")
    start_lr: Annotated[float, Field(ge=0)] = Field(description="at step 0")
    end_lr: Annotated[float, Field(ge=0)] = Field(description="at the last step")


class WeightDecayScheduleConfig(Section):
    """Weight decay over optimizer steps; off in the reference."""

    enabled: bool
    schedule_type: Literal["cosine", "linear"]
    start_value: Annotated[float, Field(ge=0)]
    end_value: Annotated[float, Field(ge=0)]


RESERVED_CHECKPOINT_KEYS = frozenset(
    {
        "MixedPrecision",
        "amp_scaling_state",
        "callbacks",
        "datamodule_hparams_name",
        "datamodule_hparams_type",
        "datamodule_hyper_parameters",
        "epoch",
        "global_step",
        "hparams_name",
        "hparams_type",
        "hyper_parameters",
        "loops",
        "lr_schedulers",
        "marey",
        "native_amp_scaling_state",
        "optimizer_states",
        "pytorch-lightning_version",
        "state_dict",
    }
)
"""What else a checkpoint may hold, Lightning's entries included."""


class EmaConfig(Section):
    """A slow copy of the weights, saved beside them; no target, never in the loss."""

    enabled: bool
    decay: Annotated[float, Field(ge=0, lt=1)] = Field(description="per optimizer step")
    update_every: PositiveInt = Field(description="optimizer steps between updates")
    start_step: NonNegativeInt = Field(description="optimizer steps before the copy starts to follow")
    compensate: bool = Field(description="true: one update uses decay ** update_every; false: plain decay")
    include: list[str] = Field(description="top-level modules copied")
    save_key: str = Field(description="checkpoint key")
    dtype: Literal["float32", "float64"]

    @model_validator(mode="after")
    def _save_key_is_free(self) -> EmaConfig:
        if not self.save_key or self.save_key in RESERVED_CHECKPOINT_KEYS:
            raise ValueError(
                f"ema.save_key={self.save_key} must be a name of its own: checkpoints keep something else under it; "
                "use ema.save_key=state_dict_ema"
            )
        return self


class SigregKwargs(Section):
    """SIGReg's quadrature and directions."""

    knots: Annotated[int, Field(ge=2)] = Field(description="points of the integral on [0, 3]")
    num_proj: PositiveInt = Field(
        description="random unit directions, drawn anew every micro-step, the same on all ranks"
    )
    normalize_by_n: bool = Field(description="true: without the factor N, the clips of the statistic")


class SigregConfig(Section):
    """The only weight of the loss."""

    weight: Annotated[float, Field(ge=0)] = Field(description="of SIGReg beside the invariance loss")
    kwargs: SigregKwargs


class LossConfig(Section):
    """``invariance + weight * sigreg``."""

    sigreg: SigregConfig


class CheckpointConfig(Section):
    """Checkpoints: every n optimizer steps and at the end, always; the step is part of every file name."""

    dirpath: str = Field(description="relative: from the launch folder, or the run folder with hydra.job.chdir=true")
    filename: str = Field(description="the step is appended where the template does not name it")
    every_n_train_steps: PositiveInt = Field(description="optimizer steps")
    save_top_k: Annotated[int, Field(ge=-1)] = Field(description="-1: keep all; n: keep the newest n")
    save_last: bool = Field(description="keep last.ckpt beside the step checkpoints")
    auto_insert_metric_name: bool = Field(description="write epoch=0003 instead of 0003")


class ResumeConfig(Section):
    """Start from a checkpoint."""

    ckpt_path: str | None = Field(description="checkpoint to start from")
    weights_only: bool = Field(description="true: weights alone, fresh optimizer and step; false: the whole state")
    weights: Literal["online", "ema"] = Field(description="which weights a weights-only start loads")
    allow_changes: list[str] = Field(description="keys whose change this start accepts")


class TrainerConfig(Section):
    """Lightning Trainer arguments, by Lightning's names. ``max_steps`` counts optimizer steps."""

    accelerator: str = Field(description="auto, cpu, gpu, mps")
    strategy: str = Field(
        description="auto, ddp, fsdp2 (weights and optimizer state sharded over ranks), ...; one process: auto"
    )
    devices: int | str | list[int] = Field(description="per node")
    num_nodes: PositiveInt
    precision: str | int | None = Field(description="32-true, bf16-mixed, 64-true, ...")
    logger: bool | None = Field(description="false: no TensorBoard or W&B (metrics.csv is always written)")
    callbacks: None = Field(description="not settable here: the run's callbacks are its own")
    fast_dev_run: bool | NonNegativeInt
    max_epochs: Annotated[int, Field(ge=-1)] | None = Field(description="null or -1: no bound by epochs")
    min_epochs: NonNegativeInt | None
    max_steps: Annotated[int, Field(ge=-1)] = Field(description="optimizer steps; -1: no bound by steps")
    min_steps: NonNegativeInt | None
    max_time: str | dict[str, int] | None = Field(description="DD:HH:MM:SS")
    limit_train_batches: NonNegativeInt | Fraction | None = Field(description=LIMIT)
    limit_val_batches: NonNegativeInt | Fraction | None = Field(description=f"{LIMIT}; 0: no validation")
    limit_test_batches: NonNegativeInt | Fraction | None = Field(description=LIMIT)
    limit_predict_batches: NonNegativeInt | Fraction | None = Field(description=LIMIT)
    overfit_batches: NonNegativeInt | Fraction = Field(description=f"the same clips every epoch: {LIMIT}; 0: off")
    val_check_interval: (
        PositiveInt
        | Annotated[float, Field(gt=0.0, le=1.0)]
        | str
        | Annotated[dict[str, int], Field(min_length=1)]
        | None
    ) = Field(description="between validations: micro-steps as a whole number, a share of an epoch, or DD:HH:MM:SS")
    check_val_every_n_epoch: PositiveInt | None = Field(description="null: val_check_interval counts through epochs")
    num_sanity_val_steps: Annotated[int, Field(ge=-1)] | None
    log_every_n_steps: PositiveInt = Field(description="optimizer steps between rows of metrics.csv")
    enable_checkpointing: bool | None
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    accumulate_grad_batches: None = Field(description="use the top-level accumulate_grad_batches")
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"] | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: Literal[False] = Field(description="always false: positions are arithmetic")
    profiler: str | None
    detect_anomaly: bool
    barebones: Literal[False]
    plugins: None
    sync_batchnorm: Literal[False] = Field(description="always false: projector.norm_group says what BatchNorm sees")
    reload_dataloaders_every_n_epochs: Literal[0]
    default_root_dir: str | None
    enable_autolog_hparams: bool
    model_registry: None


class SourceConfig(Section):
    """One source of a mixture; what is left null comes from the top-level keys."""

    path: str = Field(description="store, folder, CSV or glob")
    name: str | None = Field(default=None, description="what the receipt calls it (null: the path's stem)")
    clips_per_video: PositiveInt | None = Field(default=None, description="null: loader.clips_per_video")
    frame_stride: PositiveInt | None = Field(default=None, description="null: the top-level frame_stride")
    pad_short: PadShort | None = Field(default=None, description="null: data.pad_short")


class DataConfig(Section):
    """Where clips come from: a frame store, a folder, a CSV or a glob of videos, or a list of sources."""

    name: str = Field(description="what the receipt calls this data")
    train: str | Annotated[list[SourceConfig], Field(min_length=1)] = Field(
        description="a store, a folder, a CSV or a glob of videos, demo:train, or a list of sources"
    )
    val: str | Annotated[list[SourceConfig], Field(min_length=1)] | None = Field(description="null: the same as train")
    pad_short: PadShort = Field(description="episodes shorter than a clip: drop them, or repeat their last frame")
    video_rate: Annotated[float, Field(gt=0)] = Field(description="frames/s, for training straight from video files")
    video_episode_length: PositiveInt = Field(description="frames per episode, for training straight from video files")
    num_episodes: PositiveInt | None = Field(description="published episode count, for `marey plan` without data")


class RecipeReference(Section):
    """The numbers a recipe stands for; null where its source does not publish them."""

    effective_batch: PositiveInt | None
    statistic_batch: PositiveInt | None
    norm_group: PositiveInt | None


class RecipeConfig(Section):
    """Which published experiment the defaults belong to, and what a run of it may claim."""

    name: str
    source: str
    public: str
    not_public: str
    claims: str
    reference: RecipeReference


class WandbConfig(Section):
    """Weights & Biases (needs the ``wandb`` extra)."""

    enabled: bool = Field(description="log there too")
    project: str | None = Field(description="W&B's project")
    name: str | None = Field(description="W&B's run name")


class OnlineProbeConfig(Section):
    """A look at a small fixed set during training, into metrics.csv; it draws nothing that training draws."""

    every_n_steps: PositiveInt | None = Field(
        description="optimizer steps between looks, a multiple of trainer.log_every_n_steps (null: off)"
    )
    data: str | None = Field(description="a store or videos, labelled for kNN (null: data.val, else data.train)")
    clips: Annotated[int, Field(ge=2)] = Field(description="clips of the set, one an episode, drawn once by the seed")


class EncoderConfig(Section):
    """The whole configuration of ``marey train`` with the encoder objective (``conf/config.yaml``)."""

    objective: Literal["invariance"] = Field(description="what is learned")
    frame_stride: PositiveInt = Field(description="stored frames between two frames of a clip")
    accumulate_grad_batches: PositiveInt = Field(description="micro-steps per optimizer step")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(description="of every draw and of the initial weights")
    loader: LoaderConfig
    augmentation: AugmentationConfig
    model: ModelConfig
    projector: ProjectorConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    weight_decay_scheduler: WeightDecayScheduleConfig
    ema: EmaConfig
    loss: LossConfig
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
    data: DataConfig
    wandb: WandbConfig
    # The configuration inside a checkpoint of an earlier version has no such section: it did not look.
    probe: OnlineProbeConfig = OnlineProbeConfig(every_n_steps=None, data=None, clips=256)
    recipe: RecipeConfig

    @model_validator(mode="after")
    def _looks_have_rows(self) -> EncoderConfig:
        every, rows = self.probe.every_n_steps, self.trainer.log_every_n_steps
        if every is not None and every % rows:
            raise ValueError(
                f"probe.every_n_steps={every} must be a multiple of trainer.log_every_n_steps={rows}: a look is "
                "written in a row of metrics.csv"
            )
        return self

    @model_validator(mode="after")
    def _shapes_agree(self) -> EncoderConfig:
        if self.augmentation.local_size % self.model.patch_size:
            raise ValueError(
                f"augmentation.local_size={self.augmentation.local_size} is not a multiple of "
                f"model.patch_size={self.model.patch_size}"
            )
        group = self.projector.norm_group
        if group is not None and self.loader.batch_size % group:
            raise ValueError(f"projector.norm_group={group} must divide loader.batch_size={self.loader.batch_size}")
        return self


def describe(config: BaseModel) -> dict[str, Any]:
    """Plain nested dictionaries and lists, ready for YAML or JSON."""
    return config.model_dump(mode="json")


def with_later_keys(values: Mapping[str, Any], schema: type[BaseModel]) -> dict[str, Any]:
    """``values``, an older program's configuration, with the keys that ``schema`` has gained since at their defaults.

    A key with a default in the schema is one that came later, and its default is what was done before it came.
    """
    filled = dict(values)
    for name, field in schema.model_fields.items():
        inner = field.annotation
        if name not in values:
            if not field.is_required():
                default = field.get_default(call_default_factory=True)
                filled[name] = describe(default) if isinstance(default, BaseModel) else default
        elif isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(values[name], Mapping):
            filled[name] = with_later_keys(values[name], inner)
    return filled
