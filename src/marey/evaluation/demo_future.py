"""The demonstration's second act: small latents of its clips, and the future that a small predictor gives them.

Legend: T frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from marey.core.errors import UserError
from marey.evaluation.future_films import film_of
from marey.evaluation.future_page import Future
from marey.evaluation.rolling import COPY, PREDICTION, STILL, mean
from marey.evaluation.rollout import roll_out, write_rollouts
from marey.evaluation.run_folder import read_metrics
from marey.latents.codec_record import record_codec
from marey.latents.codecs import build_codec
from marey.latents.encode import encode
from marey.latents.manifest import read_manifest, smallest_split
from marey.pixels.episodes import FrameRequest
from marey.pixels.open import open_source
from marey.pixels.shrunk import Shrunk

SIDE, PATCH = 16, 4
"""Pixels of a frame, and of a latent cell: 16 tokens a frame, of 48 numbers, are what a minute can train."""
TRAIN_CLIPS, HELD_OUT_CLIPS = 400, 60
SCALED_BY = 40
"""Clips whose pixels say what mean and deviation the codec takes out."""
MEASURED, SHOWN = 24, 3
"""Held-out futures that are measured, and those of them that are shown."""
HELD_OUT = (0.1, 0.2, 0.3, 0.5)
"""Shares held out, of which the first that leaves neither side empty is taken."""


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
    clips = _shrunk(store, TRAIN_CLIPS)
    options = {"patch": PATCH, **_scale(clips)}
    manifest = _encoded(clips, folder / "train", options, say=say)
    if held_out is not None:
        other = _encoded(_shrunk(held_out, HELD_OUT_CLIPS), folder / "heldout", options, say=say)
        return Latents([("data.train", str(manifest)), ("data.val", str(other))], None)
    fraction = smallest_split([read_manifest(manifest)], HELD_OUT)
    if fraction is not None:
        return Latents([("data.train", str(manifest)), ("data.val_fraction", f"{fraction:g}")], None)
    return Latents([("data.train", str(manifest)), ("data.val", str(manifest))], str(manifest))


def _shrunk(store: str, clips: int) -> Shrunk:
    return Shrunk(open_source(store, video_rate=15.0, video_episode_length=128), SIDE, clips)


def _scale(clips: Shrunk) -> dict[str, float]:
    """Mean and deviation of the pixels, in 0..1: flow matching adds noise of unit variance to what it is given."""
    requests = [FrameRequest(i, np.arange(clips.lengths[i])) for i in range(min(SCALED_BY, len(clips.lengths)))]
    pixels = torch.cat([frames.flatten() for frames in clips.read(requests)]).float() / 255
    return {"mean": round(float(pixels.mean()), 3), "std": max(round(float(pixels.std()), 3), 0.01)}


def _encoded(clips: Shrunk, out: Path, options: dict[str, float], *, say: Callable[[str], None]) -> Path:
    done = encode(clips, out, build_codec("patch", options))
    record_codec(out, "patch", options)
    say(f"  latents     {done.clips:,} clips of {clips.name} at {SIDE} x {SIDE} pixels: {done.manifest}")
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
        films=[film_of(item) for item in rollouts[:SHOWN]],
        errors={name: mean([item.mean(name) for item in rollouts]) for name in (PREDICTION, STILL, COPY)},
        by_frame={name: _by_frame([item.errors[name] for item in rollouts]) for name in (PREDICTION, STILL)},
        clips=len(rollouts),
        known=split.known,
        predicted=split.horizon,
        held_out=all(item.clip.held_out for item in rollouts),
        steps=loaded.step,
        seconds=_last(metrics.get("wall_seconds", [])),
        padding=_last(metrics.get("padding_share", [])),
        metrics=metrics,
    )


def _by_frame(futures: Sequence[Sequence[float]]) -> list[float]:
    """Mean of each frame over the futures that have it."""
    longest = max(len(future) for future in futures)
    return [mean([future[t] for future in futures if t < len(future)]) for t in range(longest)]


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def left_out(error: UserError) -> str:
    """The note where there is no second act."""
    return f"no future was predicted: {error}"
