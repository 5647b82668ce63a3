"""A small real store, and runs on it that share one import of Lightning."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
import torch

from marey.config.compose import load_config
from marey.config.schema import EncoderConfig
from marey.training.again import Again

EPISODES, FRAMES, SIDE = 24, 10, 40
SMALL = (
    "recipe=smoke",
    "data=custom",
    "model.img_size=32",
    "model.num_frames=4",
    "augmentation.local_size=16",
    "augmentation.local_crops_number=1",
    "loader.batch_size=4",
    "projector.hidden_dim=16",
    "projector.output_dim=8",
    "loss.sigreg.kwargs.num_proj=16",
    "trainer.logger=false",
    "trainer.enable_progress_bar=false",
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 episodes of 10 JPEG frames, each a drifting gradient of its own."""
    path = tmp_path_factory.mktemp("store") / "small.lance"
    write_store(path, episodes=EPISODES)
    return path


def write_store(path: Path, *, episodes: int, frames: int = FRAMES) -> None:
    rows: dict[str, list[Any]] = {key: [] for key in ("episode_idx", "step_idx", "frame", "h", "w", "label")}
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    for episode in range(episodes):
        for step in range(frames):
            wave = 128 + 100 * np.sin((x * (episode % 5 + 1) + y * (episode % 3) + 6 * step) / 9.0 + episode)
            picture = np.stack([wave, wave[::-1], 255 - wave], axis=-1).clip(0, 255).astype(np.uint8)
            values = (episode, step, simplejpeg.encode_jpeg(np.ascontiguousarray(picture)), SIDE, SIDE, episode % 3)
            for key, value in zip(rows, values, strict=True):
                rows[key].append(value)
    lance.write_dataset(pa.table(rows), str(path))


@pytest.fixture
def small(store: Path) -> Callable[..., EncoderConfig]:
    """The small configuration on the store, with overrides."""

    def configure(*overrides: str) -> EncoderConfig:
        return load_config([*SMALL, f"data.train={store}", *overrides])

    return configure


class Finished:
    """What a run left behind."""

    def __init__(self, folder: Path, checkpoints: Path, lines: list[str], newest: Path | None) -> None:
        self.folder, self.checkpoints, self.lines, self.newest = folder, checkpoints, lines, newest

    def checkpoint(self, name: str = "last.ckpt") -> dict[str, Any]:
        return dict(torch.load(self.checkpoints / name, weights_only=True))

    def rows(self) -> list[dict[str, str]]:
        with (self.folder / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture
def train(small: Callable[..., EncoderConfig], tmp_path: Path) -> Callable[..., Finished]:
    """Runs ``fit`` in this process."""

    def run(name: str, *overrides: str, checkpoints: str | None = None) -> Finished:
        from marey.training.fit import fit

        folder, kept = tmp_path / name, tmp_path / (checkpoints or f"{name}-checkpoints")
        folder.mkdir(exist_ok=True)
        lines: list[str] = []
        newest = fit(
            small(*overrides),
            run_dir=folder,
            checkpoint_dir=kept,
            differences=["seed=1 (recipe: 0)"],
            command=["marey", "train", *overrides],
            again=Again(program=["marey", "train"], overrides=overrides, folder=tmp_path, run_dir=folder),
            say=lines.append,
        )
        return Finished(folder, kept, lines, newest)

    return run
