"""``marey plan``: which experiment a command would be, and what it would cost, before any GPU hour.

No torch: the plan of a machine that is not this one must answer at once on a laptop.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from marey.config import compose
from marey.config.causal import CausalConfig
from marey.config.runs import RunConfig
from marey.config.schema import EncoderConfig, SourceConfig
from marey.core.errors import UserError
from marey.pixels.naming import is_there, split_part
from marey.training.batchplan import BatchPlan, batch_plan
from marey.training.compare import comparison_lines, restore_lines
from marey.training.cost import StepCost, step_cost
from marey.training.preflight import Machine, check_hardware
from marey.training.run import recipe_differences


class DeviceFiles(Machine):
    """Accelerators by the files their drivers leave, so that torch need not be imported."""

    def cuda_devices(self) -> int:
        """NVIDIA devices that the driver shows."""
        return len(list(Path("/dev").glob("nvidia[0-9]*")))

    def has_mps(self) -> bool:
        """Apple silicon."""
        return platform.system() == "Darwin" and platform.machine() == "arm64"


class SourceCount(NamedTuple):
    """One source's share of an epoch."""

    name: str
    episodes: int
    clips_per_video: int

    @property
    def clips(self) -> int:
        """Clips per epoch."""
        return self.episodes * self.clips_per_video


def plan_text(
    overrides: Sequence[str], *, config_name: str = compose.DEFAULT_CONFIG, config_dir: Path | None = None
) -> str:
    """The plan of ``marey train`` with these overrides, in lines for people.

    Raises:
        UserError: the overrides do not compose, or the data cannot fill one optimizer step.
    """
    config = compose.load_run(overrides, config_name=config_name, config_dir=config_dir)
    if isinstance(config, CausalConfig):
        from marey.training.latent_plan import latent_lines

        plan, body, problem = latent_lines(config)
        data_lines: list[str] = []
    else:
        plan, data_lines, body = _encoder_lines(config)
        problem = None
    lines = [
        f"recipe           {config.recipe.name}: {config.recipe.source}",
        f"  may claim      {config.recipe.claims}",
        f"  not public     {config.recipe.not_public}",
        *data_lines,
        "",
        *comparison_lines(config, world_size=plan.world_size),
        *(f"  to restore     {line}" for line in restore_lines(config, world_size=plan.world_size)),
        "",
        *body,
        "",
        _machine_line(config, problem),
        *_difference_lines(config, list(overrides)),
    ]
    return "\n".join(lines)


def _encoder_lines(config: EncoderConfig) -> tuple[BatchPlan, list[str], list[str]]:
    sources, data_lines = count_sources(config)
    clips = sum(source.clips for source in sources) if sources else None
    plan = batch_plan(config, clips)
    body = [
        *_step_lines(config, plan),
        *_exposure_lines(sources, plan),
        "",
        *_cost_lines(config, plan, step_cost(config)),
    ]
    return plan, data_lines, body


def count_sources(config: EncoderConfig) -> tuple[list[SourceCount], list[str]]:
    """Episodes and clips of each training source, from the stores that are here, else from the recipe."""
    train = config.data.train
    if isinstance(train, str):
        train = [SourceConfig(path=train, name=config.data.name)]
    counts, lines = [], []
    for source in train:
        name = source.name or Path(source.path).stem
        per_video = source.clips_per_video or config.loader.clips_per_video
        counted, remark = _count(config, source, name, per_video)
        lines.append(f"data             {name}: {remark}")
        if counted is None:
            return [], lines  # shares and steps of a mixture need every source
        counts.append(counted)
    return counts, lines


def _count(config: EncoderConfig, source: SourceConfig, name: str, per_video: int) -> tuple[SourceCount | None, str]:
    path = _built_demo(source.path) if source.path.startswith("demo:") else Path(source.path).expanduser()
    if path is not None and path.exists() and _is_store(path):
        from marey.pixels.clips import clip_span, index_clips
        from marey.pixels.store import FrameStore

        stride = source.frame_stride or config.frame_stride
        index = index_clips(
            FrameStore.open(path, name=name),
            num_frames=config.model.num_frames,
            frame_stride=stride,
            pad_short=source.pad_short or config.data.pad_short,
        )
        short = ""
        if index.dropped_short:
            needed = clip_span(config.model.num_frames, stride)
            short = f"; {index.dropped_short:,} shorter than {needed} frames dropped"
        return SourceCount(name, len(index), per_video), f"{len(index):,} episodes x {per_video} clips{short} ({path})"
    if path is not None and (path.exists() or is_there(split_part(source.path)[0])):
        return (
            None,
            f"{path} holds video files, counted when training starts; steps per epoch are not known before",
        )
    if source.path.startswith("demo:"):
        return None, "the embedded set, built on first use; steps per epoch are known after that"
    if config.data.num_episodes is not None:
        return SourceCount(name, config.data.num_episodes, per_video), (
            f"nothing at {source.path} here; taking the published {config.data.num_episodes:,} episodes "
            f"x {per_video} clips"
        )
    return (
        None,
        f"nothing at {source.path} here and no published episode count; steps per epoch are not known",
    )


