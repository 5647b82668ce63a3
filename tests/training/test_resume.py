"""A run that was stopped and resumed ends as one that was not, bit by bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from marey.config.schema import EncoderConfig
from marey.core.errors import UserError
from marey.training.metrics import TIME_COLUMNS
from marey.training.module import TrainingModule
from marey.training.run import check
from marey.training.sealed import save_sealed
from marey.training.verify import tree_differences

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


def differences(a: Any, b: Any) -> list[str]:
    return list(tree_differences(a, b))


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


def test_validation_changes_nothing_in_training(train: Train) -> None:
    whole = train("whole", *RUN)
    other = train("validated", *RUN, "trainer.limit_val_batches=1")
    assert differences(whole.checkpoint()["state_dict"], other.checkpoint()["state_dict"]) == []
    assert any("no measure of generalisation" in line for line in other.lines)
    resumed = resume(train, "resumed", other, 3, *RUN, "trainer.limit_val_batches=1")
    assert differences(whole.checkpoint()["state_dict"], resumed.checkpoint()["state_dict"]) == []


def test_a_row_that_a_stop_cut_short_is_gone_after_the_resume(train: Train) -> None:
    whole = train("whole", *RUN)
    stopped = train("stopped", *RUN, "trainer.max_steps=6")
    assert [row["step"] for row in stopped.rows()] == ["1", "4", "6"]
    again = resume(train, "stopped", stopped, 6, *RUN)
    assert rows_after(again, 0) == rows_after(whole, 0)


def test_rows_written_at_another_interval_stay(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.log_every_n_steps=2", "trainer.max_steps=4")
    again = resume(train, "whole", whole, 4, *RUN, "trainer.log_every_n_steps=5")
    assert [row["step"] for row in again.rows()] == ["1", "2", "4", "5", "10"]


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


def test_an_accepted_change_of_optimizer_and_schedule_takes_effect(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=4")
    changed = ("optimizer.lr=0.02", "scheduler.start_lr=0", "scheduler.end_lr=0.01", "scheduler.peak_step=2")
    accepted = "optimizer,scheduler"
    again = resume(
        train,
        "again",
        whole,
        1,
        *RUN,
        *changed,
        "optimizer.weight_decay=0.1",
        "optimizer.betas=[0.8, 0.9]",
        "trainer.log_every_n_steps=1",
        "trainer.max_steps=4",
        f"resume.allow_changes=[{accepted}]",
    )
    rates = [float(row["lr"]) for row in again.rows()]
    assert rates == pytest.approx([0.01, 0.02, 0.015])  # steps 2 to 4: half way up, the peak, half way down
    content = again.checkpoint()
    groups = content["optimizer_states"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [group["betas"] for group in groups] == [(0.8, 0.9)] * 2
    assert [group["initial_lr"] for group in groups] == [0.02] * 2
    assert content["lr_schedulers"][0]["base_lrs"] == [0.02] * 2


@pytest.mark.parametrize(
    ("overrides", "accepted", "reason"),
    [
        (["loader.batch_size=2"], "loader.batch_size", "micro-steps of 4 clips on all ranks and this run's have 2"),
        (["accumulate_grad_batches=3"], "accumulate_grad_batches", "accumulates 2 micro-steps per optimizer step and"),
        (["loader.clips_per_video=2"], "loader.clips_per_video", "epochs have 6 micro-steps and this run's have 12"),
        (["optimizer.exclude_bias_norm=false"], "optimizer", "into other groups"),
    ],
)
def test_what_cannot_be_carried_on_is_refused_even_if_accepted(
    train: Train, overrides: list[str], accepted: str, reason: str
) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=2")
    with pytest.raises(UserError, match=reason) as asked:
        resume(train, "again", whole, 1, *RUN, *overrides)
    assert "allow_changes" not in str(asked.value)
    with pytest.raises(UserError, match=reason) as told:
        resume(train, "again", whole, 1, *RUN, *overrides, f"resume.allow_changes=[{accepted},data.train]")
    assert "exactly is impossible" in str(told.value)


def test_an_accepted_change_of_shapes_is_refused_in_one_sentence(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=2")
    with pytest.raises(UserError, match="do not fit this model"):
        resume(train, "again", whole, 1, *RUN, "projector.output_dim=4", "resume.allow_changes=[projector]")


def test_only_keys_of_the_configuration_can_be_accepted(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=2")
    with pytest.raises(UserError, match=r"names optimizer\.lrr, .*did you mean optimizer\.lr\?"):
        resume(train, "again", whole, 1, *RUN, "resume.allow_changes=[optimizer.lrr]")


def test_an_average_turned_on_later_starts_from_the_checkpoints_weights(train: Train) -> None:
    whole = train("whole", *RUN, "ema.enabled=false", "trainer.max_steps=2")
    again = resume(
        train, "again", whole, 1, *RUN, "ema.update_every=5", "trainer.max_steps=2", "resume.allow_changes=[ema]"
    )
    average = again.checkpoint()["state_dict_ema"]  # no update is due yet
    first = whole.checkpoint("epoch-0000-step-0000001.ckpt")["state_dict"]
    assert all(torch.equal(average[name], first[name]) for name in average)
    notes = json.loads((again.folder / "receipt.json").read_text())["resumed_from"]["notes"]
    assert notes == ["the checkpoint holds no weight average: it starts from the checkpoint's weights"]


def test_an_average_is_found_under_the_key_it_was_saved_with(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=4")
    again = resume(
        train, "again", whole, 3, *RUN, "ema.save_key=slow", "trainer.max_steps=4", "resume.allow_changes=[ema]"
    )
    assert differences(whole.checkpoint()["state_dict_ema"], again.checkpoint()["slow"]) == []
    assert again.checkpoint()["marey"]["ema"]["updates"] == 1


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


def test_a_store_that_changes_under_a_run_is_not_read_and_stops_its_resume(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.lance"
    write_store(path, episodes=8)
    there = (*RUN, f"data.train={path}", "loader.clips_per_video=3")
    whole = train("whole", *there, "trainer.max_steps=4")
    original = TrainingModule.training_step

    def step(module: TrainingModule, batch: Any, batch_idx: int) -> Any:
        if module.global_step == 1 and lance.dataset(str(path)).version == 1:
            lance.dataset(str(path)).delete("episode_idx < 2")
        return original(module, batch, batch_idx)

    monkeypatch.setattr(TrainingModule, "training_step", step)
    changed = train("changed", *there, "trainer.max_steps=4")
    assert lance.dataset(str(path)).version == 2
    assert differences(whole.checkpoint()["state_dict"], changed.checkpoint()["state_dict"]) == []
    with pytest.raises(UserError, match=r"data\.lance\) has changed: version was 1-.* and is 2-"):
        resume(train, "again", changed, 2, *there)


def test_harmless_changes_are_listed(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=2")
    again = resume(train, "again", whole, 1, *RUN, "trainer.max_steps=2", "trainer.log_every_n_steps=1")
    said = json.loads((again.folder / "receipt.json").read_text())["resumed_from"]
    assert said["harmless_changes"] == ["trainer.log_every_n_steps: 4 -> 1"]
    assert said["allowed_changes"] == []
    line = "note          harmless changes since the checkpoint: trainer.log_every_n_steps: 4 -> 1"
    assert line in again.lines


def test_what_an_abandoned_future_left_is_cut(train: Train) -> None:
    whole = train("whole", *RUN, "trainer.logger=true", "trainer.max_steps=4")
    again = resume(train, "whole", whole, 2, *RUN, "trainer.logger=true", "trainer.max_steps=3")
    assert sorted(path.stem for path in (again.folder / "exposure").iterdir()) == [
        f"step-{step:07d}" for step in (1, 2, 3)
    ]
    receipt = json.loads((again.folder / "receipt.json").read_text())
    assert [(entry["step"], entry.get("abandoned")) for entry in receipt["checkpoints"]] == [
        (4, True),
        (1, None),
        (2, None),
        (3, None),
    ]
    events = EventAccumulator(str(again.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 3]


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


@pytest.mark.parametrize("override", ["model.rope_layout=rotary", "model.attn_mode=full", "frame_stride=1"])
def test_weights_of_another_model_of_the_same_shapes_are_refused(train: Train, override: str) -> None:
    key = override.partition("=")[0]
    whole = train("whole", *RUN, "trainer.max_steps=1", "frame_stride=2")
    there = (*RUN, "trainer.max_steps=1", "frame_stride=2", f"resume.ckpt_path={whole.newest}", override)
    with pytest.raises(UserError, match=rf"another model of the same shapes: {key}: .*allow_changes=\[{key}\]"):
        train("again", *there)
    accepted = train("again", *there, f"resume.allow_changes=[{key}]", "model.token_drop_rate=0.25")
    said = json.loads((accepted.folder / "receipt.json").read_text())["resumed_from"]
    assert [line.partition(":")[0] for line in said["allowed_changes"]] == [key]
    assert [line.partition(":")[0] for line in said["notes"]] == ["model.token_drop_rate"]


def test_weights_alone_start_no_second_run_among_the_first_ones_checkpoints(
    train: Train, small: Callable[..., EncoderConfig]
) -> None:
    whole = train("whole", *RUN, "trainer.max_steps=1")
    start = (f"resume.ckpt_path={whole.newest}", f"checkpoint.dirpath={whole.checkpoints}")
    with pytest.raises(UserError, match=r"holds checkpoints of another run .*set checkpoint\.dirpath"):
        check(small(*start), whole.checkpoints)
    check(small(*start, "resume.weights_only=false"), whole.checkpoints)


def test_a_key_that_came_later_counts_as_what_was_done_before_it(train: Train) -> None:
    whole = train("whole", *RUN, "augmentation.sparse=false")
    path = next(whole.checkpoints.glob("*-step-0000003.ckpt"))
    saved = torch.load(path, weights_only=True)
    assert saved["marey"]["config"]["model"].pop("token_drop_mode") == "random"
    assert saved["marey"]["config"]["augmentation"].pop("sparse") is False
    save_sealed(saved, path)
    resumed = resume(train, "resumed", whole, 3, *RUN, "augmentation.sparse=false")
    assert differences(whole.checkpoint()["state_dict"], resumed.checkpoint()["state_dict"]) == []
    with pytest.raises(UserError, match=r"model\.token_drop_mode: random -> tube"):
        resume(train, "other", whole, 3, *RUN, "augmentation.sparse=false", "model.token_drop_mode=tube")
    with pytest.raises(UserError, match=r"augmentation\.sparse: False -> True"):
        resume(train, "other pixels", whole, 3, *RUN)


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
