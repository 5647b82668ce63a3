from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from marey import __version__
from marey.config.schema import EncoderConfig, describe
from marey.core.errors import UserError
from marey.training.receipt import published_differences

from .conftest import Finished, write_store

Train = Callable[..., Finished]
DOCUMENT = Path(__file__).parents[2] / "docs" / "receipt.md"


def receipt_of(done: Finished) -> dict[str, object]:
    return dict(json.loads((done.folder / "receipt.json").read_text()))


def test_it_says_what_experiment_it_was(train: Train, small: Callable[..., EncoderConfig], store: Path) -> None:
    overrides = ("trainer.max_steps=3", "accumulate_grad_batches=2", "trainer.precision=bf16-mixed")
    done = train("run", *overrides)
    receipt = json.loads((done.folder / "receipt.json").read_text())
    assert receipt["format"] == 1
    assert receipt["status"] == "finished"
    assert receipt["how_it_ended"].startswith("finished after 3 optimizer steps; newest checkpoint ")
    assert receipt["ended"] >= receipt["started"]
    assert receipt["command"] == ["marey", "train", *overrides]
    assert receipt["differences_from_recipe"] == ["seed=1 (recipe: 0)"]
    assert receipt["config"] == describe(small(*overrides))
    assert receipt["recipe"]["claims"] == "that the plumbing works; nothing about learning"
    assert receipt["precision"] == "bf16-mixed"
    assert receipt["code"]["version"] == __version__
    assert receipt["host"]["packages"].keys() >= {"torch", "lightning", "numpy"}
    batch = receipt["batch"]
    assert (batch["effective_batch"], batch["statistic_batch"], batch["norm_group"]) == (8, 4, 4)
    assert batch["recipe"] == {"effective_batch": 8, "statistic_batch": 8, "norm_group": 8}
    source = receipt["data"]["train"][0]
    assert (source["path"], source["episodes"], source["usable_episodes"]) == (str(store), 24, 24)
    assert receipt["consumed"]["epochs"] == 1.0
    assert receipt["consumed"]["per_source"][0]["frames"] == 24 * 4
    assert receipt["ema"]["updates"] == 1
    assert [entry["step"] for entry in receipt["checkpoints"]] == [3]
    assert receipt["parameters"]["total"] == receipt["parameters"]["encoder"] + receipt["parameters"]["projector"]
    assert any("bf16-mixed is kept and is slow on a CPU; trainer.precision=32-true" in line for line in done.lines)


def test_every_key_is_documented(train: Train) -> None:
    text = DOCUMENT.read_text()
    for key in receipt_of(train("run", "trainer.max_steps=1")):
        assert f"`{key}`" in text, key


def test_it_is_written_before_the_first_step_and_closed_whatever_happens(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def explode(*_: object) -> None:
        receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
        seen.append(receipt["status"])
        raise ValueError("a bug")

    monkeypatch.setattr("marey.training.module.TrainingModule._check_position", explode)
    with pytest.raises(ValueError, match="a bug"):
        train("run", "trainer.max_steps=3")
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert seen == ["running"]
    assert receipt["status"] == "failed"
    assert receipt["how_it_ended"] == "ValueError: a bug"


def test_exposure_names_every_source_at_every_checkpoint(train: Train, store: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "other.lance", episodes=6)
    done = train(
        "run",
        f"data.train=[{{path: {store}, name: first}}, {{path: {tmp_path / 'other.lance'}, name: second}}]",
        "loader.batch_size=5",
        "trainer.max_epochs=1",
        "trainer.max_steps=-1",
        "checkpoint.every_n_train_steps=2",
    )
    tables = sorted((done.folder / "exposure").iterdir())
    assert [path.name for path in tables] == [f"step-{step:07d}.parquet" for step in (2, 4, 6)]
    rows = pq.read_table(tables[-1]).to_pylist()
    assert [(row["name"], row["clips"], row["frames"], row["replaced"]) for row in rows] == [
        ("first", 24, 96, 0),
        ("second", 6, 24, 0),
    ]
    tokens = float(done.rows()[-1]["tokens_per_second"])
    assert tokens > 0
    assert sum(row["tokens"] for row in rows) == receipt_of(done)["consumed"]["tokens"]  # type: ignore[index]


def test_a_clip_that_cannot_be_read_is_replaced_and_counted(train: Train, tmp_path: Path) -> None:
    import lance
    import pyarrow as pa

    path = tmp_path / "broken.lance"
    write_store(path, episodes=8)
    table = lance.dataset(str(path)).to_table()
    frames = table["frame"].to_pylist()
    broken = [b"not a picture" if row // 10 == 3 else frame for row, frame in enumerate(frames)]
    index = table.schema.get_field_index("frame")
    lance.write_dataset(
        table.set_column(index, "frame", pa.array(broken, table.schema.field("frame").type)),
        str(path),
        mode="overwrite",
    )
    done = train("run", f"data.train={path}", "loader.batch_size=8", "trainer.max_steps=2")
    receipt = json.loads((done.folder / "receipt.json").read_text())
    assert receipt["consumed"]["per_source"][0]["replaced"] == 2
    assert sum("replaced a clip that cannot be read" in line for line in done.lines) == 2


def test_departures_from_the_published_code_name_what_restores_them(small: Callable[..., EncoderConfig]) -> None:
    listed = {entry["what"]: entry for entry in published_differences(small())}
    assert [entry["restore"] for entry in listed.values()] == [
        "trainer.accelerator=gpu",
        "ema.compensate=false",
        "loader.episode_distinct=false",
        "augmentation.sparse=false",
        "",
        "",
    ]
    restored = ("loader.episode_distinct=false", "augmentation.sparse=false")
    plain = {entry["what"]: entry for entry in published_differences(small(*restored))}
    for what in ("clips of one statistic batch", "pixels of dropped patches"):
        assert plain[what]["here"] == plain[what]["published"] != listed[what]["here"]


def test_a_refused_step_closes_the_receipt_as_refused(train: Train, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not finite"):
        train("run", "trainer.max_steps=9", "optimizer.lr=1e20", "scheduler.start_lr=1e20", "scheduler.end_lr=1e20")
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert receipt["status"] == "refused"
    assert "nonfinite.json" in receipt["how_it_ended"]