def _is_store(path: Path) -> bool:
    return path.suffix == ".lance" or (path / "_versions").is_dir()


def _built_demo(name: str) -> Path | None:
    from marey.pixels.digits import built_source

    return built_source(name.partition(":")[2])


def _step_lines(config: EncoderConfig, plan: BatchPlan) -> list[str]:
    if plan.steps_per_epoch is None or plan.clips is None:
        steps = "not limited by steps" if plan.total_steps is None else f"{plan.total_steps:,} optimizer steps"
        return [f"steps            {steps}"]
    lines = [
        f"steps            {plan.steps_per_epoch:,} optimizer steps per epoch "
        f"({plan.micro_steps_per_epoch:,} micro-steps of {plan.statistic_batch:,} clips; "
        f"{plan.dropped_clips:,} of {plan.clips:,} clips fill no step and are dropped)"
    ]
    if plan.limited_clips:
        lines.append(f"                 trainer limits leave out {plan.limited_clips:,} clips of each epoch")
    if plan.total_steps is None:
        limit = config.trainer.max_time
        lines.append(f"                 until {'it is stopped' if limit is None else f'trainer.max_time={limit}'}")
    else:
        lines.append(f"                 {plan.total_steps:,} optimizer steps in all, {plan.epochs:.4g} epochs")
    if plan.total_steps is not None and plan.total_steps <= config.scheduler.peak_step:
        lines.append(
            f"                 the whole run is warmup: scheduler.peak_step={config.scheduler.peak_step} is not passed"
        )
    return lines


def _exposure_lines(sources: list[SourceCount], plan: BatchPlan) -> list[str]:
    if len(sources) < 2:
        return []
    total = sum(source.clips for source in sources)
    lines = []
    for source in sources:
        share = source.clips / total
        seen = ""
        if plan.total_steps is not None:
            clips = plan.total_steps * plan.effective_batch * share
            seen = f", {clips:,.0f} clips in all, each episode {clips / source.episodes:,.1f} times"
        lines.append(f"  exposure       {source.name}: {share:.1%} of the clips{seen}")
    return lines


def _cost_lines(config: EncoderConfig, plan: BatchPlan, cost: StepCost) -> list[str]:
    views = config.augmentation.local_crops_number
    step_flops = cost.flops * plan.accumulate * plan.world_size
    micro = config.loader.micro_batch_size
    held = (
        f"{micro} of {plan.batch_size} clips at a time, recomputed" if micro else f"{plan.batch_size} clips at a time"
    )
    lines = [
        f"model            {config.model.name}: {cost.parameters:,} parameters, "
        f"projector {cost.projector_parameters:,}",
        f"tokens           {cost.tokens_global} of {cost.tokens_global_all} global + {views} x {cost.tokens_local} of "
        f"{cost.tokens_local_all} local = {cost.tokens_per_clip} of {cost.tokens_per_clip_all} per clip "
        f"({cost.tokens_per_clip / cost.tokens_per_clip_all:.1%}); "
        f"{cost.tokens_per_clip * plan.effective_batch:,} per optimizer step; padding 0%",
        f"compute          {step_flops / 1e12:,.3g} TFLOP per optimizer step on all ranks "
        f"(matrix products, forward and backward{', recomputation included' if micro else ''})",
        f"memory           about {cost.memory_bytes / 2**30:.2g} GiB per rank ({held}; an estimate: weights, "
        "gradients, AdamW, EMA, activations)",
        f"loader           {cost.bytes_shipped_per_clip / 2**20:.2f} MiB shipped per clip: the kept patches alone",
    ]
    if plan.total_steps is not None:
        lines.insert(3, f"                 {step_flops * plan.total_steps / 1e18:,.3g} EFLOP for the whole run")
    return lines


def _machine_line(config: RunConfig, problem: str | None) -> str:
    """``problem``: what the data has against it, on any machine."""
    if problem is not None:
        return f"this machine     cannot run it as asked: {problem}"
    try:
        check_hardware(config.trainer, machine=DeviceFiles())
    except UserError as error:
        return f"this machine     cannot run it as asked: {error}"
    return "this machine     can run it as asked"


def _difference_lines(config: RunConfig, overrides: list[str]) -> list[str]:
    found = recipe_differences(config, overrides)
    if not found:
        return [f"differs          nothing differs from the recipe {config.recipe.name}"]
    return [f"differs          {found[0]}", *(f"                 {line}" for line in found[1:])]
