"""What a causal run says of itself: its data, its differences from the reference, what its weights understand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from marey.config.causal import CausalConfig, LatentDataConfig
from marey.core.files import sha256
from marey.latents.codec_record import recorded_codec
from marey.latents.encode import SKIPPED, skipped_clips
from marey.sampling.budget import canvases_of
from marey.sampling.latent_stream import NamedManifest, validated_counts
from marey.sampling.planner import EpochCounts, MicrobatchPlanner
from marey.sampling.stream import RequestStream
from marey.training.batchplan import BatchPlan
from marey.training.ema import describe_rule
from marey.training.latents import Streams, named_paths


def validation_facts(sources: Sequence[NamedManifest], stream: RequestStream) -> list[dict[str, Any]]:
    """One entry a source of the validation side; ``validated_windows``: those that every validation looks at."""
    facts = source_facts(sources, stream.planner, None)
    return [{**fact, "validated_windows": taken} for fact, taken in zip(facts, validated_counts(stream), strict=True)]


def source_facts(
    sources: Sequence[NamedManifest], planner: MicrobatchPlanner, shares: Sequence[Fraction] | None
) -> list[dict[str, Any]]:
    """One entry a source. ``version`` is the manifest's SHA-256; ``asked_share`` is null for validation."""
    found = []
    for index, (source, windows) in enumerate(zip(sources, planner.windows.sources, strict=True)):
        measures = windows.measures(patch=1)
        found.append(
            {
                "name": source.name,
                "path": str(source.manifest.path),
                "version": sha256(source.manifest.path),
                "clips": len(source.manifest),
                "unusable_clips": windows.unusable_clips,
                "windows": measures.windows,
                "frames": measures.frames,
                "hours": measures.hours,
                "weight": source.weight,
                "asked_share": None if shares is None else float(shares[index]),
                "ignored_columns": list(source.manifest.ignored_columns),
            }
        )
    return found


def validates_on_training_data(data: LatentDataConfig) -> bool:
    """Whether validation would look at a manifest that training draws from; a split by ``val_fraction`` does not."""
    if data.val is None:
        return False
    paths = named_paths(data)
    trained = {str(Path(p).expanduser()) for key in ("data.train", "data.sources") for p in paths.get(key, [])}
    return any(str(Path(path).expanduser()) in trained for path in paths["data.val"])


def opening_lines(
    config: CausalConfig, plan: BatchPlan, streams: Streams, counts: EpochCounts, *, validates: bool
) -> Iterator[str]:
    """Sources, steps and batching, then what is unusual."""
    windows = streams.counting.windows
    for source, table, share in zip(streams.sources.train, windows.sources, streams.shares, strict=True):
        unusable = f", {table.unusable_clips:,} too short" if table.unusable_clips else ""
        yield (
            f"data          {source.name}: {len(source.manifest):,} clips{unusable}, {len(table):,} windows, "
            f"{float(share):.1%} of the draws ({source.manifest.path})"
        )
        left_out = skipped_clips(source.manifest.path)
        if left_out:
            yield (
                f"              clips left out when it was encoded: {len(left_out):,}, the first {left_out[0][0]}: "
                f"{left_out[0][1]} ({source.manifest.path.parent / SKIPPED} lists them)"
            )
        if source.manifest.ignored_columns:
            yield f"              ignored columns: {', '.join(source.manifest.ignored_columns)}"
    total = "until it is stopped" if plan.total_steps is None else f"{plan.total_steps:,} in all"
    if plan.epochs is not None:
        total += f", {plan.epochs:.3g} epochs"
    yield (
        f"steps         {plan.steps_per_epoch:,} optimizer steps per epoch, {total}; {counts.dropped:,} draws of an "
        f"epoch fill no step, {counts.repeated:,} samples are repeated to complete one"
    )
    yield (
        f"batching      {config.data.batching.mode}, {_microbatch_words(config, plan)}; loss over the "
        f"{config.loss.normalize_over}; noise {config.noise}"
    )
    yield f"average       {describe_rule(config.ema)}"
    if streams.val is not None:
        taken, tables = validated_counts(streams.val), streams.val.planner.windows.sources
        sides = [f"{table.name} {n:,} of {len(table):,}" for table, n in zip(tables, taken, strict=True)]
        number = "1 window" if sum(taken) == 1 else f"{sum(taken):,} windows"
        yield f"validation    {number}, the same each time: {', '.join(sides)}"
    if validates and validates_on_training_data(config.data):
        yield (
            "warning       validation looks at the training data: its loss is no measure of generalisation "
            "(set data.val to held-out latents)"
        )


