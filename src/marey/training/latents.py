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

from marey.config.causal import DEMO, CausalConfig, LatentDataConfig, LatentSourceConfig
from marey.core.errors import UserError
from marey.latents.manifest import MANIFESTS
from marey.latents.requests import WindowRequest
from marey.sampling.budget import check_budget, check_shapes
from marey.sampling.latent_stream import NamedManifest, Sources, read_sources, train_stream, validation_stream
from marey.sampling.planner import MicrobatchPlanner
from marey.sampling.stream import RequestStream

DEMO_SIDE = 32
"""Pixels of the demo's frames before they are encoded: small enough to train on in minutes without a GPU."""


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

    def manifest_of(path: str) -> Path:
        from marey.training.latent_store import encoded  # deferred: manifests need nothing of what reads frames

        return encoded(path, data)

    return with_manifests(data, manifest_of)


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
    """Both sides of a run's data. ``counting`` plans the same as ``train``, with caches of its own for microbatches."""

    sources: Sources
    train: RequestStream
    counting: MicrobatchPlanner
    shares: list[Fraction]
    val: RequestStream | None


def open_streams(config: CausalConfig, *, world: int, validates: bool) -> Streams:
    """Read every manifest and plan; ``config.data`` names manifests alone (see :func:`resolve_data`).

    Raises:
        UserError: a bad row, a source that gives nothing, too little for one optimizer step, and what
            :func:`check_streams` refuses.
    """
    sources = read_sources(config.data, validates=validates)
    train, shares = train_stream(config, sources.train, world=world)
    val = validation_stream(config, sources.val, world=world) if validates else None
    check_streams(config, train, val)
    return Streams(sources, train, train.planner.twin(), shares, val)


def check_streams(config: CausalConfig, train: RequestStream, val: RequestStream | None) -> None:
    """Refuse what no forward pass could hold. Raises UserError: a window beyond the token budget; held-out windows
    that cannot share a batch.
    """
    batching, patch = config.data.batching, config.model.patch
    if batching.max_tokens is not None:
        for stream in (train, val):
            if stream is not None:
                check_budget(stream.planner, max_tokens=batching.max_tokens, patch=patch)
    if val is not None:
        check_shapes(val.planner, strict=batching.mode == "strict", key="data.val_batch_size")


class Walk:
    """Micro-steps counted through all epochs of the data, whose lengths may differ where epochs are planned as a whole.

    A run has one: where they are, the first look at an epoch plans every epoch before it.
    """

    def __init__(self, planner: MicrobatchPlanner) -> None:
        self._planner = planner
        self._equal = None if planner.epochs_vary else planner.micro_steps(0)
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
        if self._equal is not None:
            return place + 1 == self._equal
        return micro_step + 1 == self._ends[epoch]


class LatentSteps:
    """Requests, micro-step by micro-step. ``per_epoch`` micro-steps are an epoch of the training loop.

    The loop's epochs go on where the one before stopped, so they are the data's own where those are of equal
    length. ``fixed_epoch`` repeats the first one. ``walk``: the run's own (None: one of this stream).
    """

    chunks = 1

    def __init__(self, stream: RequestStream, *, per_epoch: int, fixed_epoch: bool, walk: Walk | None = None) -> None:
        self._stream, self._per_epoch, self._fixed_epoch = stream, per_epoch, fixed_epoch
        self._walk = Walk(stream.planner) if walk is None else walk
        filled = stream.planner.fill_tokens is not None
        self.batch_key = "data.batching.fill_tokens" if filled else "data.train_batch_size"

    def overall(self, epoch: int, micro_step: int) -> int:
        """The micro-step as counted through all epochs of the data."""
        return micro_step + (0 if self._fixed_epoch else epoch * self._per_epoch)

    def requests(self, epoch: int, micro_step: int, rank: int) -> list[list[WindowRequest]]:
        """One microbatch. A rank without a sample (the end of a validation) gets one that will count nothing."""
        asked = self._stream.requests(*self._walk.at(self.overall(epoch, micro_step)), rank)
        return [asked or [self._any_request()]]

    def _any_request(self) -> WindowRequest:
        """The first one of the first micro-step, whichever rank has it: fewer windows than ranks leave some without."""
        ranks = range(self._stream.planner.world)
        return next(request for rank in ranks for request in self._stream.requests(0, 0, rank))

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
    from marey.latents.text import configured_encoder

    return configured_encoder(config.data.text)


def latent_channels(config: CausalConfig, sources: Sequence[NamedManifest]) -> int:
    """Channels of the first clip of each of ``sources``; ``model.channels``, where given, must agree.

    Raises:
        UserError: they do not, or one of these clips cannot be read.
    """
    from marey.latents.sidecar import read_shape

    channels, of = config.model.channels, ""
    for source in sources:
        if not len(source.manifest):
            continue
        clip = source.manifest.clip(0)
        name = f"{source.name}/{clip.clip_id}"
        found = read_shape(clip.path, clip=name, layout=source.layout)[0]
        if channels is not None and found != channels:
            if not of:
                raise UserError(
                    f"model.channels={channels} and {name} has {found}; set model.channels to null, or give the "
                    "latents that it was meant for"
                )
            raise UserError(
                f"{of} has {channels} channels and {name} has {found}; encode all sources with one codec, or declare "
                "the source's layout if it is not CTHW"
            )
        channels, of = found, name
    assert channels is not None, "no source has a clip"
    return channels
