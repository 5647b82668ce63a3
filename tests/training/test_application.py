"""What ``marey train`` does around a run: folders, where paths lead, how a plan ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from marey.core.errors import UserError
from marey.training import application
from marey.training.application import run_application
from marey.training.lock import alone_in
from marey.training.plan import plan_text


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a command is typed in, with data, and with checkpoints of an earlier run."""
    folder = tmp_path / "launch"
    (folder / "videos").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.ckpt").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["marey", "train"])
    return folder


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would have been run."""
    seen: list[dict[str, Any]] = []

    def execute(config: Any, **arguments: Any) -> None:
        seen.append({"config": config, "cwd": Path.cwd(), **arguments})

    monkeypatch.setattr(application, "execute", execute)
    return seen


def test_with_chdir_checkpoints_follow_the_run_folder_and_data_stays(launch: Path, runs: list[dict[str, Any]]) -> None:
    words = ["recipe=smoke", "data=custom", "data.train=videos", "hydra.run.dir=../run"]
    run_application([*words, "hydra.job.chdir=true"])
    (run,) = runs
    assert run["run_dir"] == launch.parent / "run"
    assert run["checkpoint_dir"] == launch.parent / "run" / "checkpoints"
    assert run["cwd"] == launch  # from here data.train=videos and resume.ckpt_path are found
    assert Path.cwd() == launch
    with pytest.raises(UserError, match=r"holds checkpoints of another run \(last\.ckpt\)"):
        run_application(words)


def test_the_run_folder_of_another_rank_is_the_first_ones(
    launch: Path, runs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["recipe=smoke", "data=custom", "data.train=videos", "hydra.run.dir=../own", "checkpoint.dirpath=../kept"]
    monkeypatch.setenv(application.RUN_DIR_VARIABLE, str(launch / "first"))
    run_application(words)
    monkeypatch.setenv("LOCAL_RANK", "1")
    run_application(words)
    assert [run["run_dir"] for run in runs] == [launch.parent / "own", launch / "first"]


@pytest.mark.parametrize(
    "environment", [{"RANK": "1", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}]
)
def test_processes_of_a_launcher_need_a_run_folder_that_all_of_them_know(
    launch: Path, runs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = ["recipe=smoke", "data=custom", "data.train=videos", "checkpoint.dirpath=elsewhere"]
    devices = f"trainer.devices={environment.get('WORLD_SIZE', '4')}"
    with pytest.raises(UserError, match=r"processes were started for this run, .* hydra\.run\.dir=runs/NAME"):
        run_application([*words, devices])
    assert runs == []
    assert not (launch / "outputs").exists()


def test_a_run_folder_that_cannot_be_made_is_refused(launch: Path, runs: list[dict[str, Any]]) -> None:
    words = ["recipe=smoke", "checkpoint.dirpath=../kept", "hydra.run.dir=/proc/nope/run"]
    with pytest.raises(UserError, match=r"the run folder cannot be made .*/proc/nope.*set hydra\.run\.dir"):
        run_application(words)
    assert runs == []


def test_a_refused_start_leaves_the_first_ones_configuration(launch: Path, runs: list[dict[str, Any]]) -> None:
    words = ["recipe=smoke", "data=custom", "data.train=videos", "checkpoint.dirpath=../kept", "hydra.run.dir=../run"]
    run_application(words)
    folder = launch.parent / "run"
    before = {path: path.read_bytes() for path in (folder / ".hydra").iterdir()}
    assert before
    record = {"run_id": "first", "status": "finished", "config": {}, "consumed": {"optimizer_steps": 3}}
    (folder / "receipt.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"records of another run \(first, finished"):
        run_application([*words, "seed=7"])
    torch.save({"marey": {"receipt": {"run_id": "second"}}}, launch / "b.ckpt")
    with pytest.raises(UserError, match=r"another run \(first\) than the checkpoint"):
        run_application([*words, "seed=7", "resume.ckpt_path=b.ckpt", "resume.weights_only=false"])
    (folder / "receipt.json").unlink()
    with alone_in([("hydra.run.dir", folder)], run_dir=folder), pytest.raises(UserError, match=r"set hydra\.run\.dir"):
        run_application([*words, "seed=7"])
    assert {path: path.read_bytes() for path in (folder / ".hydra").iterdir()} == before
    assert len(runs) == 1


def test_a_ctrl_c_while_the_program_imports_is_a_request(launch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    went_on = []

    def execute(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)

    monkeypatch.setattr(application, "execute", execute)
    run_application(["recipe=smoke", "checkpoint.dirpath=../kept", "hydra.run.dir=../run"])
    assert went_on == [True]


def test_an_error_of_the_run_itself_is_not_taken_for_a_refusal(launch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("a bug")

    monkeypatch.setattr(application, "execute", execute)
    with pytest.raises(FileNotFoundError, match="a bug"):
        run_application(["recipe=smoke", "checkpoint.dirpath=../kept", "hydra.run.dir=../run"])


def test_a_plan_without_an_end_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["trainer.max_epochs=-1", "trainer.devices=1", "trainer.num_nodes=1"]
    assert "until it is stopped" in plan_text(words)
    assert "until trainer.max_time=00:01:00:00" in plan_text([*words, "trainer.max_time='00:01:00:00'"])
    assert "None" not in plan_text(words)
    assert os.listdir(tmp_path) == []  # noqa: PTH208
