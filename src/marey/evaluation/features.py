"""Clips of any source through one or more frozen encoders.

Legend: B clips of a batch, T frames, D features, G = T / tubelet_size positions along time,
N = G*rows*columns tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.core.progress import Progress
from marey.core.tokens import TokenGroup, grid_positions, grid_shape, patchify
from marey.evaluation.preprocessing import Preprocessing
from marey.models.vit import VisionTransformer
from marey.pixels.digits import demo_source
from marey.pixels.episodes import EpisodeSource
from marey.pixels.evalclips import EvalClips
from marey.pixels.open import open_source
from marey.pixels.reading import Refusal

Per = Literal["clip", "frame"]
VIDEO_RATE = 15.0
VIDEO_EPISODE_LENGTH = 128


@dataclass(frozen=True)
class FeatureBatch:
    """Features of consecutive clips, by encoder name.

    values: float32 on the CPU: ``[B, D]`` for ``per="clip"`` (the [CLS] output), ``[B, G, D]`` for
    ``per="frame"`` (the mean of the patch outputs at each position along time).
    """

    values: dict[str, torch.Tensor]
    episodes: NDArray[np.int64]
    clips: NDArray[np.int64]
    """The clip's number within its episode."""
    starts: NDArray[np.int64]
    """The stored step of the clip's first frame."""
    refused: list[Refusal]
    """Clips of this stretch that could not be read; they have no row."""


def open_clips(path: str, preprocessing: Preprocessing) -> EpisodeSource:
    """A frame store, videos, or ``demo:train`` / ``demo:heldout``; videos are read at the training rate."""
    if path.startswith("demo:"):
        path = str(demo_source(path.removeprefix("demo:")))
    return open_source(
        path,
        name=None,
        video_rate=preprocessing.rate or VIDEO_RATE,
        video_episode_length=VIDEO_EPISODE_LENGTH,
    )


def rate_remark(source: EpisodeSource, preprocessing: Preprocessing) -> str | None:
    """A sentence when the source's frames are spaced otherwise in time than in training, else None."""
    here, trained = source.rate, preprocessing.rate
    if here is None or trained is None or abs(here - trained) <= 0.01 * trained:
        return None
    return (
        f"{source.path} holds {here:g} frames/s and the encoder was trained at {trained:g}: motion looks "
        f"{trained / here:.2g} times as fast as it did in training; ingest with --rate {trained:g} to match"
    )


def video_names(source: EpisodeSource) -> list[str]:
    """``[episodes]``: what makes two episodes the same video; a source's path stands in for unnamed files.

    Links are followed, so that a video is one video by whatever path it was reached.
    """
    real = {file: os.path.realpath(file) if os.path.isabs(file) else file for file in set(source.files)}  # noqa: PTH117
    return [
        f"{os.path.realpath(source.path)}#{file}" if file == f"episode {file.rsplit(' ', 1)[-1]}" else real[file]
        for file in source.files
    ]


def evaluation_clips(source: EpisodeSource, preprocessing: Preprocessing, *, clips_per_episode: int) -> EvalClips:
    """Evenly spaced clips of every episode; one shorter than a clip repeats its last frame, so none is missing.

    Raises UserError for ``clips_per_episode`` below 1.
    """
    if clips_per_episode < 1:
        raise UserError(f"--clips-per-video {clips_per_episode} must be 1 or more")
    return EvalClips(
        source,
        num_frames=preprocessing.num_frames,
        frame_stride=preprocessing.frame_stride,
        img_size=preprocessing.img_size,
        clips_per_episode=clips_per_episode,
        pad_short="repeat",
    )


def short_remark(clips: EvalClips) -> str | None:
    """A sentence when episodes shorter than a clip had their last frame repeated, else None."""
    index = clips.index
    if not index.padded_short:
        return None
    return (
        f"{index.padded_short} of {len(index)} episodes of {index.name} are shorter than a clip; "
        "their last frame is repeated"
    )


