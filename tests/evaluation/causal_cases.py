"""Small causal runs on encoded moving pictures: what a training run would have left, from a run of no steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import simplejpeg
import torch

from marey.config.causal import CausalConfig
from marey.config.compose import compose_container, validate
from marey.config.schema import describe
from marey.core.keys import torch_generator
from marey.latents.codecs import PatchCodec
from marey.latents.encode import encode
from marey.objectives.video_registry import build_causal, summary_keys

PATCH, SIDE, LENGTH = 4, 16, 12
SMALL = [
    f"data.codec.options={{patch: {PATCH}}}",
    "data.buckets=[[1,3],[2,4]]",
    "data.val_fraction=0.3",
    "model.hidden=16",
    "model.layers=1",
    "model.heads=2",
]


class Moving:
    """Episodes of frames in which a bar moves; every episode is of a video of its own."""

    def __init__(self, count: int = 8, length: int = LENGTH) -> None:
        self.name, self.path, self.version, self.rate = "moving", "/moving", "1", 15.0
        self.lengths = np.full(count, length, dtype=np.int64)
        self.labels = None
        self.files = [f"video {i}.mp4" for i in range(count)]

    def frames(self, episode: int) -> torch.Tensor:
        noise = np.random.default_rng(episode).integers(0, 60, size=(int(self.lengths[episode]), 3, SIDE, SIDE))
        for t, frame in enumerate(noise):
            frame[:, :, (episode + t) % SIDE] += 180
        return torch.from_numpy(noise.astype(np.uint8))

    def read(self, requests: Sequence[Any]) -> list[torch.Tensor]:
        return [self.frames(episode)[steps] for episode, steps in requests]


def encoded(folder: Path, *, texts: bool = False, **source: int) -> Path:
    """The manifest of ``Moving``, encoded."""
    moving = Moving(**source)
    words = [f"bar number {i}" for i in range(len(moving.files))] if texts else None
    return encode(moving, folder, PatchCodec(patch=PATCH), texts=words).manifest


def small_config(*overrides: str) -> CausalConfig:
    return validate(compose_container([*SMALL, *overrides], config_name="causal_video"), CausalConfig)


def causal_content(*overrides: str, text_channels: int | None = None) -> dict[str, Any]:
    """A causal checkpoint's content; weights away from their initial zeros, so that predictions differ."""
    config = small_config(*overrides)
    blank = torch.zeros(1, text_channels) if text_channels and config.program.text_dropout else None
    program = build_causal(config, channels=3 * PATCH**2, text_channels=text_channels, blank_text=blank)
    g = torch_generator(1, "test-weights")
    with torch.no_grad():
        for parameter in program.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.05)
    return {
        "state_dict": program.state_dict(),
        "marey": {
            "format": 1,
            "kind": "causal",
            "version": "0.1.0",
            "config": describe(config),
            "receipt": {"run_id": "20260101-000000-abcdef"},
            "preprocessing": {
                "format": 1,
                "layout": "B,C,T,H,W",
                "channels": 3 * PATCH**2,
                "canvas": [SIDE // PATCH, SIDE // PATCH],
                "rate": 15.0,
                "codec": {"name": "patch", "options": {"patch": PATCH}, "fingerprint": f"patch-1 patch={PATCH}"},
                "text": None,
            },
            "step": 40,
            "epoch": 1,
            "micro_step": 7,
            "world_size": 2,
            "effective_batch": 4,
            "statistic_batch": 4,
            "norm_group": None,
            "ema": None,
            "keys": dict(summary_keys),
        },
    }


def causal_checkpoint(path: Path, *overrides: str, text_channels: int | None = None, **changes: Any) -> Path:
    torch.save({**causal_content(*overrides, text_channels=text_channels), **changes}, path)
    return path


def write_store(path: Path, moving: Moving) -> None:
    """The frames of ``moving`` as a store, JPEG at full quality."""
    rows: dict[str, list[Any]] = {key: [] for key in ("episode_idx", "step_idx", "frame", "h", "w", "label")}
    for episode in range(len(moving.lengths)):
        for step, frame in enumerate(moving.frames(episode).permute(0, 2, 3, 1).numpy()):
            jpeg = simplejpeg.encode_jpeg(np.ascontiguousarray(frame), quality=100, colorsubsampling="444")
            for key, value in zip(rows, (episode, step, jpeg, SIDE, SIDE, 0), strict=True):
                rows[key].append(value)
    lance.write_dataset(pa.table(rows), str(path))
