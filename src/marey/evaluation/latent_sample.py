"""Held-out latent clips to predict: from manifests, or straight from a frame store through the run's codec.

Legend: C channels, T latent frames, H and W the latent canvas.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from marey.config.causal import DEMO, CausalConfig, LatentSourceConfig
from marey.core.errors import UserError, nearest
from marey.core.keys import rng
from marey.core.mixing import text_keys
from marey.latents.codec_record import recorded_codec
from marey.latents.codecs import Codec, build_codec, latent_frames
from marey.latents.encode import encode_episode
from marey.latents.manifest import MANIFESTS, Manifest, read_manifest, recording_of
from marey.latents.requests import Layout
from marey.latents.sidecar import Expected, read_frames, sidecar_metadata
from marey.latents.text import label_text
from marey.pixels.digits import demo_source
from marey.pixels.episodes import EpisodeSource
from marey.pixels.open import open_source


class Split(NamedTuple):
    """Known latent frames, and how many to predict after them."""

    known: int
    horizon: int


@dataclass(frozen=True)
class LatentClip:
    """A stretch of one clip: what is given, what really followed, and how to look at it."""

    name: str
    latents: Tensor
    """float32 ``[C, known + horizon, H, W]``"""
    split: Split
    text: str | None
    fps: float | None
    """latent frames per second"""
    codec: Codec | None
    """None: nothing says what made these latents"""
    held_out: bool
    """whether the run's own split kept it from training, as far as its configuration tells"""


@dataclass(frozen=True)
class Candidates:
    """Clips of one source that may be chosen, by row."""

    source: str
    ids: Sequence[str]
    room: NDArray[np.int64]
    """int64 ``[clips]``: latent frames there are from the first usable one"""
    rows: NDArray[np.int64]
    """The clips that the run held out (all, where the source is a validation source or was named)."""
    held_out: bool
    read: _Reader


class _Reader(ABC):
    """Reads a clip by row."""

    @abstractmethod
    def load(self, row: int, split: Split) -> LatentClip:
        """Known and future frames of the clip."""


