"""Each row of the table of docs/data.md, run as it stands there; and the same sources read without a store."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from marey.cli import SOURCES, main
from marey.latents.codecs import build_codec
from marey.latents.encode import encode
from marey.pixels.episodes import FrameRequest
from marey.pixels.open import open_source
from marey.pixels.store import FrameStore

from .conftest import make_video, number_of
from .format_cases import (
    CAMERAS,
    EPISODES,
    FPS,
    TASKS,
    huggingface,
    make_animation,
    make_lerobot,
    make_shards,
    make_stills,
)

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
ROWS = dict(re.findall(r"^\| ([^|]+?) \| `(marey ingest [^`]+)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
"""What one has, and the command for it."""

Expected = list[tuple[int, int, str | None, str | None]]
SHARDS: Expected = [(4 + n, 10 * n, str(n % 2), f"clip number {n}") for n in range(5)]
EPISODE_ROWS: Expected = [(n, sum(EPISODES[:i]), None, TASKS[i % 2]) for i, n in enumerate(EPISODES)]
HUB: Expected = [(5 + n, 20 * n, ("walk", "run")[n % 2], f"row {n}") for n in range(3)]
# Of each video: frames, the number of the first one, label, text.
EXPECTED: dict[str, Expected] = {
    "a folder": [(6, 0, None, None), (8, 30, None, None)],
    "class folders": [(5, 0, "jump", None), (5, 40, "run", None)],
    "single files, patterns": [(5, 60, None, None), (4, 0, None, None), (4, 20, None, None)],
    "a CSV": [(6, 0, "a walk", "someone walks"), (8, 30, "a run", None)],
    "a plain list": [(8, 30, None, None), (5, 60, None, None)],
    "animated GIF, WebP": [(4, 0, None, None), (5, 0, None, None)],
    "folders of images": [(12, 0, None, None), (5, 50, None, None)],
    "WebDataset": SHARDS,
    "LeRobot v2, v3": EPISODE_ROWS,
    "one of several cameras": EPISODE_ROWS,
    "Hugging Face, saved": HUB,
    "Hugging Face, Parquet": HUB,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which the page's commands have something to read."""
    root, scratch = tmp_path_factory.mktemp("world"), tmp_path_factory.mktemp("scratch")
    make_video(root / "videos/clip 2.mp4", frames=6, rate=FPS)
    make_video(root / "videos/clip 10.mkv", frames=8, first=30, rate=FPS)
    make_video(root / "classes/jump/1.mp4", frames=5, rate=FPS)
    make_video(root / "classes/run/1.mp4", frames=5, first=40, rate=FPS)
    make_video(root / "one.mp4", frames=5, first=60, rate=FPS)
    make_video(root / "more/a.mp4", frames=4, rate=FPS)
    make_video(root / "more/deep/b.mp4", frames=4, first=20, rate=FPS)
    (root / "list.csv").write_text(
        "path,label,text\nvideos/clip 2.mp4,a walk,someone walks\nvideos/clip 10.mkv,a run,\n"
    )
    (root / "paths.txt").write_text("videos/clip 10.mkv\none.mp4\n")
    make_animation(root / "animations/a.gif", frames=4)
    make_animation(root / "animations/b.webp", frames=5)
    make_stills(root / "frames", episodes={"ep2": 12, "ep10": 5})
    make_shards(root / "shards", scratch)
    make_lerobot(root / "pusht", version="v2.1")
    make_lerobot(root / "aloha", version="v3.0", cameras=CAMERAS)
    dataset = huggingface(scratch)
    dataset.save_to_disk(str(root / "saved"))
    (root / "hub/data").mkdir(parents=True)
    dataset.to_parquet(str(root / "hub/data/train-00000-of-00001.parquet"))
    return root


def content(source: Any) -> Expected:
    """What ``EXPECTED`` says, from a source of episodes that are one video each."""
    videos = []
    for episode, length in enumerate(source.lengths.tolist()):
        (clip,) = source.read([FrameRequest(episode, np.arange(length))])
        numbers = [number_of(frame.permute(1, 2, 0).numpy()) for frame in clip]
        assert numbers == list(range(numbers[0], numbers[0] + length))
        label = int(source.labels[episode]) if source.labels is not None else -1
        name = (source.label_names[label] if source.label_names else str(label)) if label >= 0 else None
        videos.append((length, numbers[0], name, source.texts[episode] if source.texts else None))
    return videos


def test_every_row_of_the_page_has_an_expectation_and_the_help_has_its_words() -> None:
    assert list(ROWS) == list(EXPECTED)
    for row in ROWS.values():
        first = shlex.split(row)[2].partition(":")[0].partition("{")[0].split("/")[0]
        assert first in SOURCES or first == "classes" or first == "paths.txt"


@pytest.mark.parametrize("kind", ROWS)
def test_the_command_of_the_page_does_what_the_page_says(
    kind: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(ROWS[kind])[1:]
    out = tmp_path / "mine.lance"
    words[words.index("mine.lance")] = str(out)
    monkeypatch.chdir(world)
    before = sorted(str(path) for path in world.rglob("*"))
    main([*words, *([] if "--rate" in words else ["--rate", str(FPS)]), "--workers", "1"])
    assert content(FrameStore.open(out)) == EXPECTED[kind]
    assert sorted(str(path) for path in world.rglob("*")) == before
    report = json.loads(out.with_name("mine.report.json").read_text())
    assert (report["refused"], report["partial"], report["repeats"]) == ([], [], 0)
    assert "files     " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["folders of images", "animated GIF, WebP", "WebDataset", "one of several cameras"])
def test_the_same_source_is_read_without_a_store(
    kind: str, world: Path, monkeypatch: pytest.MonkeyPatch, video_cache: Path
) -> None:
    monkeypatch.chdir(world)
    source = open_source(shlex.split(ROWS[kind])[2], video_rate=FPS, video_episode_length=128)
    assert content(source) == EXPECTED[kind]


def test_tasks_reach_the_manifest_of_latents(world: Path, tmp_path: Path, video_cache: Path) -> None:
    source = open_source(f"{world}/pusht", video_rate=FPS, video_episode_length=128)
    codec = build_codec("patch", {"patch": 16})
    done = encode(source, tmp_path / "latents", codec, dtype=torch.float32)
    with done.manifest.open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == [TASKS[n % 2] for n in range(len(EPISODES))]
    given = encode(source, tmp_path / "given", codec, texts=["mine"] * len(EPISODES), dtype=torch.float32)
    with given.manifest.open(newline="") as file:
        assert {row["text"] for row in csv.DictReader(file)} == {"mine"}