def _microbatch_words(config: CausalConfig, plan: BatchPlan) -> str:
    batching = config.data.batching
    words = f"{plan.batch_size} samples per rank"
    if plan.mean_samples is not None:
        words = (
            f"filled to {batching.fill_tokens:,} video tokens, {plan.mean_samples / plan.world_size:.1f} samples per "
            f"rank on average (effective batch {plan.samples_per_step:,.1f} on average)"
        )
    return words if batching.balance == "none" else f"{words}, ranks balanced longest first"


def reference_differences(config: CausalConfig) -> list[dict[str, str]]:
    """Where this run departs from the reference method, or this program always does."""
    batching = config.data.batching
    filled = {
        "what": "samples of a microbatch",
        "published": "a fixed number",
        "here": f"as many as fill {batching.fill_tokens} video tokens",
        "restore": "data.batching.fill_tokens=null",
    }
    balanced = {
        "what": "which rank of a micro-step takes which sample",
        "published": "blocks of the drawn order",
        "here": "like work for every rank, by modelled FLOPs",
        "restore": "data.batching.balance=none",
    }
    return [
        *([filled] if batching.fill_tokens is not None else []),
        *([balanced] if batching.balance != "none" else []),
        {
            "what": "order of a pool's microbatches",
            "published": "ascending in length (sorted)",
            "here": batching.bucket_order if batching.mode == "bucket" else "no pools",
            "restore": "data.batching.bucket_order=sorted" if batching.mode == "bucket" else "",
        },
        {
            "what": "loss normalisation",
            "published": "over the microbatch",
            "here": f"over the {config.loss.normalize_over}",
            "restore": "loss.normalize_over=microbatch",
        },
        {
            "what": "noise",
            "published": "drawn at the collated capacity",
            "here": "drawn at the collated capacity" if config.noise == "collated" else "from each sample's own key",
            "restore": "noise=collated",
        },
        {
            "what": "text of a batch-mate",
            "published": "its length leaks through unmasked padding",
            "here": "nothing of one sample reaches another",
            "restore": "",
        },
        {
            "what": "repeats of one window in a pool",
            "published": "meet in one microbatch",
            "here": "placed in different microbatches where counts allow",
            "restore": "",
        },
    ]


def latent_preprocessing(config: CausalConfig, sources: Sequence[NamedManifest], text: Any) -> dict[str, Any]:
    """Which latents and texts the weights understand. Plain values.

    ``codec.fingerprint`` is what the first clip's file says (null where it says nothing); name and options are
    those recorded beside the manifest, null for latents made elsewhere. Raises UserError for a record that cannot be
    read.
    """
    from marey.latents.sidecar import sidecar_metadata

    first = next(source for source in sources if len(source.manifest))
    clip = first.manifest.clip(0)
    said = sidecar_metadata(Path(clip.path)) or {}
    name, options = recorded_codec(first.manifest.path.parent) or (None, None)
    fps = first.manifest.fps
    return {
        "format": 1,
        "layout": "B,C,T,H,W",
        "channels": config.model.channels,
        "canvas": None if clip.height is None else [clip.height, clip.width],
        "rate": None if fps is None else float(fps[0]),
        "codec": {
            "name": name,
            "options": options,
            "fingerprint": said.get("codec"),
        },
        "text": None
        if text is None
        else {
            "encoder": config.data.text.encoder,
            "fingerprint": text.fingerprint,
            "channels": text.width,
            "token_limit": config.data.text.token_limit,
        },
        "buckets": [list(bucket) for bucket in config.data.buckets],
    }


def partition_problem(config: CausalConfig, planner: MicrobatchPlanner, *, old_world: int, world: int) -> str | None:
    """What a run of ``old_world`` ranks lacks to go on exactly on ``world``: one clause, None where nothing does."""
    reasons = [
        reason
        for there, reason in (
            (config.noise != "per_sample", "noise=per_sample"),
            (config.loss.normalize_over != "step", "loss.normalize_over=step"),
            (config.data.batching.mode == "bucket", "a data.batching.mode other than bucket"),
            (config.data.batching.fill_tokens is not None, "data.batching.fill_tokens=null from the start"),
            (planner.shape_grouping and len(canvases_of(planner)) > 1, "one canvas"),
        )
        if there
    ]
    if not reasons:
        return None
    return (
        f"it was written by {old_world} ranks and continues on {world}, which needs {', '.join(reasons)}; continue on "
        f"{old_world} ranks, or start from its weights with resume.weights_only=true"
    )
