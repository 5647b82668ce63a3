"""From a causal run's configuration to micro-steps of latent batches: manifests, streams, reader, loader."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from marey.config.causal import CausalConfig, LatentDataConfig, LatentSourceConfig
from marey.core.errors import UserError
from marey.latents.requests import WindowRequest
from marey.sampling.budget import check_budget
from marey.sampling.latent_stream import NamedManifest, Sources, read_sources, train_stream, validation_stream
from marey.sampling.planner import MicrobatchPlanner
from marey.sampling.stream import RequestStream

DEMO = "demo:"
MANIFESTS = (".csv", ".parquet", ".pq")
DEMO_SIDE = 32
"""Pixels of the demo's frames before they are encoded: small enough to train on in minutes without a GPU."""
CODEC = "codec.json"
"""Beside a manifest that was encoded here: the codec's name and options."""
PRELOADED = ("marey.training.latent_batch", "marey.latents.dataset")
"""What a worker that reads latents imports."""


def is_manifest(path: str) -> bool:
    """Whether ``path`` names a manifest by its ending; anything else holds frames."""
    return Path(path).suffix.lower() in MANIFESTS


def named_paths(data: LatentDataConfig) -> dict[str, list[str]]:
    """The paths of the training and the validation side, by configuration key."""
    found = {"data.train": [data.train] if data.train is not None else []}
    if data.sources is not None:
        found["data.sources"] = [source.manifest for source in data.sources]
    if data.val is not None:
        found["data.val"] = [data.val] if isinstance(data.val, str) else [source.manifest for source in data.val]
    return found


def encoding_name(data: LatentDataConfig, *identity: str) -> str:
    """A folder name that belongs to one codec and its options, and to ``identity``."""
    text = json.dumps([data.codec.name, data.codec.options, *identity], sort_keys=True)
    return f"{data.codec.name}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def demo_latents(split: str, data: LatentDataConfig) -> str:
    """The folder of a demo split's latents, beside its store."""
    return f"latents-{split}-{DEMO_SIDE}-{encoding_name(data)}"


def built_manifest(path: str, data: LatentDataConfig) -> Path | None:
    """The manifest that ``path`` stands for, where it exists already; nothing is built and torch stays unloaded."""
    if is_manifest(path):
        return Path(path).expanduser()
    if path.startswith(DEMO):
        from marey.pixels.digits import built_source

        split = path.removeprefix(DEMO)
        store = built_source(split)
        manifest = None if store is None else store.parent / demo_latents(split, data) / "manifest.csv"
        return manifest if manifest is not None and manifest.is_file() else None
    return None


def resolve_data(data: LatentDataConfig) -> LatentDataConfig:
    """``data`` with manifests in place of stores, videos and the demo, which are encoded once into the cache.

    Raises:
        UserError: a store that cannot be opened, a codec that does not exist, frames that it cannot encode.
    """
    from marey.training.latent_store import encoded

    return with_manifests(data, lambda path: encoded(path, data))


def with_manifests(data: LatentDataConfig, manifest_of: Callable[[str], Path]) -> LatentDataConfig:
    """``data`` with what holds frames replaced by its manifest, a source called ``data.name``."""

    def source(path: str) -> list[LatentSourceConfig]:
        return [LatentSourceConfig(name=data.name, manifest=str(manifest_of(path)))]

    changes: dict[str, Any] = {}
    if data.train is not None and not is_manifest(data.train):
        changes |= {"train": None, "sources": source(data.train)}
    if isinstance(data.val, str) and not is_manifest(data.val):
        changes["val"] = source(data.val)
    return data.model_copy(update=changes)


class Streams(NamedTuple):
    """Both sides of a run's data. ``counting`` plans the same as ``train``, with caches of its own."""

    sources: Sources
    train: RequestStream
    counting: MicrobatchPlanner
    shares: list[Fraction]
    val: RequestStream | None


def open_streams(config: CausalConfig, *, world: int, validates: bool) -> Streams:
    """Read every manifest and plan; ``config.data`` names manifests alone (see :func:`resolve_data`).

    Raises:
        UserError: a bad row, a source that gives nothing, too little for one optimizer step, a window beyond the
            token budget.
    """
    sources = read_sources(config.data)
    train, shares = train_stream(config, sources.train, world=world)
    counting, _ = train_stream(config, sources.train, world=world)
    val = validation_stream(config, sources.val, world=world) if validates else None
    if config.data.batching.max_tokens is not None:
        check_budget(train.planner, max_tokens=config.data.batching.max_tokens, patch=config.model.patch)
    return Streams(sources, train, counting.planner, shares, val)


