from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from marey.config.schema import EncoderConfig
from marey.core.errors import UserError
from marey.training import lightning_setup
from marey.training.batchplan import batch_plan, max_seconds, resolve_devices
from marey.training.module import TrainingModule

from .conftest import SMALL, Finished

Train = Callable[..., Finished]
Configure = Callable[..., EncoderConfig]


def test_a_run_leaves_a_checkpoint_with_both_sets_of_weights(train: Train) -> None:
    done = train("run", "trainer.max_steps=3", "checkpoint.every_n_train_steps=2")
    names = sorted(path.name for path in done.checkpoints.iterdir())
    assert names == ["epoch-0000-step-0000002.ckpt", "epoch-0000-step-0000003.ckpt", "last.ckpt"]
    assert done.newest == done.checkpoints / names[1]
    content = done.checkpoint()
    assert {key.partition(".")[0] for key in content["state_dict"]} == {"encoder", "projector"}
    assert {key.partition(".")[0] for key in content["state_dict_ema"]} == {"encoder"}
    assert content["marey"]["step"] == 3
    assert content["marey"]["ema"]["updates"] == 1


def test_the_same_run_twice_is_the_same_run(train: Train) -> None:
    first, second = (train(name, "trainer.max_steps=3").checkpoint() for name in ("a", "b"))
    assert all(torch.equal(first["state_dict"][k], second["state_dict"][k]) for k in first["state_dict"])


def test_epochs_and_steps_end_a_run_where_they_say(train: Train) -> None:
    by_epochs = train("epochs", "trainer.max_epochs=2", "trainer.max_steps=-1", "accumulate_grad_batches=4")
    about = by_epochs.checkpoint()["marey"]
    assert (about["step"], about["epoch"], about["micro_step"]) == (2, 1, 4)  # 6 micro-steps: 2 fill no window
    assert any("1 optimizer steps per epoch, 2 in all" in line for line in by_epochs.lines)
    limited = train("limited", "trainer.max_epochs=3", "trainer.max_steps=-1", "trainer.limit_train_batches=2")
    assert limited.checkpoint()["marey"]["step"] == 6


def test_a_time_limit_ends_a_run_with_its_state_saved(train: Train) -> None:
    done = train("run", "trainer.max_steps=-1", "trainer.max_time={seconds: 1}")
    receipt = json.loads((done.folder / "receipt.json").read_text())
    assert receipt["status"] == "time limit reached"
    assert done.checkpoint()["marey"]["step"] == receipt["consumed"]["optimizer_steps"] > 0


def test_overfitting_repeats_one_epochs_clips(train: Train) -> None:
    done = train("run", "trainer.overfit_batches=2", "trainer.max_steps=4", "trainer.log_every_n_steps=1")
    assert done.checkpoint()["marey"]["epoch"] == 1
    assert json.loads((done.folder / "receipt.json").read_text())["consumed"]["clips"] == 16


