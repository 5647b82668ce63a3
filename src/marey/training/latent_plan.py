"""``marey plan --config-name causal_video``: buckets, padding, tokens, FLOPs, balance of ranks, exposure. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from marey.config.causal import DEMO, MODES, CausalConfig
from marey.core.errors import UserError
from marey.latents.codec_record import recorded_codec
from marey.sampling.budget import check_shapes
from marey.sampling.flops import sample_cost
from marey.sampling.forecast import Forecast, forecast
from marey.sampling.latent_stream import NamedManifest, Sources, read_sources, train_stream, validation_stream
from marey.sampling.planner import MicrobatchPlanner
from marey.sampling.stream import RequestStream
from marey.training.batchplan import BatchPlan, latent_plan, resolve_devices
from marey.training.latents import built_manifest, check_streams, is_manifest, named_paths, with_manifests

LOOKED_AT = 64
"""Micro-steps that a forecast looks at."""


UNKNOWN_CHANNELS = 16
"""Latent channels that a cost assumes where the first clip does not tell without torch."""


class LatentCost(NamedTuple):
    """Of one micro-step of all ranks: matrix products, forward and backward."""

    tokens: float
    flops: float
    attention_flops: float


def latent_lines(config: CausalConfig) -> tuple[BatchPlan, list[str], str | None]:
    """The plan of a causal run's steps, what is known of its data, batching and cost, in lines for people, and why
    training would refuse it (None: nothing is known against it).

    Raises:
        UserError: a manifest with a bad row, or data that cannot fill one optimizer step.
    """
    world = resolve_devices(config.trainer) * config.trainer.num_nodes
    missing = _not_here(config)
    if missing:
        plan = latent_plan(config, draws=None, dropped=0, micro_steps=None, world_size=world)
        return plan, [f"data             {missing}"], None
    both = read_sources(_as_manifests(config).data, validates=_validates(config))
    sources = both.train
    stream, shares = train_stream(config, sources, world=world)
    planner = stream.planner
    pt = config.model.patch_t
    multiple = config.data.batching.pad_to_multiple_of
    found = forecast(
        planner,
        program=config.program,
        patch=config.model.patch,
        multiple=multiple,
        steps=LOOKED_AT,
        cost=sample_cost(config.model, config.program),
    )
    counts = found.counts
    plan = latent_plan(
        config,
        draws=counts.drawn,
        dropped=counts.dropped,
        micro_steps=counts.micro_steps,
        world_size=world,
        planned=counts.planned,
    )
    channels, problem = _looked_into(config, both, stream, world=world)
    cost = _cost(config, found, channels=config.model.channels or channels or UNKNOWN_CHANNELS, pt=pt)
    lines = [
        *(_source_line(source, planner, i) for i, source in enumerate(sources)),
        "",
        *_bucket_lines(found),
        *_padding_lines(config, sources, plan, own=found),
        *_filled_lines(config, found, plan),
        *_rank_lines(config, found, plan),
        "",
        *_step_lines(plan, found),
        *_exposure_lines(planner, plan, found, [float(share) for share in shares]),
        "",
        f"tokens           {cost.tokens * plan.accumulate:,.0f} video tokens seen per optimizer step on all ranks "
        f"({found.tokens / pt * plan.accumulate:,.0f} of them valid)",
        f"compute          {cost.flops * plan.accumulate / 1e12:,.3g} TFLOP per optimizer step on all ranks (matrix "
        f"products, forward and backward), {cost.attention_flops / cost.flops:.1%} of it attention",
    ]
    if plan.total_steps is not None:
        whole = cost.flops * plan.accumulate * plan.total_steps
        lines.append(f"                 {whole / 1e18:,.3g} EFLOP for the whole run")
    return plan, lines, problem


def _looked_into(
    config: CausalConfig, sources: Sources, train: RequestStream, *, world: int
) -> tuple[int | None, str | None]:
    """Latent channels (None: not known), and the first thing that training would refuse."""
    channels = None
    try:
        validates = _validates(config)
        val = validation_stream(config, sources.val, world=world) if validates else None
        check_streams(config, train, val)
        strict = config.data.batching.mode == "strict"
        check_shapes(train.planner, strict=strict, key="data.train_batch_size", first=LOOKED_AT)
        recorded_codec(next(source for source in sources.train if len(source.manifest)).manifest.path.parent)
        drawn = [source for source in sources.train if source.weight > 0]
        for source in [*drawn, *(sources.val if validates else [])]:
            found = _channels(source) if len(source.manifest) else None
            wanted = config.model.channels or channels
            if found is not None and wanted is not None and found != wanted:
                raise UserError(
                    f"{source.name} has latents of {found} channels, not {wanted}; encode all sources with one codec, "
                    "and set model.channels to null or to theirs"
                )
            channels = channels or found
    except UserError as error:
        return channels, str(error)
    return channels, None


def _validates(config: CausalConfig) -> bool:
    return config.trainer.limit_val_batches != 0 and not config.trainer.fast_dev_run


def _not_here(config: CausalConfig) -> str | None:
    """Why nothing can be counted, or None."""
    for key, paths in named_paths(config.data).items():
        for path in paths:
            manifest = built_manifest(path, config.data)
            if manifest is not None and manifest.is_file():
                continue
            if path.startswith(DEMO):
                return f"{path}: the embedded set, made and encoded on first use; buckets are known after that"
            if is_manifest(path):
                return f"nothing at {key}={path} here; buckets and steps are not known"
            return (
                f"{key}={path} holds frames, encoded when training starts; `marey encode` them now to have buckets "
                "and steps planned"
            )
    return None


def _as_manifests(config: CausalConfig) -> CausalConfig:
    def manifest_of(path: str) -> Path:
        found = built_manifest(path, config.data)
        assert found is not None, path
        return found

    return config.model_copy(update={"data": with_manifests(config.data, manifest_of)})


def _source_line(source: NamedManifest, planner: MicrobatchPlanner, index: int) -> str:
    windows = planner.windows.sources[index]
    unusable = f", {windows.unusable_clips:,} too short" if windows.unusable_clips else ""
    return (
        f"data             {source.name}: {len(source.manifest):,} clips{unusable}, {len(windows):,} windows "
        f"({source.manifest.path})"
    )


def _bucket_lines(found: Forecast) -> list[str]:
    samples = sum(found.buckets.values())
    buckets = ", ".join(f"{p}+{f} {n / samples:.0%}" for (p, f), n in found.buckets.items())
    canvases = ", ".join(
        f"{'of unknown size' if not h else f'{h}x{w}'} {n / samples:.0%}" for (h, w), n in found.canvases.items()
    )
    return [
        f"buckets          {buckets} (prefix+future latent frames, of {samples:,} samples looked at in "
        f"{found.steps_seen:,} of {found.counts.micro_steps:,} micro-steps)",
        f"canvases         {canvases}",
    ]


def _padding_lines(
    config: CausalConfig, sources: Sequence[NamedManifest], plan: BatchPlan, *, own: Forecast
) -> list[str]:
    """What each mode would show the heavy layers, on the same draws and with as many samples a microbatch."""
    world, batch = plan.world_size, config.data.train_batch_size
    if plan.mean_samples is not None:
        batch = max(1, int(plan.mean_samples / world))
    mode = config.data.batching.mode
    shares = {"packed": "0% padding"}
    for other in ("padded", "bucket"):
        if other == mode:
            found = own
        else:
            none = {"max_tokens": None, "fill_tokens": None, "balance": "none"}
            batching = config.data.batching.model_copy(update={"mode": other, **none})
            data = config.data.model_copy(update={"batching": batching, "train_batch_size": batch})
            stream, _ = train_stream(config.model_copy(update={"data": data}), sources, world=world)
            multiple = batching.pad_to_multiple_of
            found = forecast(
                stream.planner, program=config.program, patch=config.model.patch, multiple=multiple, steps=LOOKED_AT
            )
        used = found.pairs / found.pairs_padded if found.pairs_padded else 1.0
        shares[other] = f"{found.padding_share:.1%} padding, {used:.1%} of attention useful"
    equal = own.tokens == own.tokens_padded
    shares["strict"] = "0% padding" if equal else "refuses unequal lengths (data.train_batch_size=1 has none)"
    return [
        f"{'mode' if i == 0 else '':<17}{name}: {shares[name]}{' (this run)' if name == mode else ''}"
        for i, name in enumerate(MODES)
    ]


def _filled_lines(config: CausalConfig, found: Forecast, plan: BatchPlan) -> list[str]:
    """How full microbatches are that are filled to a budget."""
    budget = config.data.batching.fill_tokens
    if budget is None or plan.mean_samples is None:
        return []
    fewest, most = found.samples
    return [
        f"filled           to {budget:,} video tokens a microbatch (text is not counted): "
        f"{found.tokens / plan.world_size / budget:.1%} of them used, {plan.mean_samples / plan.world_size:,.2f} "
        f"samples on average ({fewest:,} to {most:,} in those looked at), "
        f"{plan.samples_per_step:,.1f} on average in an optimizer step"
    ]


def _rank_lines(config: CausalConfig, found: Forecast, plan: BatchPlan) -> list[str]:
    if plan.world_size == 1:
        return []
    padded = config.data.batching.mode in ("padded", "bucket")
    work = found.flops_balance_padded if padded else found.flops_balance
    assert work is not None
    return [
        f"ranks            {plan.world_size}: the mean rank has {found.rank_balance:.1%} of the busiest one's valid "
        f"tokens ({found.rank_balance_padded:.1%} when padded)",
        f"                 and {work:.1%} of its modelled FLOPs in this mode "
        f"(data.batching.balance={config.data.batching.balance})",
    ]


def _step_lines(plan: BatchPlan, found: Forecast) -> list[str]:
    counts = found.counts
    lines = [
        f"steps            {plan.steps_per_epoch:,} optimizer steps per epoch ({plan.micro_steps_per_epoch:,} "
        f"micro-steps of {_micro_step(plan)}; of {counts.drawn:,} draws {counts.dropped:,} fill no step "
        f"and are dropped; {counts.repeated:,} tail repeats)"
    ]
    if plan.total_steps is None:
        lines.append("                 until trainer.max_time")
    else:
        lines.append(f"                 {plan.total_steps:,} optimizer steps in all, {plan.epochs:.4g} epochs")
    return lines


def _micro_step(plan: BatchPlan) -> str:
    if plan.mean_samples is None:
        return f"{plan.statistic_batch:,} samples"
    return f"{plan.mean_samples:,.1f} samples on average"


def _exposure_lines(planner: MicrobatchPlanner, plan: BatchPlan, found: Forecast, shares: Sequence[float]) -> list[str]:
    """Samples by source: by the plan itself where all of an epoch was looked at, else by the shares asked for."""
    lines = []
    whole = found.steps_seen == found.counts.micro_steps
    for name, size, asked in zip(planner.windows.names, planner.windows.sizes, shares, strict=True):
        seen = ""
        if plan.total_steps is not None and size:
            total = plan.total_steps * plan.samples_per_step
            samples, tail = total * (found.draws[name] if whole else asked), total * found.tail[name]
            seen = (
                f", {samples:,.0f} samples in all, each window {samples / size:,.2f} times "
                f"({max(0.0, samples - tail - size):,.0f} repeats, {tail:,.0f} tail repeats)"
            )
        lines.append(
            f"  exposure       {name}: {asked:.1%} of the draws asked, {found.draws[name]:.1%} looked at{seen}"
        )
    return lines


def _cost(config: CausalConfig, found: Forecast, *, channels: int, pt: int) -> LatentCost:
    """A multiply-add is two FLOPs; backward is twice the forward. Text is left out."""
    model, mode = config.model, config.data.batching.mode
    padded = mode in ("padded", "bucket")
    tokens = (found.tokens_padded if padded else found.tokens) / pt
    pairs = (found.pairs_padded if padded else found.pairs) / pt**2
    patch = channels * pt * model.patch**2
    blocks = sample_cost(model, config.program)
    linear = tokens * (blocks.token + 4 * patch * model.hidden)
    attention = pairs * blocks.pair
    return LatentCost(tokens=tokens, flops=3 * (linear + attention), attention_flops=3 * attention)


def _channels(source: NamedManifest) -> int | None:
    """Channels of the first clip, from its file's header (None where only torch could read it).

    Raises UserError for a header that nobody could read.
    """
    clip = source.manifest.clip(0)
    try:
        shape = _shape(Path(clip.path))
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise UserError(
            f"clip {source.name}/{clip.clip_id} ({clip.path}): its header cannot be read ({type(error).__name__}); "
            "encode the clip again or take its row out of the manifest"
        ) from error
    if len(shape) != 4:
        return None
    return int(shape[0] if shape[1] == clip.length_frames and source.layout != "THWC" else shape[-1])


def _shape(path: Path) -> Sequence[int]:
    """The shape that a file's header tells; nothing for a file that only torch reads."""
    if path.suffix == ".npy" and path.is_file():
        return tuple(np.load(path, mmap_mode="r").shape)
    if path.suffix != ".safetensors" or not path.is_file():
        return ()
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"it promises {size} bytes")
        header = json.loads(file.read(size))
    return tuple(next(entry["shape"] for name, entry in header.items() if name != "__metadata__"))
