"""The demonstration's second act: small latents of its clips, and the future that a small predictor gives them.

Legend: T frames, S the side of a small frame in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.evaluation.codec_record import record_codec
from marey.evaluation.films import moving_uri, side_by_side
from marey.evaluation.future_page import Film, Future
from marey.evaluation.pictures import data_uri
from marey.evaluation.rolling import COPY, PREDICTION, STILL, Rollout, mean
from marey.evaluation.rollout import frames_per_second, roll_out, write_rollouts
from marey.evaluation.run_folder import read_metrics
from marey.latents.codecs import PatchCodec
from marey.latents.encode import encode
from marey.latents.manifest import read_manifest
from marey.pixels.episodes import EpisodeSource, FrameRequest
from marey.pixels.evalclips import short_side_centre_crop
from marey.pixels.open import open_source

SIDE, PATCH = 24, 4
"""Pixels of a frame, and of a latent cell. A predictor of noise has to carry a whole patch through its width, so what
a minute can train needs small patches: two cells square of three colours are 192 numbers."""
TRAIN_CLIPS, HELD_OUT_CLIPS = 400, 60
MEASURED, SHOWN = 8, 3
"""Held-out futures that are measured, and those of them that are shown."""
HELD_OUT = (0.1, 0.2, 0.3, 0.5)
"""Shares held out, of which the first that leaves neither side empty is taken."""


@dataclass(frozen=True)
class _Small:
    """The first episodes of a source, every frame cut square and shrunk."""

    source: EpisodeSource
    episodes: int

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def version(self) -> str:
        return f"{self.source.version} {SIDE} {self.episodes}"

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.source.lengths[: self.episodes]

    @property
    def files(self) -> list[str]:
        return self.source.files[: self.episodes]

    @property
    def rate(self) -> float | None:
        return self.source.rate

    def read(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor]:
        return [short_side_centre_crop(frames, SIDE) for frames in self.source.read(requests)]


@dataclass(frozen=True)
class Latents:
    """What the second act trains on and is asked about."""

    overrides: list[tuple[str, str]]
    """configuration key and value"""
    asked: str | None
    """data to roll out; None: what the run holds out"""


def small_latents(store: str, held_out: str | None, folder: Path, *, say: Callable[[str], None]) -> Latents:
    """Encode the clips of ``store`` (and of ``held_out``) into ``folder`` through the patch codec.

    Without ``held_out`` the run holds out videos of its own, where there are enough of them to be held out.
    Raises UserError as ``encode`` does.
    """
    manifest = _encoded(store, folder / "train", clips=TRAIN_CLIPS, say=say)
    if held_out is not None:
        other = _encoded(held_out, folder / "heldout", clips=HELD_OUT_CLIPS, say=say)
        return Latents([("data.train", str(manifest)), ("data.val", str(other))], None)
    rows = read_manifest(manifest)
    for fraction in HELD_OUT:
        side = rows.validation_rows(fraction)
        if side.any() and not side.all():
            return Latents([("data.train", str(manifest)), ("data.val_fraction", f"{fraction:g}")], None)
    return Latents([("data.train", str(manifest)), ("data.val", str(manifest))], str(manifest))


def _encoded(store: str, out: Path, *, clips: int, say: Callable[[str], None]) -> Path:
    source = open_source(store, video_rate=15.0, video_episode_length=128)
    done = encode(_Small(source, min(clips, len(source.lengths))), out, PatchCodec(patch=PATCH))
    record_codec(out, "patch", {"patch": PATCH})
    say(f"  latents     {done.clips:,} clips of {source.name} at {SIDE} x {SIDE} pixels: {done.manifest}")
    return done.manifest


def futures(run: Path, checkpoint: Path, latents: Latents, *, seed: int) -> Future:
    """Roll out held-out clips, keep the files in ``run`` and tell what came out.

    Raises UserError as ``roll_out`` does.
    """
    loaded, rollouts = roll_out(checkpoint, data=latents.asked, clips=MEASURED, seed=seed, device="cpu")
    write_rollouts(run / "rollout", loaded, rollouts[:SHOWN])
    metrics = read_metrics(run / "metrics.csv")
    split = rollouts[0].clip.split
    return Future(
        films=[_film(item) for item in rollouts[:SHOWN]],
        errors={name: mean([item.mean(name) for item in rollouts]) for name in (PREDICTION, STILL, COPY)},
        clips=len(rollouts),
        known=split.known,
        predicted=split.horizon,
        held_out=all(item.clip.held_out for item in rollouts),
        steps=loaded.step,
        seconds=_last(metrics.get("wall_seconds", [])),
        padding=_last(metrics.get("padding_share", [])),
        metrics=metrics,
    )


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def _film(item: Rollout) -> Film:
    frames = side_by_side(
        [("what followed", item.target_pictures), ("predicted", item.predicted_pictures)], known=item.known_pictures
    )
    errors = {name: item.mean(name) for name in (PREDICTION, STILL)}
    share = f"{errors[PREDICTION] / errors[STILL]:.2f} of a still image's error" if errors[STILL] > 0 else "it is still"
    # At half speed, for eyes.
    uri = moving_uri(frames, fps=frames_per_second(item) / 2)
    return Film(uri, data_uri(frames[-1]), f"{item.clip.name.split('/')[-1]}: {share}")


def left_out(error: UserError) -> str:
    """The note where there is no second act."""
    return f"no future was predicted: {error}"