def capped_remark(clips: EvalClips) -> str | None:
    """A sentence when episodes have fewer distinct clips than asked for, else None."""
    if not clips.capped:
        return None
    return (
        f"{clips.capped} of {len(clips.index)} episodes of {clips.index.name} have fewer than "
        f"{clips.clips_per_episode} distinct clips and give each of theirs once: {len(clips):,} clips in all"
    )


def refusal_remark(refused: Sequence[Refusal]) -> str | None:
    """A sentence when clips could not be read, with the first reason, else None."""
    if not refused:
        return None
    clips = "clip" if len(refused) == 1 else "clips"
    return f"{len(refused)} {clips} could not be read and have no features; the first: {refused[0].reason}"


@torch.inference_mode()
def stream_features(
    encoders: Mapping[str, VisionTransformer],
    preprocessing: Preprocessing,
    clips: EvalClips,
    *,
    per: Per = "clip",
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    label: str = "embed",
) -> Iterator[FeatureBatch]:
    """All ``clips``, in order, through every encoder; frames are read and resized once for all encoders.

    Nothing random, and the same features whatever ``batch_size`` (but for rounding). Raises UserError for
    features that are not finite.
    """
    with Progress(label, total=len(clips), unit="clips") as progress:
        for first in range(0, len(clips), batch_size):
            items = range(first, min(first + batch_size, len(clips)))
            found = clips.__getitems__(items)
            values: dict[str, torch.Tensor] = {}
            if len(found.episodes):
                video = preprocessing.normalize(found.video.to(device))
                values = {name: summarise(encoder, video, per).cpu() for name, encoder in encoders.items()}
            for name, value in values.items():
                if not bool(value.isfinite().all()):
                    raise UserError(f"the {name} encoder's features are not finite: its training diverged")
            yield FeatureBatch(values, found.episodes, found.clips, found.starts, found.refused)
            progress.advance(len(items))


def summarise(encoder: VisionTransformer, video: torch.Tensor, per: Per) -> torch.Tensor:
    """Normalised clips ``[B, 3, T, H, W]`` -> float32 ``[B, D]`` or ``[B, G, D]``, see ``FeatureBatch``."""
    if per == "clip":
        # The [CLS] of the full forward pass, without the last block's work on the patches.
        patch, tubelet = encoder.patch_size, encoder.tubelet_size
        grid = grid_shape(*video.shape[2:], patch=patch, tubelet=tubelet)
        positions = grid_positions(grid).to(video.device).unsqueeze(0)  # one grid for all clips
        group = TokenGroup(patchify(video, patch=patch, tubelet=tubelet), positions)
        return encoder.summarise_groups([group])[0].float()
    tokens: torch.Tensor = encoder(video)  # [B, 1+N, D]
    positions_in_time = video.shape[2] // encoder.tubelet_size
    patches = tokens[:, 1:].reshape(tokens.shape[0], positions_in_time, -1, tokens.shape[-1])
    return patches.mean(dim=2).float()


@dataclass(frozen=True)
class ClipFeatures:
    """All clips of a source: ``values`` by encoder name, float32 ``[n, D]``; the rest ``[n]``."""

    values: dict[str, NDArray[np.float32]]
    episodes: NDArray[np.int64]
    clips: NDArray[np.int64]
    refused: list[Refusal]


def clip_features(
    encoders: Mapping[str, VisionTransformer],
    preprocessing: Preprocessing,
    clips: EvalClips,
    *,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    label: str = "embed",
) -> ClipFeatures:
    """``stream_features`` of clips, gathered. Raises UserError where no clip could be read, too."""
    batches = list(stream_features(encoders, preprocessing, clips, batch_size=batch_size, device=device, label=label))
    refused = [refusal for b in batches for refusal in b.refused]
    read = [b for b in batches if len(b.episodes)]
    if not read:
        raise UserError(f"no clip of {clips.source.path} could be read; the first: {refused[0].reason}")
    return ClipFeatures(
        {name: torch.cat([b.values[name] for b in read]).numpy() for name in encoders},
        np.concatenate([b.episodes for b in read]),
        np.concatenate([b.clips for b in read]),
        refused,
    )