def test_a_fast_dev_run_leaves_no_checkpoint(train: Train) -> None:
    done = train("run", "trainer.fast_dev_run=2")
    assert done.newest is None
    assert not done.checkpoints.exists()
    assert [row["step"] for row in done.rows()] == ["1", "2"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["trainer.max_steps=-1", "trainer.max_epochs=null"], "nothing ends this run"),
        (["trainer.max_steps=0"], "leave no step to train"),
        (["trainer.limit_train_batches=1", "accumulate_grad_batches=2"], "leaves 1 of 6 micro-steps"),
        (["trainer.strategy=fsdp"], "trainer.strategy=fsdp is not supported"),
        (["trainer.precision=12-true"], r"(?i)precision"),
        (["trainer.accelerator=tpuu"], "accelerator"),
        (["trainer.max_time=tomorrow"], "is not a time"),
        (["trainer.profiler=none-such"], "profiler"),
        (["loader.batch_size=30"], "24 clips per epoch"),
        (
            ["trainer.limit_val_batches=1", "loader.batch_size=12", "loader.clips_per_video=2", "data.val=SHORT"],
            "validation",
        ),
        (
            ["trainer.limit_val_batches=1", "trainer.val_check_interval=100000"],
            "val_check_interval=100000 is more than the 6 micro-steps",
        ),
        (["resume.ckpt_path=nowhere.ckpt"], "nowhere.ckpt is not a file"),
        (["checkpoint.filename='{loss}'"], "checkpoint.filename="),
        (["wandb.enabled=true", "trainer.logger=true"], r"marey\[wandb\]"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(
    train: Train, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    from .conftest import write_store

    if "data.val=SHORT" in overrides:
        write_store(tmp_path / "short.lance", episodes=3)
        overrides = [o.replace("SHORT", str(tmp_path / "short.lance")) for o in overrides]
    with pytest.raises(UserError, match=sentence) as caught:
        train("run", *overrides)
    assert "\n" not in str(caught.value)


def test_callbacks_that_another_package_would_add_are_refused_by_name(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    def entry_points(*, group: str) -> list[EntryPoint]:
        return [EntryPoint("spy", "spypackage:callbacks", group)]

    monkeypatch.setattr(lightning_setup.metadata, "entry_points", entry_points)
    with pytest.raises(UserError, match=r"spy \(unknown package\)"):
        train("run")


class Poison:
    """Makes the gradient of chosen optimizer steps NaN, on the way the loss would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
        original = TrainingModule._forward

        def forward(module: TrainingModule, batch: Any, *, micro_step: int) -> Any:
            output = original(module, batch, micro_step=micro_step)
            if micro_step + 1 in steps:
                for buffer in module.buffers():
                    if buffer.is_floating_point():
                        buffer.fill_(float("nan"))
                return output._replace(loss=output.loss * float("nan"))
            return output

        monkeypatch.setattr(TrainingModule, "_forward", forward)


def test_a_step_that_is_not_finite_stops_before_its_update_and_names_its_clips(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Poison(monkeypatch, {3})
    with pytest.raises(UserError, match="not finite at step 3, before its update"):
        train("run", "trainer.max_steps=5", "checkpoint.every_n_train_steps=1")
    entry = json.loads((tmp_path / "run" / "nonfinite.json").read_text())[0]
    clips = entry["micro_steps"][0]["clips"]
    assert entry["step"] == 3
    assert [clip["position"] for clip in clips] == [8, 9, 10, 11]
    assert all("episode" in clip["file"] for clip in clips)
    kept = sorted((tmp_path / "run-checkpoints").iterdir())
    assert [path.name for path in kept][:2] == ["epoch-0000-step-0000001.ckpt", "epoch-0000-step-0000002.ckpt"]


def test_a_skipped_step_changes_neither_weights_nor_statistics(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    Poison(monkeypatch, {3})
    done = train("run", "trainer.max_steps=5", "checkpoint.every_n_train_steps=1", "on_nonfinite=skip")
    before, after = (done.checkpoint(f"epoch-0000-step-000000{step}.ckpt") for step in (2, 3))
    assert all(torch.equal(before["state_dict"][k], after["state_dict"][k]) for k in before["state_dict"])
    assert all(torch.isfinite(t).all() for t in done.checkpoint()["state_dict"].values())
    assert [row["skipped_steps"] for row in done.rows()] == ["0", "0", "1", "0", "0"]
    assert [row["train/loss"] for row in done.rows()][2] == "nan"
    assert json.loads((done.folder / "receipt.json").read_text())["consumed"]["skipped_steps"] == 1


@pytest.mark.parametrize(
    ("steps", "limit", "sentence"),
    [
        (range(1, 100), "max_skipped_in_a_row=2", "3 optimizer steps in a row are not finite, the last at step 3, and"),
        ((1, 3, 5), "max_skipped_steps=2", r"3 optimizer steps are not finite, the last at step 5, and max_skipped_s"),
    ],
)
def test_skipping_without_end_is_given_up(
    train: Train, monkeypatch: pytest.MonkeyPatch, steps: Any, limit: str, sentence: str
) -> None:
    Poison(monkeypatch, set(steps))
    with pytest.raises(UserError, match=sentence):
        train("run", "trainer.max_steps=20", "on_nonfinite=skip", limit)


def test_weight_decay_follows_its_schedule(train: Train) -> None:
    done = train(
        "run",
        "trainer.max_steps=4",
        "weight_decay_scheduler={enabled: true, schedule_type: linear, start_value: 0.0, end_value: 0.4}",
    )
    groups = done.checkpoint()["optimizer_states"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [pytest.approx(0.3), 0.0]


def test_a_second_request_stops_at_once_and_says_what_is_lost(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TrainingModule._forward

    def forward(module: TrainingModule, batch: Any, *, micro_step: int) -> Any:
        if micro_step == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return original(module, batch, micro_step=micro_step)

    monkeypatch.setattr(TrainingModule, "_forward", forward)
    sentence = "stopped at once by a second request; work since the last checkpoint is lost"
    with pytest.raises(KeyboardInterrupt, match=sentence):
        train("run", "trainer.max_steps=5", "checkpoint.every_n_train_steps=1")
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert (receipt["status"], receipt["how_it_ended"]) == ("failed", sentence)
    assert (tmp_path / "run-checkpoints" / "last.ckpt").exists()


def command(store: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(Path(__file__).parents[2] / "main.py"), *SMALL, f"data.train={store}", *overrides]


def close(ours: dict[str, Any], theirs: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        for name, tensor in ours[key].items():
            torch.testing.assert_close(theirs[key][name], tensor, rtol=0, atol=1e-10)


def test_two_ranks_go_on_with_one_process_of_twice_the_batch_and_back(
    store: Path, tmp_path: Path, train: Train
) -> None:
    shared = (
        "accumulate_grad_batches=2",
        "projector.norm_group=2",
        "trainer.precision=64-true",
        "ema.dtype=float64",
        "trainer.log_every_n_steps=1",
        "trainer.accelerator=cpu",
        "checkpoint.every_n_train_steps=1",
    )
    alone = train("alone", *shared, "trainer.max_steps=6")
    run, kept = tmp_path / "two", tmp_path / "kept"
    shutil.copytree(alone.folder, run)  # as one process left it, six steps on
    done = subprocess.run(
        command(
            store,
            *shared,
            "trainer.max_steps=4",
            "loader.batch_size=2",
            "trainer.devices=2",
            "trainer.strategy=ddp",
            f"resume.ckpt_path={alone.checkpoints}/epoch-0000-step-0000001.ckpt",
            "resume.weights_only=false",
            f"hydra.run.dir={run}",
            f"checkpoint.dirpath={kept}",
        ),
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    two = Finished(run, kept, done.stdout.splitlines(), None)
    ours, theirs = alone.checkpoint("epoch-0001-step-0000004.ckpt"), two.checkpoint()
    assert (theirs["marey"]["world_size"], theirs["marey"]["statistic_batch"]) == (2, 4)
    close(ours, theirs, ("state_dict", "state_dict_ema"))
    assert [row["step"] for row in two.rows()] == ["1", "2", "3", "4"]
    for one, other in zip(alone.rows(), two.rows(), strict=False):
        assert one["clips_seen"] == other["clips_seen"]
        assert float(one["train/loss"]) == pytest.approx(float(other["train/loss"]), rel=1e-10)
    assert done.stdout.count("optimizer steps per epoch") == 1  # rank 1 says nothing
    (note,) = (line for line in two.lines if line.startswith("note          harmless changes since the checkpoint: "))
    assert "; loader.batch_size: 4 -> 2; " in note
    moved = train(
        "moved",
        *shared,
        "trainer.max_steps=6",
        f"resume.ckpt_path={kept / 'last.ckpt'}",
        "resume.weights_only=false",
    )
    close(alone.checkpoint(), moved.checkpoint(), ("state_dict", "state_dict_ema"))
    receipt = json.loads((moved.folder / "receipt.json").read_text())
    assert receipt["resumed_from"]["allowed_changes"] == []
    assert receipt["resumed_from"]["notes"] == [
        "written by 2 ranks, continued by 1: equal within rounding, not bit by bit"
    ]
    assert [attempt["world_size"] for attempt in receipt["attempts"]] == [1, 2, 1]


ONE_RANK_REFUSES = """
import os

from marey.cli import train
from marey.core.errors import UserError
from marey.training.module import TrainingModule

step = TrainingModule.training_step


def refusing(module, batch, batch_idx):
    if batch_idx == 1 and os.environ.get("LOCAL_RANK") == "1":
        raise UserError("the disk of this rank is gone; look at it")
    return step(module, batch, batch_idx)


TrainingModule.training_step = refusing
if __name__ == "__main__":
    train()
"""


def test_what_only_one_rank_refuses_is_said_by_rank_0_and_the_receipt(store: Path, tmp_path: Path) -> None:
    run, script = tmp_path / "run", tmp_path / "refusing.py"
    script.write_text(ONE_RANK_REFUSES)
    words = command(
        store,
        "trainer.max_steps=4",
        "loader.batch_size=2",
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "trainer.accelerator=cpu",
        f"hydra.run.dir={run}",
        f"checkpoint.dirpath={tmp_path / 'kept'}",
    )
    done = subprocess.run(
        [words[0], str(script), *words[2:]],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "marey: rank 1: the disk of this rank is gone; look at it" in done.stderr
    assert "Traceback" not in done.stderr
    receipt = json.loads((run / "receipt.json").read_text())
    assert receipt["status"] == "refused"
    assert receipt["how_it_ended"] == "rank 1: the disk of this rank is gone; look at it"


def stopped_by(words: list[str], run: Path, number: signal.Signals, *, rows: int, **where: Any) -> str:
    """Start ``words``, signal their whole process group once ``rows`` steps are logged; what was printed."""
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **where,
    )
    try:
        deadline = time.monotonic() + 200
        while not (run / "metrics.csv").exists() or (run / "metrics.csv").read_text().count("\n") <= rows:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.killpg(process.pid, number)  # a terminal and a scheduler send it to all, workers included
        out, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "stopped on request after" in out
    return out


def test_a_stop_of_all_processes_ends_with_zero_and_the_printed_command_goes_on(store: Path, tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    endless = ("trainer.max_steps=-1", "trainer.max_epochs=-1", "loader.num_workers=1")
    words = command(store, *endless, f"hydra.run.dir={run}", f"checkpoint.dirpath={kept}")
    out = stopped_by(words, run, signal.SIGINT, rows=2, cwd=tmp_path)
    first = torch.load(kept / "last.ckpt", weights_only=True)["marey"]["step"]
    typed = out.rstrip().splitlines()[-1].strip()
    (run / "metrics.csv").unlink()
    cd, folder, and_then, *typed_words = shlex.split(typed)  # a shell in between would die of the signal itself
    assert (cd, and_then) == ("cd", "&&")
    stopped_by(typed_words, run, signal.SIGUSR1, rows=2, cwd=folder)
    attempts = json.loads((run / "receipt.json").read_text())["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["stopped on request"] * 2
    assert attempts[1]["from_step"] == attempts[0]["to_step"] == first > 0
    assert torch.load(kept / "last.ckpt", weights_only=True)["marey"]["step"] == attempts[1]["to_step"] > first


@pytest.mark.parametrize(("devices", "count"), [("3", 3), ("'0,1'", 2), ("[0,1,2]", 3), ("'2'", 2)])
def test_devices_are_counted_without_asking_the_machine(small: Configure, devices: str, count: int) -> None:
    assert resolve_devices(small(f"trainer.devices={devices}").trainer) == count


def test_devices_that_are_none_are_refused(small: Configure) -> None:
    for devices in ("0", "'a'", "[]"):
        with pytest.raises(UserError, match=r"trainer\.devices="):
            resolve_devices(small(f"trainer.devices={devices}").trainer)


def test_the_published_run_adds_up(small: Configure) -> None:
    from marey.config.compose import load_config

    plan = batch_plan(load_config([]), 6067 * 200)
    assert (plan.effective_batch, plan.statistic_batch, plan.norm_group) == (3072, 1536, 96)
    assert (plan.micro_steps_per_epoch, plan.steps_per_epoch, plan.total_steps) == (788, 394, 10_244)
    assert plan.dropped_clips == 6067 * 200 - 788 * 1536
    assert max_seconds(load_config(["recipe=consumer_vit_tiny"]).trainer) == 12 * 3600
