"""A run that was stopped goes on with the command it prints, typed anywhere, as another sitting of the same run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from marey.core.errors import UserError
from marey.evaluation.inspect import inspect_text
from marey.training.again import Again, launcher_note, typed_program
from marey.training.application import run_application
from marey.training.module import TrainingModule
from marey.training.signals import FROM_SCHEDULERS, StopRequest
from marey.training.verify import tree_differences

from . import latent_runs
from .conftest import SMALL, Finished

Train = Callable[..., Finished]
EVERY_STEP = "checkpoint.every_n_train_steps=1"


class At:
    """Does something in the forward pass of one micro-step (counted from the start of the process's run)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, micro_step: int, action: Callable[[], Any]) -> None:
        original = TrainingModule.training_step
        self.done = False

        def step(module: TrainingModule, batch: Any, batch_idx: int) -> Any:
            if module.global_step == micro_step and not self.done:
                self.done = True
                action()
            return original(module, batch, batch_idx)

        monkeypatch.setattr(TrainingModule, "training_step", step)


def receipt_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "receipt.json").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_request_finishes_the_step_saves_and_says_how_to_go_on(
    train: Train, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    forwarded: list[int] = []
    original = StopRequest.listen

    def listen(stop: StopRequest) -> None:
        original(stop)
        stop.forward = forwarded.append  # as the launcher of several ranks has it

    monkeypatch.setattr(StopRequest, "listen", listen)
    At(monkeypatch, 1, lambda: signal.raise_signal(number))
    done = train("run", "trainer.max_steps=9", "trainer.min_steps=9", "accumulate_grad_batches=3")
    receipt, about = receipt_of(done.folder), done.checkpoint()["marey"]
    assert receipt["status"] == receipt["attempts"][0]["status"] == "stopped on request"
    assert (about["step"], about["micro_step"]) == (2, 6)
    assert receipt["consumed"]["optimizer_steps"] == int(done.rows()[-1]["step"]) == 2
    assert signal.getsignal(number) is before
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert any(line.startswith(f"{name}: finishing this step") for line in done.lines)
    # A terminal sends Ctrl-C to every rank; what a scheduler sends is passed on.
    assert forwarded == ([] if number == signal.SIGINT else [number])
    assert done.lines[-2:] == ["resume with", f"    {receipt['resume_command']}"]


def test_a_signal_before_training_is_kept_for_the_run(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    with StopRequest(print, signals=FROM_SCHEDULERS):
        signal.raise_signal(signal.SIGUSR1)
        done = train("run", "trainer.max_steps=9")
    assert "SIGUSR1: finishing this step" in capsys.readouterr().out
    assert receipt_of(done.folder)["status"] == "stopped on request"
    assert done.checkpoint()["marey"]["step"] == 1


def test_a_ctrl_c_before_training_ends_it_with_nothing_to_save(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with StopRequest(print):
        signal.raise_signal(signal.SIGINT)
        done = train("run", "trainer.max_steps=9")
    assert "Ctrl-C: " in capsys.readouterr().out
    assert done.lines == ["stopped on request before the first step; there is nothing to save"]
    assert done.newest is None
    assert list(done.folder.iterdir()) == []
    # Ranks that a launcher started agree on the step that is their last.
    monkeypatch.setenv("SLURM_PROCID", "0")
    with StopRequest(print):
        signal.raise_signal(signal.SIGINT)
        assert train("other", "trainer.max_steps=9").checkpoint()["marey"]["step"] == 1


@pytest.mark.parametrize("objective", ["encoder", "causal"])
def test_the_command_goes_on_from_anywhere_to_the_same_weights(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    launch = tmp_path / "a folder's"
    launch.mkdir()
    if objective == "encoder":
        words = [*SMALL, f"data.train={store}"]
    else:
        latent_runs.write(launch, "a", 40)  # named from the folder where the command is typed
        words = ["--config-name", "causal_video", *latent_runs.SMALL, "data.train=a.csv"]
    words += ["trainer.max_steps=4", "trainer.limit_val_batches=0", EVERY_STEP]

    def run(*more: str) -> None:
        monkeypatch.setattr(sys, "argv", ["marey", "train", *words, *more])
        run_application([*words, *more])

    monkeypatch.chdir(launch)
    run("hydra.run.dir=../whole", "checkpoint.dirpath=../whole/kept")
    At(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGTERM))
    run('hydra.run.dir="run =x"', "checkpoint.dirpath=kept")
    stopped = receipt_of(launch / "run =x")
    assert (stopped["status"], stopped["consumed"]["optimizer_steps"]) == ("stopped on request", 2)
    lines = inspect_text(launch / "run =x").splitlines()
    assert [line.split(maxsplit=1) for line in lines if line[:7] == "resume "] == [
        ["resume", stopped["resume_command"]]
    ]
    cd, folder, and_then, *typed = shlex.split(stopped["resume_command"])
    assert (cd, folder, and_then) == ("cd", str(launch), "&&")
    monkeypatch.chdir(folder)
    words = typed[typed.index("train") + 1 :]
    run()
    receipt = receipt_of(launch / "run =x")
    assert (receipt["status"], receipt["resume_command"]) == ("finished", None)
    assert [(a["from_step"], a["to_step"]) for a in receipt["attempts"]] == [(0, 2), (2, 4)]
    assert [entry["step"] for entry in receipt["checkpoints"]] == [1, 2, 3, 4]
    whole, again = (torch.load(kept / "last.ckpt") for kept in (tmp_path / "whole" / "kept", launch / "kept"))
    assert all(torch.equal(whole["state_dict"][name], again["state_dict"][name]) for name in whole["state_dict"])


VALIDATED = (
    "trainer.max_epochs=-1",
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
    "trainer.log_every_n_steps=3",
    "trainer.limit_val_batches=3",
)


def validated_rows(folder: Path) -> list[str]:
    return [row.split(",")[0] for row in (folder / "validation.csv").read_text().splitlines()[1:]]


def test_a_request_in_a_validation_breaks_it_off_and_the_resumed_run_makes_it(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train("whole", *VALIDATED)
    assert validated_rows(whole.folder) == ["2", "4"]
    original, looks = TrainingModule.validation_step, []

    def step(module: TrainingModule, batch: Any, batch_idx: int) -> Any:
        looks.append(module.global_step)
        if asked[len(looks) - 1]:
            signal.raise_signal(signal.SIGTERM)
        return original(module, batch, batch_idx)

    monkeypatch.setattr(TrainingModule, "validation_step", step)
    asked = [True]
    first = train("run", *VALIDATED)
    assert looks == [2]
    assert validated_rows(first.folder) == []
    assert first.lines[-3].startswith("stopped on request after 2 optimizer steps; newest checkpoint ")
    assert first.checkpoint()["marey"]["resume"]["validation_due"] is True
    start = (f"resume.ckpt_path={first.checkpoints}/last.ckpt", "resume.weights_only=false")
    kept = {"checkpoints": "run-checkpoints"}
    asked += [False, True]  # again, in the one that is made up for: before any further step
    second = train("run", *VALIDATED, *start, **kept)
    assert looks == [2, 2, 2]
    assert receipt_of(second.folder)["status"] == "stopped on request"
    assert [path.name for path in first.checkpoints.glob("epoch*")] == ["epoch-0000-step-0000002.ckpt"]
    asked += [False] * 40
    third = train("run", *VALIDATED, *start, **kept)
    assert receipt_of(third.folder)["status"] == "finished"
    assert (third.folder / "validation.csv").read_text() == (whole.folder / "validation.csv").read_text()
    timed = ("seconds", "per_second", "wait")
    rows = [
        [{key: row[key] for key in row if not any(word in key for word in timed)} for row in run.rows()]
        for run in (whole, third)
    ]
    assert rows[0] == rows[1]
    one, other = whole.checkpoint(), third.checkpoint()
    assert list(tree_differences(one["state_dict"], other["state_dict"])) == []
    assert list(tree_differences(one["optimizer_states"], other["optimizer_states"])) == []


def test_a_stop_on_request_looks_at_no_validation_data(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    At(monkeypatch, 0, lambda: signal.raise_signal(signal.SIGTERM))
    done = train("run", *VALIDATED)
    assert receipt_of(done.folder)["status"] == "stopped on request"
    assert validated_rows(done.folder) == []
    assert not any(line.startswith("validation") for line in done.lines)


def test_a_refusal_after_a_checkpoint_says_how_to_go_on(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UserError("the disk of these clips is gone")

    said: list[str] = []
    monkeypatch.setattr("marey.training.record.Record.say_again", lambda record: said.append(record.newest.name))
    At(monkeypatch, 0, refuse)
    with pytest.raises(UserError, match="is gone"):
        train("early", "trainer.max_steps=3", EVERY_STEP)
    assert said == []  # there is nothing to go on from
    At(monkeypatch, 2, refuse)
    with pytest.raises(UserError, match="is gone"):
        train("late", "trainer.max_steps=3", EVERY_STEP)
    assert said == ["epoch-0000-step-0000002.ckpt"]


def killed(folder: Path, **known: Any) -> None:
    """Make a finished receipt that of a process that was killed."""
    receipt = receipt_of(folder)
    for part in (receipt, receipt["attempts"][-1]):
        part.update(status="running", ended=None, how_it_ended="")
    receipt.update(known)
    (folder / "receipt.json").write_text(json.dumps(receipt))


def test_sittings_of_one_run_follow_each_other_in_its_receipt(train: Train, tmp_path: Path) -> None:
    first = train("run", "trainer.max_steps=3", EVERY_STEP)
    killed(first.folder)
    start = (f"resume.ckpt_path={first.checkpoints}/epoch-0000-step-0000002.ckpt", "resume.weights_only=false")
    kept = {"checkpoints": "run-checkpoints"}
    second = train("run", "trainer.max_steps=4", EVERY_STEP, *start, **kept)
    third = train("run", "trainer.max_steps=5", EVERY_STEP, f"resume.ckpt_path={second.newest}", start[1], **kept)
    receipt = receipt_of(third.folder)
    attempts = receipt["attempts"]
    told = [(a["number"], a["status"], a["from_step"], a["to_step"]) for a in attempts]
    assert told == [(1, "killed", 0, 3), (2, "finished", 2, 4), (3, "finished", 4, 5)]
    assert len({a["run_id"] for a in attempts}) == 3
    assert attempts[0]["how_it_ended"].startswith("it left no word")
    assert all(a["ended"] >= a["started"] and a["host"]["packages"]["torch"] for a in attempts)
    assert [(e["step"], e.get("abandoned", False)) for e in receipt["checkpoints"]] == [
        (step, False) for step in (1, 2, 3, 4, 5)
    ]
    assert "3; before this one: killed at step 3; finished at step 4" in inspect_text(third.folder)
    # Another folder: its sittings so far come along, and whose the last was is said.
    other = train("other", "trainer.max_steps=6", start[1], f"resume.ckpt_path={second.newest}")
    told = [(a["number"], a["status"], a["to_step"]) for a in receipt_of(other.folder)["attempts"]]
    assert told == [(1, "killed", 3), (2, "continued elsewhere", 4), (3, "finished", 6)]


def test_a_checkpoint_that_a_kill_left_unlisted_is_listed(train: Train) -> None:
    first = train("run", "trainer.max_steps=2", EVERY_STEP)
    entries = receipt_of(first.folder)["checkpoints"]
    killed(first.folder, checkpoints=entries[:1])
    start = (f"resume.ckpt_path={first.checkpoints}/last.ckpt", "resume.weights_only=false")
    again = train("run", "trainer.max_steps=3", EVERY_STEP, *start)
    listed = receipt_of(again.folder)["checkpoints"]
    assert listed[:2] == entries
    assert [entry["step"] for entry in listed] == [1, 2, 3]


def test_a_run_folder_belongs_to_one_run(train: Train, tmp_path: Path) -> None:
    first = train("run", "trainer.max_steps=2", EVERY_STEP)
    with pytest.raises(UserError, match=r"holds the records of a run with checkpoints .*marey inspect"):
        train("run", "trainer.max_steps=2", "seed=1", checkpoints="elsewhere")
    other = train("other", "trainer.max_steps=2", "seed=1")
    with pytest.raises(UserError, match=r"records of another run .*set hydra\.run\.dir to that run's folder"):
        train("run", "trainer.max_steps=3", "seed=1", f"resume.ckpt_path={other.newest}", "resume.weights_only=false")
    assert receipt_of(first.folder)["seed"] == 0
    with pytest.raises(UserError, match=r"holds the records of a run with checkpoints"):
        train("run", "trainer.max_steps=2", EVERY_STEP)
    # Killed before its first checkpoint and typed again, it is still the same run.
    for path in first.checkpoints.iterdir():
        path.unlink()
    killed(first.folder)
    again = train("run", "trainer.max_steps=2", EVERY_STEP)
    assert [a["status"] for a in receipt_of(again.folder)["attempts"]] == ["killed", "finished"]


def test_the_records_of_a_run_are_not_replaced_by_another_ones(train: Train) -> None:
    off = "trainer.enable_checkpointing=false"
    first = train("run", "trainer.max_steps=2", off)
    kept = receipt_of(first.folder)
    for words in (["trainer.max_steps=2", off], ["trainer.max_steps=2", off, "seed=1"]):
        with pytest.raises(UserError, match=rf"{kept['run_id']}, finished.*set hydra\.run\.dir to another"):
            train("run", *words)
    assert receipt_of(first.folder) == kept
    assert len(first.rows()) > 0
    # A killed run's receipt may say that it made no step: its metrics know better.
    killed(first.folder, consumed={**kept["consumed"], "optimizer_steps": 0}, attempts=[dict(kept["attempts"][0])])
    receipt = receipt_of(first.folder)
    receipt["attempts"][0].update(to_step=0, status="running")
    (first.folder / "receipt.json").write_text(json.dumps(receipt))
    with pytest.raises(UserError, match=r"records of another run .*running"):
        train("run", "trainer.max_steps=2", off, "seed=1")
    # A start that was refused before its first step leaves nothing to protect.
    (first.folder / "metrics.csv").write_text("step\n")
    assert receipt_of(train("run", "trainer.max_steps=2", off, "seed=1").folder)["seed"] == 1
    (first.folder / "receipt.json").write_text("{")
    with pytest.raises(UserError, match=r"receipt\.json cannot be read .*; set hydra\.run\.dir"):
        train("run", "trainer.max_steps=2", off)


def test_how_the_program_was_started_is_how_it_is_started_again(tmp_path: Path, monkeypatch: Any) -> None:
    script = tmp_path / "marey"
    script.touch(mode=0o755)
    assert typed_program([str(script), "train", "a=1"], [sys.executable, str(script)]) == [str(script), "train"]
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert typed_program([str(script), "train", "a=1"], [sys.executable, str(script)]) == ["marey", "train"]
    module = typed_program(["/x/marey/__main__.py", "train"], ["python", "-P", "-m", "marey", "train"])
    assert module == [sys.executable, "-P", "-m", "marey", "train"]
    monkeypatch.chdir(tmp_path)
    assert typed_program(["main.py", "a=1"], ["python", "main.py"]) == [sys.executable, str(tmp_path / "main.py")]
    assert launcher_note({}) is None
    assert launcher_note({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == "under srun, as before"


def test_the_command_replaces_the_start_and_keeps_the_rest() -> None:
    words = ["data.train='a b'", "resume.ckpt_path=x", "+resume.weights=ema", "resume.allow_changes=[seed]", "seed=2"]
    words += ["hydra.run.dir=old", "hydra.job.chdir=true"]
    again = Again(program=["marey", "train"], overrides=words, folder=Path("/l"), run_dir=Path("/r"))
    assert again.command(Path("/c/last.ckpt")) == (
        "cd /l && marey train 'data.train='\"'\"'a b'\"'\"'' seed=2 hydra.job.chdir=true "
        "resume.ckpt_path=/c/last.ckpt resume.weights_only=false hydra.run.dir=/r"
    )
    start = again.command(None)
    assert start is not None
    assert "resume.ckpt_path=x +resume.weights=ema 'resume.allow_changes=[seed]' seed=2" in start
    assert start.endswith("hydra.job.chdir=true hydra.run.dir=/r")
    assert Again(["m"], [], Path("/l"), Path("/${x}")).command(None) is None
