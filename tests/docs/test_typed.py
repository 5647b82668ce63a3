"""The pages that tell the story are typed: their commands run, in order, on videos made here and models made small.

Words that stand for a person's own files are filled in, and a training command gets words behind it that make it
small. Otherwise every command is as it stands on the page.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from marey import cli
from marey.pixels.digits import encode
from tests.docs.checks import keys_of
from tests.docs.pages import ROOT, Words, commands, text_of

STORY = (ROOT / "docs" / "start-here.md", ROOT / "README.md", ROOT / "docs" / "causal.md")
ELSEWHERE = {
    ("marey", "demo"): "takes minutes: tests/test_story.py",
    ("marey", "doctor"): "takes half a minute: tests/test_doctor.py",
    ("marey", "plan"): "tests/docs/test_commands.py",
}
SMALL = {
    "loader.num_workers": "0",
    "trainer.max_steps": "2",
    "trainer.max_time": "null",
    "trainer.max_epochs": "-1",
    "trainer.accelerator": "cpu",
    "trainer.precision": "32-true",
    "scheduler.peak_step": "1",
}
SMALL_ENCODER = {
    "model.name": "vit_nano",
    "model.img_size": "32",
    "model.patch_size": "8",
    "model.num_frames": "4",
    "frame_stride": "1",
    "augmentation.local_size": "16",
    "augmentation.local_crops_number": "1",
    "loader.batch_size": "4",
    "loader.clips_per_video": "1",
    "projector.hidden_dim": "16",
    "projector.output_dim": "8",
    "loss.sigreg.kwargs.num_proj": "16",
}
SMALL_CAUSAL = {
    "model.hidden": "32",
    "model.layers": "1",
    "model.heads": "2",
    "data.buckets": "[[1,3]]",
    "data.val": "data/latents/manifest.csv",  # of twelve clips a twentieth may be none
}


def story() -> Iterator[Words]:
    """The commands of the pages, each once."""
    seen = set()
    for page in STORY:
        for command in commands(page):
            if command.words[0] == "marey" and command.words[:2] not in ELSEWHERE and command.words not in seen:
                seen.add(command.words)
                yield command


def write_videos(folder: Path) -> None:
    """Twelve videos of two classes: a square that goes right, or down."""
    for label, axis in (("right", 2), ("down", 1)):
        (folder / label).mkdir(parents=True)
        for number in range(6):
            first = np.full((1, 32, 32, 3), 40 + 10 * number, np.uint8)
            first[:, 4:12, 4:12] = 220
            frames = np.concatenate([np.roll(first, step * (1 + number % 2), axis=axis) for step in range(12)])
            encode(folder / label / f"{number}.mp4", frames, "libx264")


def filled_in(words: tuple[str, ...]) -> list[str]:
    """A person's own files in place of what stands for them, and a training made small."""
    runs = sorted(Path("outputs").glob("*/*"))
    found = [str(runs[-1]) if word == "outputs/DATE/TIME" else word for word in words]
    if words[1] == "train":
        small = SMALL | (SMALL_CAUSAL if "causal_video" in words else SMALL_ENCODER)
        found += [f"{key}={value}" for key, value in small.items()]
    return found


class Typed(NamedTuple):
    """What was typed, and where it left its files."""

    folder: Path
    commands: list[str]
    runs: list[Path]
    """the run folders, as their runs were started"""


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Typed:
    """The story, typed in one folder."""
    folder = tmp_path_factory.mktemp("story")
    write_videos(folder / "VIDEOS")
    done = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MAREY_CACHE", str(folder / "cache"))
        for command in story():
            words = filled_in(command.words)
            if "data/labelled.lance" in words and not Path("data/labelled.lance").exists():
                shutil.copytree("data/mine.lance", "data/labelled.lance")  # class folders are labels
            patch.setattr(sys, "argv", words)
            out, err = io.StringIO(), io.StringIO()
            try:
                with redirect_stdout(out), redirect_stderr(err):
                    cli.main(words[1:])
            except SystemExit as left:
                pytest.fail(f"{command}\nleft with {left.code}: {err.getvalue()}")
            assert out.getvalue().strip(), f"{command}\nsaid nothing"
            done.append(words[1])
    return Typed(folder, done, sorted(folder.glob("outputs/*/*")))


def test_the_story_of_the_pages_can_be_typed(typed: Typed) -> None:
    assert {"ingest", "inspect", "embed", "probe", "report", "export", "encode", "rollout"} <= set(typed.commands)
    assert typed.commands.count("train") == len(typed.runs) == 2
    for made in ("data/mine.lance", "features.parquet", "my-encoder/model.safetensors", "rollout/rollout.mp4"):
        assert (typed.folder / made).exists(), made


def test_the_receipt_page_names_all_that_a_run_leaves(typed: Typed) -> None:
    named = set(re.findall(r"[\w./-]+", " ".join(re.findall(r"`([^`]+)`", text_of(ROOT / "docs" / "receipt.md")))))
    left = {"TensorBoard's": "tensorboard", "Hydra's": ".hydra", "the report's": "run-report.html"}
    for run in typed.runs:
        receipt = json.loads((run / "receipt.json").read_text(encoding="utf-8"))
        keys = set(receipt)
        for section in ("code", "host", "recipe", "batch", "steps", "data", "consumed", "ema"):
            keys |= set(receipt[section])
        for entries in ("attempts", "checkpoints", "differences_from_published_code"):
            keys |= {key for entry in receipt[entries] for key in entry}
        keys |= {key for source in receipt["data"]["train"] for key in source}
        keys |= {key for source in receipt["consumed"]["per_source"] for key in source}
        configured = {key.rpartition(".")[2] for name in ("config", "causal_video") for key in keys_of(name)}
        assert not keys - configured - named, f"{receipt['kind']}: receipt.json has keys that the page does not"
        columns = set((run / "metrics.csv").read_text(encoding="utf-8").splitlines()[0].split(","))
        assert not columns - named, f"{receipt['kind']}: metrics.csv has columns that the page does not"
        files = {path.name for path in run.iterdir()} - set(left.values())
        assert not {name for name in files if name != "exposure"} - named, f"{receipt['kind']}: files not on the page"


def test_the_multi_node_page_names_every_strategy() -> None:
    from marey.training.lightning_setup import STRATEGIES

    named = re.findall(r"`([\w.=]+)`", text_of(ROOT / "docs" / "multi-node.md"))
    words = {word.removeprefix("trainer.strategy=") for word in named}
    # Two of them differ in their ending alone, and the page gives the second one's as an ending.
    assert {name for name in STRATEGIES if not name.endswith("_false")} <= words
    assert "_false" in words
