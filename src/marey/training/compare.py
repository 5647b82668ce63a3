"""Effective batch, statistic batch and BatchNorm group against the recipe's, and the overrides that restore them.

Pure arithmetic on the configuration, without torch, so that `marey plan` answers at once.
"""

from __future__ import annotations

from typing import NamedTuple

from marey.config.causal import CausalConfig
from marey.config.runs import RunConfig
from marey.config.schema import EncoderConfig

NAMES = ("effective batch", "statistic batch", "BatchNorm group")


class BatchNumbers(NamedTuple):
    """The three numbers that say which experiment a batch is.

    effective: clips per optimizer step. statistic: clips in one SIGReg statistic (all ranks of one micro-step).
    norm_group: clips in one BatchNorm group. None where a recipe's source does not publish the number.
    """

    effective: int | None
    statistic: int | None
    norm_group: int | None


def batch_numbers(config: EncoderConfig, *, world_size: int) -> BatchNumbers:
    """What this configuration gives on ``world_size`` ranks."""
    statistic = world_size * config.loader.batch_size
    return BatchNumbers(
        effective=statistic * config.accumulate_grad_batches,
        statistic=statistic,
        norm_group=config.projector.norm_group or config.loader.batch_size,
    )


def reference_numbers(config: EncoderConfig) -> BatchNumbers:
    """What the recipe stands for."""
    reference = config.recipe.reference
    return BatchNumbers(reference.effective_batch, reference.statistic_batch, reference.norm_group)


def comparison_lines(config: RunConfig, *, world_size: int) -> list[str]:
    """A line per number: what it is here, how it comes about, what the recipe's is.

    Three for the encoder; one for a causal run, which has neither a batch statistic nor BatchNorm.
    """
    if isinstance(config, CausalConfig):
        return [_sample_line(config, world_size=world_size)]
    ours, theirs = batch_numbers(config, world_size=world_size), reference_numbers(config)
    batch, accumulate = config.loader.batch_size, config.accumulate_grad_batches
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}"
    how = (
        f"{ranks} x {batch} clips x {accumulate} accumulated",
        f"{ranks} x {batch} clips, what one SIGReg statistic sees",
        "what one BatchNorm group sees",
    )
    return [
        f"{name:<16} {value:>6} clips  ({text}; {_against(value, reference, config.recipe.name)})"
        for name, value, text, reference in zip(NAMES, ours, how, theirs, strict=True)
    ]


def _sample_line(config: CausalConfig, *, world_size: int) -> str:
    batch, accumulate = config.data.train_batch_size, config.accumulate_grad_batches
    value = world_size * batch * accumulate
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}"
    filled = config.data.batching.fill_tokens
    if filled is not None:
        return (
            f"effective batch  counted in tokens: {ranks} x {filled:,} at most x {accumulate} accumulated; in samples "
            "it differs from step to step"
        )
    against = _against(value, config.recipe.reference.effective_batch, config.recipe.name)
    return f"effective batch  {value:>6} samples  ({ranks} x {batch} samples x {accumulate} accumulated; {against})"


def restore_lines(config: RunConfig, *, world_size: int) -> list[str]:
    """Which overrides give the recipe's numbers back on this many ranks; empty when nothing differs."""
    if isinstance(config, CausalConfig):
        if config.data.batching.fill_tokens is not None:
            return []
        wanted = config.recipe.reference.effective_batch
        micro_step = world_size * config.data.train_batch_size
        alone = _accumulation_for(wanted, micro_step)
        if alone in (None, config.accumulate_grad_batches):
            return []
        return [f"accumulate_grad_batches={alone} restores the effective batch"]
    ours, theirs = batch_numbers(config, world_size=world_size), reference_numbers(config)
    if all(reference in (None, value) for value, reference in zip(ours, theirs, strict=True)):
        return []
    lines = []
    alone = _accumulation_for(theirs.effective, ours.statistic)
    if ours.effective != theirs.effective and alone is not None:
        kept = [
            f"the {name} stays {value} (recipe: {reference})"
            for name, value, reference in zip(NAMES[1:], ours[1:], theirs[1:], strict=True)
            if reference not in (None, value)
        ]
        rest = f" alone: {' and '.join(kept)}, so it is not the same experiment" if kept else ""
        lines.append(f"accumulate_grad_batches={alone} restores the effective batch{rest}")
    everything = _restore_all(config, theirs, world_size=world_size)
    if everything is not None:
        lines.append(f"{everything} restores all three numbers")
    elif theirs.statistic is not None:
        lines.append(
            f"no loader.batch_size restores all three numbers on {world_size} ranks: a statistic of "
            f"{theirs.statistic} clips in BatchNorm groups of {theirs.norm_group} does not divide among them; "
            f"use {_ranks_that_divide(theirs.statistic // (theirs.norm_group or 1))}"
        )
    return lines


def _ranks_that_divide(groups: int) -> str:
    return "one rank" if groups == 1 else f"a number of ranks that divides {groups}"


def _against(value: int | None, reference: int | None, recipe: str) -> str:
    if reference is None:
        return f"recipe {recipe}: not published"
    return f"recipe {recipe}: the same" if value == reference else f"recipe {recipe}: {reference}, DIFFERENT"


def _accumulation_for(effective: int | None, statistic: int | None) -> int | None:
    if effective is None or statistic is None or effective % statistic:
        return None
    return effective // statistic


def _restore_all(config: EncoderConfig, theirs: BatchNumbers, *, world_size: int) -> str | None:
    """The shortest list of overrides that gives all published numbers back, or None when ranks do not divide."""
    if theirs.statistic is None or theirs.statistic % world_size:
        return None
    batch = theirs.statistic // world_size
    accumulate = _accumulation_for(theirs.effective, theirs.statistic)
    group = theirs.norm_group or batch
    if accumulate is None or batch % group:
        return None
    wanted: list[tuple[str, object, object]] = [
        ("loader.batch_size", batch, config.loader.batch_size),
        ("loader.micro_batch_size", _micro_batch(config, batch), config.loader.micro_batch_size),
        ("projector.norm_group", group, config.projector.norm_group or batch),
        ("accumulate_grad_batches", accumulate, config.accumulate_grad_batches),
    ]
    return " ".join(f"{key}={value}" for key, value, current in wanted if value != current)


def _micro_batch(config: EncoderConfig, batch: int) -> int | None:
    """No more clips at a time than the configuration holds now, so that memory does not grow."""
    now = config.loader.micro_batch_size or config.loader.batch_size
    if batch <= now:
        return None if config.loader.micro_batch_size is None else min(now, batch)
    return max(size for size in range(1, now + 1) if batch % size == 0)
