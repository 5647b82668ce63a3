"""``marey plan --config-name causal_video``: buckets, padding, tokens, FLOPs, balance of ranks, exposure. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from marey.config.causal import MODES, CausalConfig
from marey.sampling.forecast import Forecast, forecast
from marey.sampling.latent_stream import NamedManifest, read_sources, train_stream
from marey.sampling.planner import MicrobatchPlanner
from marey.training.batchplan import BatchPlan, latent_plan, resolve_devices
from marey.training.latents import built_manifest, is_manifest, named_paths, with_manifests

LOOKED_AT = 64
"""Micro-steps that a forecast looks at."""


UNKNOWN_CHANNELS = 16
"""Latent channels that a cost assumes where the first clip does not tell without torch."""


class LatentCost(NamedTuple):
    """Of one micro-step of all ranks: matrix products, forward and backward."""

    tokens: float
    flops: float
    attention_flops: float


def latent_lines(config: CausalConfig) -> tuple[BatchPlan, list[str]]:
    """The plan of a causal run's steps, and what is known of its data, batching and cost, in lines for people.

    Raises:
        UserError: a manifest with a bad row, or data that cannot fill one optimizer step.
    """
    world = resolve_devices(config.trainer) * config.trainer.num_nodes
    missing = _not_here(config)
    if missing:
        plan = latent_plan(config, draws=None, dropped=0, micro_steps=None, world_size=world)
        return plan, [f"data             {missing}"]
    sources = read_sources(_as_manifests(config).data).train
    stream, shares = train_stream(config, sources, world=world)
    planner = stream.planner
    pt = config.model.patch_t
    multiple = config.data.batching.pad_to_multiple_of
    found = forecast(planner, patch=config.model.patch, multiple=multiple, steps=LOOKED_AT)
    counts = found.counts
    plan = latent_plan(
        config, draws=counts.drawn, dropped=counts.dropped, micro_steps=counts.micro_steps, world_size=world
    )
    cost = _cost(config, found, channels=config.model.channels or _channels(sources), pt=pt)
    lines = [
        *(_source_line(source, planner, i) for i, source in enumerate(sources)),
        "",
        *_bucket_lines(found),
        *_padding_lines(config, sources, world=world, own=found),
        *_rank_lines(found, plan),
        "",
        *_step_lines(plan, found),
        *_exposure_lines(planner, plan, found, [float(share) for share in shares]),
        "",
        f"tokens           {cost.tokens * plan.accumulate:,.0f} video tokens seen per optimizer step on all ranks "
        f"({found.tokens * plan.accumulate:,.0f} of them valid)",
        f"compute          {cost.flops * plan.accumulate / 1e12:,.3g} TFLOP per optimizer step on all ranks (matrix "
        f"products, forward and backward), {cost.attention_flops / cost.flops:.1%} of it attention",
    ]
    if plan.total_steps is not None:
        whole = cost.flops * plan.accumulate * plan.total_steps
        lines.append(f"                 {whole / 1e18:,.3g} EFLOP for the whole run")
    return plan, lines


def _not_here(config: CausalConfig) -> str | None:
    """Why nothing can be counted, or None."""
    for key, paths in named_paths(config.data).items():
        for path in paths:
            manifest = built_manifest(path, config.data)
            if manifest is not None and manifest.is_file():
                continue
            if path.startswith("demo:"):
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


def _padding_lines(config: CausalConfig, sources: Sequence[NamedManifest], *, world: int, own: Forecast) -> list[str]:
    """What each mode would show the heavy layers, on the same draws."""
    mode = config.data.batching.mode
    shares = {"packed": "0% padding"}
    for other in ("padded", "bucket"):
        if other == mode:
            found = own
        else:
            batching = config.data.batching.model_copy(update={"mode": other, "max_tokens": None})
            data = config.data.model_copy(update={"batching": batching})
            stream, _ = train_stream(config.model_copy(update={"data": data}), sources, world=world)
            multiple = batching.pad_to_multiple_of
            found = forecast(stream.planner, patch=config.model.patch, multiple=multiple, steps=LOOKED_AT)
        used = found.pairs / found.pairs_padded if found.pairs_padded else 1.0
        shares[other] = f"{found.padding_share:.1%} padding, {used:.1%} of attention useful"
    equal = own.tokens == own.tokens_padded
    shares["strict"] = "0% padding" if equal else "refuses unequal lengths (data.train_batch_size=1 has none)"
    return [
        f"{'mode' if i == 0 else '':<17}{name}: {shares[name]}{' (this run)' if name == mode else ''}"
        for i, name in enumerate(MODES)
    ]


def _rank_lines(found: Forecast, plan: BatchPlan) -> list[str]:
    if plan.world_size == 1:
        return []
    return [
        f"ranks            {plan.world_size}: the mean rank has {found.rank_balance:.1%} of the busiest one's valid "
        f"tokens ({found.rank_balance_padded:.1%} when padded)"
    ]


def _step_lines(plan: BatchPlan, found: Forecast) -> list[str]:
    counts = found.counts
    lines = [
        f"steps            {plan.steps_per_epoch:,} optimizer steps per epoch ({plan.micro_steps_per_epoch:,} "
        f"micro-steps of {plan.statistic_batch:,} samples; of {counts.drawn:,} draws {counts.dropped:,} fill no step "
        f"and are dropped; {counts.repeated:,} tail repeats)"
    ]
    if plan.total_steps is None:
        lines.append("                 until trainer.max_time")
    else:
        lines.append(f"                 {plan.total_steps:,} optimizer steps in all, {plan.epochs:.4g} epochs")
    return lines


def _exposure_lines(planner: MicrobatchPlanner, plan: BatchPlan, found: Forecast, shares: Sequence[float]) -> list[str]:
    lines = []
    for name, size, asked in zip(planner.windows.names, planner.windows.sizes, shares, strict=True):
        seen = ""
        if plan.total_steps is not None and size:
            samples = plan.total_steps * plan.effective_batch * asked
            seen = f", {samples:,.0f} samples in all, each window {samples / size:,.2f} times"
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
    linear = tokens * (model.layers * (8 + 4 * model.mlp_ratio) * model.hidden**2 + 4 * patch * model.hidden)
    attention = 4 * pairs * model.hidden * model.layers
    return LatentCost(tokens=tokens, flops=3 * (linear + attention), attention_flops=3 * attention)


def _channels(sources: Sequence[NamedManifest]) -> int:
    """Channels of the first clip, from its file's header (``UNKNOWN_CHANNELS`` where only torch could read it)."""
    source = next(source for source in sources if len(source.manifest))
    clip = source.manifest.clip(0)
    path = Path(clip.path)
    shape: Sequence[int] = ()
    if path.suffix == ".npy" and path.is_file():
        shape = np.load(path, mmap_mode="r").shape
    elif path.suffix == ".safetensors" and path.is_file():
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        shape = next(entry["shape"] for name, entry in header.items() if name != "__metadata__")
    if len(shape) != 4:
        return UNKNOWN_CHANNELS
    return int(shape[0] if shape[1] == clip.length_frames and source.layout != "THWC" else shape[-1])
