"""A run that was stopped and resumed ends as one that was not, bit by bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from marey.core.errors import UserError
from marey.training.metrics import TIME_COLUMNS

from .conftest import Finished, write_store

Train = Callable[..., Finished]
# 24 clips: 6 micro-steps and 3 optimizer steps an epoch, so 10 steps cross three ends of an epoch.
RUN = (
    "trainer.max_steps=10",
    "accumulate_grad_batches=2",
    "checkpoint.every_n_train_steps=1",
    "trainer.log_every_n_steps=4",
    "ema.update_every=3",
)


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Paths at which two checkpoints differ: plain values by ==, tensors bit by bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(a, b)
        return [] if same else [where]
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{where}.{key}" for key in a.keys() ^ b.keys()]
        return missing + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}[{i}]")]
    return [] if a == b else [f"{where}: {a!r} != {b!r}"]


def experiment(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without what tells when, where and how fast."""
    content = dict(checkpoint)
    about = dict(content.pop("marey"))
    interval = {k: v for k, v in about["resume"]["interval"].items() if k not in ("seconds", "wait")}
    content["marey"] = {
        **{key: about[key] for key in ("step", "epoch", "micro_step", "ema", "statistic_batch")},
        "consumed": about["resume"]["consumed"],
        "interval": interval,
    }
    return content


def rows_after(done: Finished, step: int) -> list[dict[str, str]]:
    return [
        {key: value for key, value in row.items() if key not in TIME_COLUMNS}
        for row in done.rows()
        if int(row["step"]) > step
    ]


def resume(train: Train, name: str, whole: Finished, step: int, *overrides: str) -> Finished:
    path = next(whole.checkpoints.glob(f"*-step-{step:07d}.ckpt"))
    return train(name, *overrides, f"resume.ckpt_path={path}", "resume.weights_only=false")


def test_resuming_at_every_step_equals_never_stopping(train: Train) -> None:
    whole = train("whole", *RUN)
    assert len(rows_after(whole, 0)) == 4  # steps 1, 4, 8 and the last
    for step in range(1, 10):
        again = resume(train, f"from-{step}", whole, step, *RUN)
        assert differences(experiment(whole.checkpoint()), experiment(again.checkpoint())) == []
        assert rows_after(again, 0) == rows_after(whole, step)


def test_a_second_resume_from_the_end_of_an_epoch_equals_never_stopping(train: Train) -> None:
    whole = train("whole", *RUN)
    first = resume(train, "first", whole, 3, *RUN, "trainer.max_steps=6")
    second = resume(train, "second", first, 6, *RUN)
    assert differences(experiment(whole.checkpoint()), experiment(second.checkpoint())) == []
    assert rows_after(second, 0) == rows_after(whole, 6)


def test_float64_weights_survive_a_resume_bit_by_bit_whatever_the_workers(train: Train) -> None:
    exact = (*RUN, "trainer.precision=64-true", "ema.dtype=float64", "loader.micro_batch_size=2")
    whole = train("whole", *exact, "trainer.max_steps=6")
    workers = ("loader.num_workers=2", "loader.persistent_workers=false", "trainer.max_steps=6")
    again = resume(train, "again", whole, 2, *exact, *workers)
    assert whole.checkpoint()["state_dict"]["encoder.norm.weight"].dtype == torch.float64
    assert differences(experiment(whole.checkpoint()), experiment(again.checkpoint())) == []


def test_validation_changes_nothing_in_training(train: Train) -> None:
    whole = train("whole", *RUN)
    other = train("validated", *RUN, "trainer.limit_val_batches=1")
    assert differences(whole.checkpoint()["state_dict"], other.checkpoint()["state_dict"]) == []
    assert any("no measure of generalisation" in line for line in other.lines)
    resumed = resume(train, "resumed", other, 3, *RUN, "trainer.limit_val_batches=1")
    assert differences(whole.checkpoint()["state_dict"], resumed.checkpoint()["state_dict"]) == []