@dataclass(frozen=True)
class CodecChoice:
    """A codec named by a person instead of what the data says."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class _ManifestReader(_Reader):
    manifest: Manifest
    source: str
    layout: Layout | None
    lead: int
    config: CausalConfig
    chosen: CodecChoice | None

    def load(self, row: int, split: Split) -> LatentClip:
        clip = self.manifest.clip(row)
        latents = read_frames(
            clip.path,
            clip=f"{self.source}/{clip.clip_id}",
            expected=Expected(clip.length_frames, clip.height, clip.width),
            start=max(int(self.manifest.start[row]), self.lead) - self.lead,
            frames=split.known + split.horizon,
            layout=self.layout,
        )
        return LatentClip(
            name=f"{self.source}/{clip.clip_id}",
            latents=latents.float(),
            split=split,
            text=clip.text,
            fps=None if self.manifest.fps is None else float(self.manifest.fps[row]),
            codec=_codec_of(self.manifest.path, clip.path, self.config, self.chosen),
            held_out=True,
        )


@dataclass(frozen=True)
class _StoreReader(_Reader):
    store: EpisodeSource
    codec: Codec
    ids: Sequence[str]

    def load(self, row: int, split: Split) -> LatentClip:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "clip.safetensors"
            encode_episode(self.store, self.codec, row, file, clip=self.ids[row], dtype=torch.float16)
            length = latent_frames(int(self.store.lengths[row]), self.codec)
            expected, frames = Expected(length, None, None), split.known + split.horizon
            latents = read_frames(file, clip=self.ids[row], expected=expected, start=0, frames=frames)
        return LatentClip(
            name=f"{self.store.name}/{self.ids[row]}",
            latents=latents.float(),
            split=split,
            text=_label(self.store, row),
            fps=None if self.store.rate is None else self.store.rate / self.codec.temporal,
            codec=self.codec,
            held_out=True,
        )


def _label(store: EpisodeSource, episode: int) -> str | None:
    """The text that training conditions a clip of a store on: its label, by name where the store has names."""
    return None if store.labels is None else label_text(int(store.labels[episode]), getattr(store, "label_names", None))


def _codec_of(manifest: Path, sidecar: str, config: CausalConfig, chosen: CodecChoice | None) -> Codec | None:
    if chosen is not None:
        return build_codec(chosen.name, chosen.options)
    recorded = recorded_codec(manifest.parent)
    if recorded is not None:
        return build_codec(*recorded)
    made_by = (sidecar_metadata(sidecar) or {}).get("codec")
    if made_by is None:
        return None
    configured = build_codec(config.data.codec.name, config.data.codec.options)
    return configured if configured.fingerprint == made_by else None


def open_candidates(
    config: CausalConfig, *, data: str | None, lead: int, chosen: CodecChoice | None
) -> list[Candidates]:
    """The clips that a run with ``config`` held out, or those of ``data`` where it is given.

    ``lead`` frames (1 for a program with a condition frame) come before a clip's first predictable one.
    Raises UserError for data that cannot be opened.
    """
    val, fraction = (data if data is not None else config.data.val), None
    if val is None:
        val, fraction = config.data.sources or config.data.train, config.data.val_fraction
    assert val is not None  # the configuration demands one description of the data
    entries = [LatentSourceConfig(name=config.data.name, manifest=val)] if isinstance(val, str) else val
    found = [
        _candidates(config, entry, fraction=fraction, named=data is not None, lead=lead, chosen=chosen)
        for entry in entries
    ]
    if fraction is not None and all(len(candidates.rows) == len(candidates.ids) for candidates in found):
        # A split that leaves nothing to train on is not made: such a run, without validation, trained on every clip.
        return [replace(candidates, rows=candidates.rows[:0]) for candidates in found]
    return found


def _candidates(
    config: CausalConfig,
    entry: LatentSourceConfig,
    *,
    fraction: float | None,
    named: bool,
    lead: int,
    chosen: CodecChoice | None,
) -> Candidates:
    path = manifest_path(entry.manifest)
    if path is not None:
        manifest = read_manifest(path)
        first = np.maximum(manifest.start, lead) - lead
        rows = np.ones(len(manifest), dtype=bool) if fraction is None else manifest.validation_rows(fraction)
        ids = [str(name) for name in manifest.texts("clip_id")]
        return Candidates(
            source=entry.name,
            ids=ids,
            room=manifest.length_frames - first,
            rows=np.flatnonzero(rows),
            held_out=not named,
            read=_ManifestReader(manifest, entry.name, entry.layout, lead, config, chosen),
        )
    store = open_frames(entry.manifest, config)
    codec = (
        build_codec(config.data.codec.name, config.data.codec.options)
        if chosen is None
        else build_codec(chosen.name, chosen.options)
    )
    ids = [f"{store.name}-{episode:06d}" for episode in range(len(store.lengths))]
    rows = np.ones(len(ids), dtype=bool) if fraction is None else _held_out_episodes(store, fraction)
    return Candidates(
        source=entry.name,
        ids=ids,
        room=np.array([latent_frames(int(frames), codec) for frames in store.lengths], dtype=np.int64),
        rows=np.flatnonzero(rows),
        held_out=not named,
        read=_StoreReader(store, codec, ids),
    )


def manifest_path(path: str) -> Path | None:
    """The manifest that ``path`` is, or the one in the folder that `marey encode` wrote; None for anything else."""
    file = Path(path).expanduser()
    if file.suffix.lower() in MANIFESTS:
        return file
    inside = file / "manifest.csv"
    return inside if inside.is_file() else None


def open_frames(path: str, config: CausalConfig) -> EpisodeSource:
    """The frames behind ``path``: ``demo:SPLIT``, a store, or video files at the configured rate."""
    if path.startswith(DEMO):
        path = str(demo_source(path.removeprefix(DEMO)))
    return open_source(
        path, name=None, video_rate=config.data.video_rate, video_episode_length=config.data.video_episode_length
    )


def _held_out_episodes(store: EpisodeSource, fraction: float) -> NDArray[np.bool_]:
    """The split of the manifest that encoding ``store`` gives: by the video file, so that no file is on both sides."""
    nothing = np.zeros(len(store.files), dtype=np.int64)
    keys = pa.table(
        {
            "clip_id": [str(i) for i in range(len(store.files))],
            "physical_key": [recording_of(file) for file in store.files],
        }
    )
    manifest = Manifest(
        path=Path(store.path),
        table=keys,
        length_frames=store.lengths,
        start=nothing,
        height=None,
        width=None,
        fps=None,
        clip_keys=text_keys(store.files),
        ignored_columns=(),
    )
    return manifest.validation_rows(fraction)


def choose(
    candidates: Sequence[Candidates], splits: Sequence[Split], *, clip: str | None, count: int, seed: int
) -> list[LatentClip]:
    """``count`` clips drawn by ``seed`` (or the one named), each with the first of ``splits`` that fits.

    All share one split: the first for which there are clips at all. Raises UserError where nothing is long enough,
    or no clip has that name.
    """
    if clip is not None:
        found = [(c, list(c.ids).index(clip)) for c in candidates if clip in c.ids]
        if not found:
            close = nearest(clip, [name for c in candidates for name in c.ids])
            hint = f"did you mean {close}?" if close else f"one of them is {candidates[0].ids[0]}"
            raise UserError(f"--clip {clip} is not a clip of {', '.join(c.source for c in candidates)}; {hint}")
        pool = found[:1]
    else:
        pool = [(c, int(row)) for c in candidates for row in c.rows]
    if not pool:
        raise UserError(
            f"the run's split holds out no clip of {', '.join(c.source for c in candidates)}; name clips with --data"
        )
    for split in splits:
        fitting = [(c, row) for c, row in pool if c.room[row] >= split.known + split.horizon]
        if fitting:
            order = rng(seed, "rollout-clips").permutation(len(fitting))[:count]
            picked = [fitting[int(i)] for i in order]
            return [_load(c, row, split) for c, row in picked]
    least = min(split.known + split.horizon for split in splits)
    longest = max(int(c.room[row]) for c, row in pool)
    raise UserError(
        f"no held-out clip has the {least} latent frames that this needs (the longest has {longest}); use a smaller "
        "--horizon or --prefix"
    )


def _load(candidates: Candidates, row: int, split: Split) -> LatentClip:
    clip = candidates.read.load(row, split)
    held_out = candidates.held_out and bool((candidates.rows == row).any())
    return LatentClip(**{**clip.__dict__, "held_out": held_out})
