"""A run killed at random moments ends as one that nobody touched; the long version is ``benchmarks/chaos.py``."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # the processes it starts find it there too

import chaos

KILLS, SEED = 3, 12  # aimed at a checkpoint write, at a step and at a start


@pytest.fixture(scope="module")
def killed(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Any]]:
    """A campaign, its untouched run and the run that was killed."""
    with chaos.warm_processes() as launch:
        yield chaos.chaos(
            launch, tmp_path_factory.mktemp("chaos"), objective="encoder", kills=KILLS, seed=SEED, data=store
        )


def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(killed: tuple[Any, Any, Any]) -> None:
    campaign, whole, run = killed
    assert campaign.problems == []
    assert len(campaign.kills) == KILLS
    assert run.last_step() == whole.last_step() == 16
    assert sum(campaign.resumes.values()) == KILLS + 1
    assert all(kill.lost <= chaos.EVERY for kill in campaign.kills)


def test_whatever_differs_is_named(killed: tuple[Any, Any, Any], tmp_path: Path) -> None:
    campaign, whole, run = killed
    shutil.copytree(run.folder.parent, tmp_path / "copy")
    copy = chaos.Run(tmp_path / "copy", (), keep=chaos.KEEP)

    last = copy.checkpoints / "last.ckpt"
    content = torch.load(last, weights_only=True)
    content["state_dict_ema"]["encoder.norm.weight"][0] *= 1 + 1e-6
    torch.save(content, last)
    (copy.checkpoints / ".epoch-0000-step-0000002.ckpt.0a1b2c3d.tmp").touch()

    metrics = copy.folder / "metrics.csv"
    rows = [line.split(",") for line in metrics.read_text().splitlines()]
    column = rows[0].index("train/loss")
    rows[2][column] += "1"
    metrics.write_text("".join(",".join(row) + "\n" for row in rows))

    exposure = sorted((copy.folder / "exposure").iterdir())
    exposure[0].unlink()
    table = pq.read_table(exposure[1]).to_pydict()
    pq.write_table(pa.table({**table, "clips": [table["clips"][0] + 1]}), exposure[1])

    receipt = copy.receipt()
    receipt["consumed"]["tokens"] += 1
    (copy.folder / "receipt.json").write_text(json.dumps(receipt))

    assert [line.partition(": ")[0] for line in chaos.compare(whole, copy, resumed=campaign.resumed)] == [
        "last.ckpt",
        "metrics.csv.2.train/loss",
        "receipt.consumed.tokens",
        f"run/exposure/{exposure[0].name}",
        "checkpoints/.epoch-0000-step-0000002.ckpt.0a1b2c3d.tmp",
        f"run/exposure/{exposure[1].name}.clips[0]",
    ]


def test_a_lost_checkpoint_and_a_resume_from_too_far_back_are_named(
    killed: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    _, whole, run = killed
    shutil.copytree(run.folder.parent, tmp_path / "copy", copy_function=os.link)
    copy = chaos.Run(tmp_path / "copy", (), keep=chaos.KEEP)
    guard, watcher = chaos.Guard(copy, whole), chaos.Watcher(copy, resumed=0)
    watcher.look()
    watcher.step = copy.last_step()
    guard.check(watcher, "before")
    assert guard.problems == []
    newest = max(copy.complete())
    copy.complete()[newest].unlink()
    guard.check(watcher, "after")
    guard.check_resume(newest - 2 * chaos.EVERY, "then")
    assert [line.partition(":")[0] for line in guard.problems] == ["after", "after", "then"]
