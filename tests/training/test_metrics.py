from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from marey.training.metrics import COLUMNS, MetricsFile

from .conftest import Finished

Train = Callable[..., Finished]


def test_rows_come_at_the_first_step_at_every_nth_and_at_the_last(train: Train) -> None:
    done = train("run", "trainer.max_steps=7", "trainer.log_every_n_steps=3")
    rows = done.rows()
    assert list(rows[0]) == list(COLUMNS)
    assert [row["step"] for row in rows] == ["1", "3", "6", "7"]
    assert [row["clips_seen"] for row in rows] == ["4", "12", "24", "28"]
    assert [row["epoch"] for row in rows] == ["0", "0", "0", "1"]
    assert all(float(row["train/embedding_rank"]) >= 1 for row in rows)
    assert all(row["padding_share"] == "0.0" for row in rows)


def test_a_row_averages_the_steps_since_the_one_before(train: Train) -> None:
    each = train("each", "trainer.max_steps=6", "trainer.log_every_n_steps=1").rows()
    some = train("some", "trainer.max_steps=6", "trainer.log_every_n_steps=3").rows()
    for column in ("train/loss", "train/invariance", "train/sigreg"):
        values = [float(row[column]) for row in each]
        assert float(some[1][column]) == pytest.approx(sum(values[1:3]) / 2, rel=1e-12)
        assert float(some[2][column]) == pytest.approx(sum(values[3:6]) / 3, rel=1e-12)
    for row in each:
        parts = float(row["train/invariance"]) + 0.02 * float(row["train/sigreg"])
        assert float(row["train/loss"]) == pytest.approx(parts, rel=1e-5)


def test_accumulated_micro_steps_are_averaged_and_the_rate_is_per_optimizer_step(train: Train) -> None:
    rows = train(
        "run",
        "trainer.max_steps=4",
        "accumulate_grad_batches=3",
        "scheduler.peak_step=2",
        "optimizer.lr=4e-4",
        "scheduler.start_lr=2e-4",
        "scheduler.end_lr=4e-4",
    ).rows()
    assert [float(row["lr"]) for row in rows] == pytest.approx([2e-4, 3e-4, 4e-4, 4e-4])
    assert [row["clips_seen"] for row in rows] == ["12", "24", "36", "48"]


def test_clips_of_one_episode_that_meet_are_counted(train: Train) -> None:
    rows = train("run", "trainer.max_steps=2", "loader.batch_size=48", "loader.clips_per_video=4").rows()
    assert rows[0]["same_episode_pairs"] == "24"  # 48 clips of 24 episodes: two of each


def test_collapse_shows_in_rank_and_spread(train: Train) -> None:
    overrides = ("trainer.max_steps=25", "optimizer.lr=0.003", "scheduler.end_lr=0.003", "loader.batch_size=12")
    kept = train("kept", *overrides, "loss.sigreg.weight=1.0").rows()[-1]
    fallen = train("fallen", *overrides, "loss.sigreg.weight=0").rows()[-1]
    assert float(fallen["train/embedding_std"]) < 0.4 * float(kept["train/embedding_std"])
    assert float(fallen["train/embedding_rank"]) < 0.7 * float(kept["train/embedding_rank"])


def test_the_same_numbers_go_to_tensorboard(train: Train) -> None:
    done = train("run", "trainer.max_steps=3", "trainer.logger=true")
    events = EventAccumulator(str(done.folder / "tensorboard"))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert logged == [(int(row["step"]), pytest.approx(float(row["train/loss"]))) for row in done.rows()]


def test_a_file_keeps_complete_rows_up_to_a_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.csv", ("step", "x"))
    file.start(after_step=0)
    for step in (1, 2, 3):
        file.append({"step": step, "x": step / 3})
    with file.path.open("a") as torn:
        torn.write("2")  # a row that a kill cut off
    file.start(after_step=2)
    with file.path.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [(row["step"], float(row["x"])) for row in rows] == [("1", 1 / 3), ("2", 2 / 3)]
    file.append({"step": 3, "x": math.nan})
    file.start(after_step=0)
    assert file.path.read_text() == "step,x\n"