class Walk:
    """Micro-steps counted through all epochs of the data, whose lengths may differ where canvases are grouped."""

    def __init__(self, planner: MicrobatchPlanner) -> None:
        self._planner = planner
        self._equal = None if planner.shape_grouping else planner.micro_steps(0)
        self._ends: list[int] = []

    def at(self, micro_step: int) -> tuple[int, int]:
        """(epoch of the data, micro-step within it)."""
        if self._equal is not None:
            return divmod(micro_step, self._equal)
        while not self._ends or self._ends[-1] <= micro_step:
            self._ends.append((self._ends or [0])[-1] + self._planner.micro_steps(len(self._ends)))
        epoch = bisect_right(self._ends, micro_step)
        return epoch, micro_step - (self._ends[epoch - 1] if epoch else 0)

    def ends_epoch(self, micro_step: int) -> bool:
        """Whether this micro-step is the last of its epoch."""
        epoch, place = self.at(micro_step)
        return place + 1 == self._planner.micro_steps(epoch)


class LatentSteps:
    """Requests, micro-step by micro-step. ``per_epoch`` micro-steps are an epoch of the training loop.

    The loop's epochs go on where the one before stopped, so they are the data's own where those are of equal
    length. ``fixed_epoch`` repeats the first one.
    """

    chunks = 1
    batch_key = "data.train_batch_size"

    def __init__(self, stream: RequestStream, *, per_epoch: int, fixed_epoch: bool) -> None:
        self._stream, self._per_epoch, self._fixed_epoch = stream, per_epoch, fixed_epoch
        self._walk = Walk(stream.planner)

    def overall(self, epoch: int, micro_step: int) -> int:
        """The micro-step as counted through all epochs of the data."""
        return micro_step + (0 if self._fixed_epoch else epoch * self._per_epoch)

    def requests(self, epoch: int, micro_step: int, rank: int) -> list[list[WindowRequest]]:
        """One microbatch. A rank without a sample (the end of a validation) gets one that will count nothing."""
        asked = self._stream.requests(*self._walk.at(self.overall(epoch, micro_step)), rank)
        return [asked or self._stream.requests(0, 0, 0)[:1]]

    def files(self, epoch: int, micro_step: int, rank: int, chunk: int) -> list[str]:
        """The latent files of a microbatch."""
        return [
            f"{request.clip.path} ({request.source}/{request.clip.clip_id})"
            for request in self.requests(epoch, micro_step, rank)[chunk]
        ]

    def assemble(self, chunks: list[Any]) -> Any:
        """A micro-step is one microbatch."""
        return chunks[0]


def build_reader(config: CausalConfig) -> Any:
    """The dataset and its ``collate``, for :class:`~marey.training.loader.MicroStepLoader`."""
    from marey.latents.adapter import LatentAdapter
    from marey.latents.dataset import LatentDataset
    from marey.training.latent_batch import collate_read

    adapter = LatentAdapter(
        text=text_encoder(config),
        condition=config.program.name == "chunked_conditioned",
        verify=config.data.verify_sha256,
    )
    batching = config.data.batching
    collate = partial(collate_read, mode=batching.mode, pad_to_multiple_of=batching.pad_to_multiple_of)
    return LatentDataset(adapter), collate


def text_encoder(config: CausalConfig) -> Any:
    """What turns texts into conditioning tokens; None where the run has none."""
    if config.data.text_conditioning == "disabled":
        return None
    from marey.latents.text import HashingTextEncoder, PrecomputedText

    text = config.data.text
    if text.index is None:
        return HashingTextEncoder(width=text.width, token_limit=text.token_limit)
    return PrecomputedText(text.index, encoder=text.encoder, token_limit=text.token_limit)


def latent_channels(config: CausalConfig, sources: Sequence[NamedManifest]) -> int:
    """Channels of the first clip; ``model.channels``, where given, must agree.

    Raises:
        UserError: they do not.
    """
    from marey.latents.sidecar import read_shape

    first = next(source for source in sources if len(source.manifest))
    clip = first.manifest.clip(0)
    found = read_shape(clip.path, clip=f"{first.name}/{clip.clip_id}", layout=first.layout)[0]
    if config.model.channels not in (None, found):
        raise UserError(
            f"model.channels={config.model.channels} and {first.name}/{clip.clip_id} has {found}; set "
            "model.channels to null, or give the latents that it was meant for"
        )
    return found