def test_rows_of_an_abandoned_future_are_cut(train: Train) -> None:
    whole = train("whole", *RUN)
    before = whole.rows()
    again = resume(train, "whole", whole, 5, *RUN, "trainer.log_every_n_steps=4")
    assert [row["step"] for row in again.rows()] == ["1", "4", "8", "10"]
    assert [row["train/loss"] for row in again.rows()] == [row["train/loss"] for row in before]


def test_a_changed_experiment_is_refused_with_the_list_of_changes(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=2")
    with pytest.raises(
        UserError,
        match=r"optimizer.weight_decay: 0.04 -> 0.1; seed: 0 -> 1; .*allow_changes=\[optimizer.weight_decay,seed\]",
    ):
        resume(train, "again", whole, 1, *RUN, "optimizer.weight_decay=0.1", "seed=1")
    accepted = resume(
        train,
        "again",
        whole,
        1,
        *RUN,
        "optimizer.weight_decay=0.1",
        "seed=1",
        "resume.allow_changes=[optimizer.weight_decay,seed]",
    )
    receipt = json.loads((accepted.folder / "receipt.json").read_text())
    assert receipt["resumed_from"]["allowed_changes"] == ["optimizer.weight_decay: 0.04 -> 0.1", "seed: 0 -> 1"]


def test_more_steps_are_harmless_unless_a_schedule_ends_with_them(train: Train) -> None:
    decays = ("scheduler.end_lr=1e-5", "trainer.max_steps=2")
    whole = train("whole", *RUN, *decays)
    with pytest.raises(UserError, match=r"trainer\.max_steps: 2 -> 3"):
        resume(train, "again", whole, 1, *RUN, *decays, "trainer.max_steps=3")


def test_data_that_changed_is_not_resumed_on(train: Train, tmp_path: Path) -> None:
    write_store(tmp_path / "data.lance", episodes=8)
    there = (*RUN, "trainer.max_steps=2", f"data.train={tmp_path / 'data.lance'}")
    whole = train("whole", *there)
    shutil.rmtree(tmp_path / "data.lance")
    write_store(tmp_path / "data.lance", episodes=8, frames=11)
    with pytest.raises(UserError, match=r"data\.lance\) has changed: version was"):
        resume(train, "again", whole, 1, *there)


def test_weights_alone_start_a_new_run(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=3", "ema.update_every=1")
    fresh = train(
        "fresh",
        *RUN,
        "trainer.max_steps=1",
        "optimizer.lr=1e-12",
        "scheduler.start_lr=0",
        "scheduler.end_lr=0",
        "resume.weights=ema",
        f"resume.ckpt_path={whole.checkpoints / 'last.ckpt'}",
    )
    old, new = whole.checkpoint(), fresh.checkpoint()
    assert new["marey"]["step"] == 1
    for name, tensor in old["state_dict_ema"].items():
        torch.testing.assert_close(new["state_dict"][name], tensor, rtol=0, atol=1e-6)


def test_weights_taken_within_a_folder_overwrite_nothing_of_the_first_run(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=1", checkpoints="shared")
    before = whole.newest.read_bytes() if whole.newest else b""
    again = train("again", *RUN, "trainer.max_steps=1", f"resume.ckpt_path={whole.newest}", checkpoints="shared")
    assert again.newest is not None
    assert again.newest.name == "epoch-0000-step-0000001-v1.ckpt"
    assert whole.newest is not None
    assert whole.newest.read_bytes() == before


def test_a_finished_run_has_nothing_to_resume(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=2")
    with pytest.raises(UserError, match="has 2 optimizer steps and this run ends at 2"):
        resume(train, "again", whole, 2, *RUN, "trainer.max_steps=2")


def test_a_file_that_would_run_code_is_not_loaded(train: Train, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    torch.save({"state_dict": Bomb()}, tmp_path / "bomb.ckpt")
    with pytest.raises(UserError, match="would execute code"):
        train("run", f"resume.ckpt_path={tmp_path / 'bomb.ckpt'}")
    assert not (tmp_path / "exploded").exists()
