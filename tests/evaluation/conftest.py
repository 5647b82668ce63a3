"""A tiny checkpoint with the real encoder in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from marey.config.compose import load_config
from marey.config.schema import describe
from marey.core.pixelstats import IMAGENET_MEAN, IMAGENET_STD
from marey.objectives.registry import build, summary_keys

SMALL = [
    "recipe=smoke",
    "model.img_size=16",
    "model.num_frames=4",
    "augmentation.local_size=8",
    "projector.hidden_dim=16",
    "projector.output_dim=8",
]


@pytest.fixture(scope="session")
def content() -> dict[str, Any]:
    """What a training run saves, from a run of no steps at all."""
    config = load_config(SMALL)
    objective = build(config)
    encoder = {key: value for key, value in objective.state_dict().items() if key.startswith("encoder.")}
    model = config.model
    return {
        "state_dict": objective.state_dict(),
        "state_dict_ema": {key: value * 1.5 if value.is_floating_point() else value for key, value in encoder.items()},
        "epoch": 2,
        "global_step": 40,
        "marey": {
            "format": 1,
            "kind": "encoder",
            "version": "0.1.0",
            "config": describe(config),
            "receipt": {"run_id": "20260101-000000-abcdef", "code": {"commit": "0123456789abcdef"}},
            "preprocessing": {
                "format": 1,
                "mean": list(IMAGENET_MEAN),
                "std": list(IMAGENET_STD),
                "layout": "B,C,T,H,W",
                "num_frames": model.num_frames,
                "frame_stride": config.frame_stride,
                "rate": 15.0,
                "img_size": model.img_size,
                "patch_size": model.patch_size,
                "tubelet_size": model.tubelet_size,
                "resize": "short side to img_size, bicubic, antialias",
                "crop": "centre",
            },
            "step": 40,
            "epoch": 2,
            "micro_step": 40,
            "world_size": 2,
            "effective_batch": 16,
            "statistic_batch": 16,
            "norm_group": 8,
            "ema": {"updates": 20, "decay": 0.9, "update_every": 2, "compensate": True},
            "keys": dict(summary_keys),
        },
    }


@pytest.fixture
def write(tmp_path: Path, content: dict[str, Any]) -> Callable[..., Path]:
    """Save the content, with top-level changes, as a checkpoint."""

    def save(name: str = "last.ckpt", **changes: Any) -> Path:
        path = tmp_path / name
        torch.save({key: value for key, value in {**content, **changes}.items() if value is not None}, path)
        return path

    return save


@pytest.fixture
def checkpoint(write: Callable[..., Path]) -> Path:
    return write()
