"""Clips drawn from a source and looked at by one or more encoders, ready to be pictured and compared.

Legend: m clips that could be read, T frames, S pixels of a side, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.core.keys import rng
from marey.core.progress import Progress
from marey.evaluation.feature_maps import for_show
from marey.evaluation.features import evaluation_clips, video_names
from marey.evaluation.looking import Look, look
from marey.evaluation.pictures import Pixels, frames_last
from marey.evaluation.preprocessing import Preprocessing
from marey.models.vit import VisionTransformer
from marey.pixels.episodes import EpisodeSource
from marey.pixels.evalclips import EvalClips
from marey.pixels.reading import Refusal

BATCH = 8
"""Clips of one forward pass."""
THUMB_SIDE, THUMB_FRAMES = 96, 8


@dataclass(frozen=True)
class Pictured:
    """One clip, whole. frames: uint8 ``[T, S, S, 3]``; looks: what each encoder makes of it (n = 1)."""

    row: int
    frames: Pixels
    looks: Mapping[str, Look]


@dataclass(frozen=True)
class Gathered:
    """All clips that were looked at, by row ``[m]``, and those of them that are pictured."""

    summaries: Mapping[str, NDArray[np.float32]]
    """[CLS] outputs ``[m, D]``, by encoder"""
    thumbs: Sequence[Pixels]
    """``[t, s, s, 3]`` each: the clip, small"""
    names: Sequence[str]
    """what a person calls the clip"""
    labels: Sequence[str]
    """empty where nobody gave one"""
    videos: Sequence[str]
    """what makes two clips one video"""
    one_video: bool
    """all clips are of one file, whose episodes then count as videos"""
    pictured: Sequence[Pictured]
    refused: Sequence[Refusal]


def draw_clips(
    source: EpisodeSource, preprocessing: Preprocessing, *, count: int, seed: int
) -> tuple[EvalClips, list[int]]:
    """Clips of ``source`` and the numbers of ``count`` of them, drawn by the seed.

    Different episodes while there are enough; then several evenly spaced clips of each.
    """
    each = max(1, -(-count // max(1, len(source.lengths))))
    clips = evaluation_clips(source, preprocessing, clips_per_episode=each)
    return clips, rng(seed, "report-clips").permutation(len(clips))[:count].tolist()


def gather(
    encoders: Mapping[str, VisionTransformer],
    preprocessing: Preprocessing,
    clips: EvalClips,
    numbers: Sequence[int],
    *,
    pictured: int,
    device: torch.device | str = "cpu",
) -> Gathered:
    """Look at the clips with these ``numbers``; the first ``pictured`` that can be read, of different labels (of
    different videos, where there are no labels) while there are such, are kept whole.

    Raises UserError where none can be read, and as ``look`` does.
    """
    source = clips.source
    summaries: dict[str, list[torch.Tensor]] = {name: [] for name in encoders}
    thumbs: list[Pixels] = []
    episodes: list[int] = []
    starts: list[int] = []
    refused: list[Refusal] = []
    kept: list[Pictured] = []
    spare: list[Pictured] = []
    seen: set[str] = set()
    videos, one_video = _videos(source)
    several = clips.clips_per_episode > 1 or len(set(videos)) < len(videos) or one_video
    with Progress("look", total=len(numbers), unit="clips") as progress:
        for first in range(0, len(numbers), BATCH):
            found = clips.__getitems__(numbers[first : first + BATCH])
            refused.extend(found.refused)
            progress.advance(len(numbers[first : first + BATCH]))
            if not len(found.episodes):
                continue
            video = preprocessing.normalize(found.video.to(device))
            looks = {name: look(encoder, video) for name, encoder in encoders.items()}
            for name, made in looks.items():
                summaries[name].append(made.summary)
            for i, episode in enumerate(found.episodes.tolist()):
                row, frames = len(thumbs), frames_last(found.video[i])
                thumbs.append(for_show(frames, side=THUMB_SIDE, most=THUMB_FRAMES))
                episodes.append(episode)
                starts.append(int(found.starts[i]))
                sort = _label(source, episode) or videos[episode]
                new = sort not in seen
                if len(kept if new else spare) < pictured:
                    one = {name: _only(made, i) for name, made in looks.items()}
                    (kept if new else spare).append(Pictured(row, frames, one))
                    seen.add(sort)
    if not thumbs:
        reason = f"; the first: {refused[0].reason}" if refused else ""
        raise UserError(f"no clip of {source.path} could be read{reason}")
    return Gathered(
        summaries={name: torch.cat(parts).numpy() for name, parts in summaries.items()},
        thumbs=thumbs,
        names=[
            _name(source, episode, start if several else None) for episode, start in zip(episodes, starts, strict=True)
        ],
        labels=[_label(source, episode) for episode in episodes],
        videos=[videos[episode] for episode in episodes],
        one_video=one_video,
        pictured=[*kept, *spare][:pictured],
        refused=refused,
    )


def _only(made: Look, i: int) -> Look:
    return Look(*(part[i : i + 1].clone() for part in (made.patches, made.summary, made.attention, made.to_itself)))


def _videos(source: EpisodeSource) -> tuple[list[str], bool]:
    names = video_names(source)
    if len(set(names)) > 1:
        return names, False
    return [f"{name}#{episode}" for episode, name in enumerate(names)], True


def _name(source: EpisodeSource, episode: int, start: int | None) -> str:
    """The file; and where in its episode, for a clip that is not the only one of its file."""
    name = Path(source.files[episode]).name
    return name if start is None or source.rate is None else f"{name}, {start / source.rate:.1f} s"


def _label(source: EpisodeSource, episode: int) -> str:
    if source.labels is None or source.labels[episode] < 0:
        return ""
    label = int(source.labels[episode])
    names: Sequence[str] | None = getattr(source, "label_names", None)
    return names[label] if names else str(label)
