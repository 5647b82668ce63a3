"""From a causal run's configuration to its streams of requests: sources, split, shares, plan."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from marey.config.causal import CausalConfig, LatentDataConfig, LatentSourceConfig
from marey.core.errors import UserError
from marey.latents.geometry import Geometry
from marey.latents.manifest import Manifest, hold_out, read_manifest, smallest_split
from marey.latents.requests import Layout
from marey.sampling.budget import check_budget
from marey.sampling.draws import MixtureDraws, SequentialDraws, SpreadDraws, draw_shares
from marey.sampling.flops import sample_cost
from marey.sampling.planner import MicrobatchPlanner
from marey.sampling.stream import RequestStream
from marey.sampling.windows import SourceWindows, WindowTable

_ALTERNATES = 3


class NamedManifest(NamedTuple):
    """One source, read and split."""

    name: str
    manifest: Manifest
    weight: float
    layout: Layout | None


class Sources(NamedTuple):
    """Both sides of the data."""

    train: list[NamedManifest]
    val: list[NamedManifest]


def read_sources(data: LatentDataConfig, *, validates: bool = True) -> Sources:
    """Read every manifest that ``data`` names, all rows checked, and split off the validation side.

    ``data.train`` and ``data.val`` must name manifests here (a store or demo is encoded first). A run that does not
    validate keeps the split, so that turning validation off changes no draw; but where it would leave one side empty,
    such a run trains on every clip. Raises
    UserError for a bad row, an empty side, or a clip without the text that ``data.text_conditioning`` asks for.
    """
    train = [_read(source, data) for source in _configs(data.train if data.sources is None else data.sources)]
    if data.val is not None:
        return Sources(train, [_read(source, data) for source in _configs(data.val)])
    if not validates and smallest_split([source.manifest for source in train], [data.val_fraction]) is None:
        return Sources(train, [])
    sides = hold_out([source.manifest for source in train], data.val_fraction)
    halves = [
        (
            source._replace(manifest=source.manifest.select(~side)),
            source._replace(manifest=source.manifest.select(side)),
        )
        for source, side in zip(train, sides, strict=True)
    ]
    return Sources([kept for kept, _ in halves], [held_out for _, held_out in halves])


def _configs(named: str | Sequence[LatentSourceConfig] | None) -> Sequence[LatentSourceConfig]:
    assert named is not None
    return [LatentSourceConfig(name=Path(named).stem, manifest=named)] if isinstance(named, str) else named


def _read(source: LatentSourceConfig, data: LatentDataConfig) -> NamedManifest:
    manifest = read_manifest(source.manifest, check_files=data.check_files)
    if data.text_conditioning == "task_prompt" and source.weight > 0:
        _check_texts(manifest)
    return NamedManifest(source.name, manifest, source.weight, source.layout)


def _check_texts(manifest: Manifest) -> None:
    """A model with cross-attention reads the text of every clip: one without is found now, not when it is drawn."""
    absent = manifest.missing_texts()
    if absent.any():
        row = int(absent.argmax())
        raise UserError(
            f"{manifest.path}, row {row + 1}, column text: clip {manifest.clip(row).clip_id} has no text, which "
            "data.text_conditioning=task_prompt needs of every clip; give it one, or set "
            "data.text_conditioning=disabled."
        )


def window_table(config: CausalConfig, sources: Sequence[NamedManifest]) -> WindowTable:
    """The windows of ``sources`` under the configured geometry. A condition frame needs one frame before a window.

    Raises UserError for a canvas that ``model.patch`` does not divide.
    """
    geometry = Geometry(config.data.buckets, seed=config.seed)
    lead = int(config.program.name == "chunked_conditioned")
    table = WindowTable(
        [SourceWindows(s.name, s.manifest, geometry, stride=config.data.window_stride, lead=lead) for s in sources]
    )
    for source in table.sources:
        _check_divisible(source, config.model.patch)
    return table


def _check_divisible(source: SourceWindows, patch: int) -> None:
    manifest = source.manifest
    for name, cells in (("height", manifest.height), ("width", manifest.width)):
        if cells is not None and (cells % patch).any():
            row = int((cells % patch > 0).argmax())
            raise UserError(
                f"{manifest.path}: clip {manifest.clip(row).clip_id} has {name} {cells[row]}, which does not divide by "
                f"model.patch={patch}; change the patch or the clip."
            )


def train_shares(config: CausalConfig, sources: Sequence[NamedManifest], table: WindowTable) -> list[Fraction]:
    """The share of draws asked for each source, exact.

    Raises UserError for a source that is to be drawn and gives no window, or that the manifest cannot weigh.
    """
    for source, windows in zip(sources, table.sources, strict=True):
        if source.weight > 0 and len(windows) == 0:
            raise UserError(_no_window(windows))
    meaning, weights = config.data.weights, [source.weight for source in sources]
    measures = table.weighing(meaning, patch=config.model.patch, weights=weights)
    return draw_shares(table.names, weights, measures, meaning=meaning)


def _no_window(source: SourceWindows) -> str:
    """The refusal of a source that gives nothing."""
    after = " after the condition frame" if source.lead else ""
    return (
        f"{source.manifest.path}: source {source.name} has no usable window: its {len(source.manifest)} training clips "
        f"have at most {source.longest_room} latent frames{after} and the shortest bucket needs "
        f"{source.geometry.shortest}; add shorter data.buckets or longer clips, or set its weight to 0."
    )


def train_stream(
    config: CausalConfig, sources: Sequence[NamedManifest], *, world: int
) -> tuple[RequestStream, list[Fraction]]:
    """The training stream over ``world`` ranks, and the share of draws asked for each source.

    Raises UserError for what :func:`window_table` and :func:`train_shares` refuse, grouping by shape, filling or
    balancing without height and width, a window beyond ``data.batching.fill_tokens``, and an epoch that does not fill
    one optimizer step.
    """
    data, batching = config.data, config.data.batching
    table = window_table(config, sources)
    shares = train_shares(config, sources, table)
    draws = MixtureDraws(table.names, table.sizes, shares, seed=config.seed, epoch_draws=data.epoch_draws)
    planner = MicrobatchPlanner(
        draws,
        table,
        seed=config.seed,
        world=world,
        batch=data.train_batch_size,
        accumulate=config.accumulate_grad_batches,
        tail="drop" if batching.drop_last_train else "repeat",
        mode=batching.mode,
        pool_size=batching.bucket_pool_size,
        bucket_order=batching.bucket_order,
        shape_grouping=data.shape_bucketed_batching,
        fill_tokens=batching.fill_tokens,
        patch=config.model.patch,
        cost=sample_cost(config.model, config.program) if batching.balance == "longest_first" else None,
    )
    if batching.fill_tokens is not None:
        patch, key = config.model.patch, "data.batching.fill_tokens"
        check_budget(planner, max_tokens=batching.fill_tokens, patch=patch, key=key)
    alternates = _ALTERNATES if data.on_bad_clip == "replace" else 0
    return RequestStream(planner, [source.layout for source in sources], alternates=alternates), shares


def validation_stream(config: CausalConfig, sources: Sequence[NamedManifest], *, world: int) -> RequestStream:
    """Every held-out window once, in order, whatever the batching mode; a short last batch is kept.

    ``trainer.limit_val_batches`` bounds it: that share of the windows, or so many times ``data.val_batch_size`` of
    them over all ranks together, spread evenly over all sources. Which ones depends on neither mode nor ``world``.
    Raises UserError when no held-out clip has a usable window, or the limit leaves none.
    """
    table = window_table(config, sources)
    if sum(table.sizes) == 0:
        raise UserError(
            f"the validation side has no usable window in its {sum(len(s.manifest) for s in sources)} clips; hold out "
            "more (data.val_fraction), name longer clips in data.val or add shorter data.buckets."
        )
    taken = _validated(config, sum(table.sizes))
    planner = MicrobatchPlanner(
        SequentialDraws(table.sizes) if taken == sum(table.sizes) else SpreadDraws(table.sizes, taken),
        table,
        seed=config.seed,
        world=world,
        batch=config.data.val_batch_size,
        tail="keep",
    )
    return RequestStream(planner, [source.layout for source in sources])


def _validated(config: CausalConfig, windows: int) -> int:
    """How many of ``windows`` a validation looks at."""
    limit = config.trainer.limit_val_batches
    if limit is None:
        return windows
    taken = int(windows * limit) if isinstance(limit, float) else min(windows, limit * config.data.val_batch_size)
    if taken < 1:
        raise UserError(
            f"trainer.limit_val_batches={limit} leaves none of the {windows} windows of validation; raise it, or set "
            "it to 0 for no validation"
        )
    return taken


def validated_counts(stream: RequestStream) -> list[int]:
    """How many windows of each source one validation looks at."""
    draws = stream.planner.draws
    return list(draws.counts) if isinstance(draws, SpreadDraws) else stream.planner.windows.sizes
