"""What is refused before anything is loaded: absent hardware, absent launchers, absent data."""

from __future__ import annotations

from pathlib import Path

import pytest

from marey.config.compose import load_config, load_run
from marey.core.errors import UserError
from marey.training.batchplan import batch_plan
from marey.training.launched import launched_rank
from marey.training.preflight import Machine, check_data, check_hardware


class Fake(Machine):
    def __init__(self, gpus: int = 0, *, mps: bool = False) -> None:
        self.gpus, self.mps = gpus, mps

    def cuda_devices(self) -> int:
        return self.gpus

    def has_mps(self) -> bool:
        return self.mps


@pytest.mark.parametrize(
    ("overrides", "gpus", "says"),
    [
        (
            [],
            0,
            "8 devices on 2 nodes and this machine has no GPU; set trainer.devices=1 trainer.num_nodes=1",
        ),
        (["trainer.num_nodes=1"], 0, "this machine has no GPU"),
        (["trainer.accelerator=gpu"], 0, "trainer.accelerator=gpu asks for a GPU"),
        (["trainer.accelerator=cuda"], 0, "trainer.accelerator=cuda asks for a GPU"),
        (["trainer.accelerator=mps"], 0, "trainer.accelerator=mps asks for an Apple GPU"),
        (["trainer.num_nodes=1"], 4, "has 4; set trainer.devices=4"),
        ([], 8, "trainer.num_nodes=2 needs a launcher"),
        (["trainer.accelerator=cpu", "trainer.devices=2"], 0, "needs a launcher"),
    ],
)
def test_what_the_machine_has_not_is_refused_with_the_override_that_works(
    overrides: list[str], gpus: int, says: str
) -> None:
    with pytest.raises(UserError, match=r"(trainer\.\w+=\S+)") as refusal:
        check_hardware(load_config(overrides).trainer, machine=Fake(gpus), environment={})
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "gpus", "environment"),
    [
        (["recipe=smoke"], 0, {}),
        (["recipe=smoke"], 1, {}),
        (["trainer.num_nodes=1"], 8, {}),
        ([], 8, {"TORCHELASTIC_RUN_ID": "1"}),
        ([], 8, {"SLURM_JOB_ID": "1"}),
        (["trainer.num_nodes=1", "trainer.accelerator=cpu", "trainer.devices=2"], 0, {}),
    ],
)
def test_what_the_machine_has_is_accepted(overrides: list[str], gpus: int, environment: dict[str, str]) -> None:
    check_hardware(load_config(overrides).trainer, machine=Fake(gpus), environment=environment)


def test_an_absent_store_says_how_to_build_one_and_names_the_embedded_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        check_data(load_config([]))
    assert "marey ingest FOLDER_OF_VIDEOS data/walking_tours.lance" in str(refusal.value)
    assert "data=demo" in str(refusal.value)


def test_every_source_of_a_mixture_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent"):
        check_data(load_config([f"data.train=[{{path: {tmp_path}}}, {{path: {tmp_path}/absent}}]"]))


def test_present_data_and_the_embedded_set_pass(tmp_path: Path) -> None:
    check_data(load_config([f"data.train={tmp_path}"]))
    check_data(load_config(["data=demo"]))


def test_absent_latents_say_how_to_encode_some(tmp_path: Path) -> None:
    def check(*overrides: str) -> None:
        check_data(load_run(overrides, config_name="causal_video"))

    check("data=demo")
    with pytest.raises(UserError, match=r"data\.train=no\.csv does not exist .* `marey encode STORE OUT`"):
        check("data.train=no.csv")
    (tmp_path / "a.csv").touch()
    with pytest.raises(UserError, match=r"data\.val=no\.csv does not exist"):
        check(f"data.train={tmp_path / 'a.csv'}", "data.val=no.csv")
    with pytest.raises(UserError, match=r"data\.sources=no\.csv does not exist"):
        check("data.sources=[{name: a, manifest: no.csv}]")


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from marey.training.run import check

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "videos").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "last.ckpt").touch()
    config = load_config(
        ["recipe=smoke", "data.train='~/videos'", "resume.ckpt_path='~/kept/last.ckpt'", "resume.weights_only=false"]
    )
    check(config, tmp_path / "kept")


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "0", "LOCAL_RANK": "0"}, 0),
        ({"RANK": "5", "LOCAL_RANK": "0"}, 5),
        ({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1"}, 0),  # torchrun inside one task of a job
        ({"SLURM_PROCID": "0"}, 0),
        ({"SLURM_PROCID": "3"}, 3),
        ({"SLURM_PROCID": "0", "NODE_RANK": "0", "LOCAL_RANK": "1"}, 1),  # started by Lightning in a job's shell
        ({"NODE_RANK": "1"}, 1),  # Lightning's own launcher, the second node's first process
        ({"NODE_RANK": "0", "LOCAL_RANK": "0"}, 0),
        ({"JSM_NAMESPACE_RANK": "2"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "1"}, 1),
    ],
)
def test_one_process_of_a_launch_speaks_for_the_run(environment: dict[str, str], rank: int) -> None:
    assert launched_rank(environment) == rank


def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    from marey.training.run import check

    (tmp_path / "file").touch()
    config = load_config(["recipe=smoke"])
    for folder in (tmp_path / "file" / "checkpoints", Path("/proc/nope")):
        with pytest.raises(UserError, match=r"checkpoints cannot be written to .*; set checkpoint\.dirpath"):
            check(config, folder)
    check(config, tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    check(load_config(["recipe=smoke", "trainer.enable_checkpointing=false"]), Path("/proc/nope"))


@pytest.mark.parametrize("limit", ["1", "0"])
def test_validation_that_an_epoch_never_reaches_is_refused(limit: str) -> None:
    words = ["recipe=smoke", f"trainer.limit_val_batches={limit}", "trainer.val_check_interval=100000"]
    with pytest.raises(UserError, match="val_check_interval=100000 is more than the 3 micro-steps of an epoch"):
        batch_plan(load_config(words), 24)
    batch_plan(load_config([*words, "trainer.check_val_every_n_epoch=null"]), 24)
    batch_plan(load_config([*words, "trainer.val_check_interval=3"]), 24)
