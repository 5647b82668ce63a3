from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from marey.config.schema import EncoderConfig
from marey.core.errors import UserError
from marey.training.checkpoint import AtomicCheckpointIO, check_retention, link_last
from marey.training.folders import check_folder, checkpoint_name, checkpoints_in

from .conftest import Finished


def test_the_step_is_part_of_every_name() -> None:
    assert checkpoint_name("epoch-{epoch:04d}", epoch=3, step=400) == "epoch-0003-step-0000400.ckpt"
    assert checkpoint_name("s{step}", epoch=3, step=400) == "s400.ckpt"
    assert checkpoint_name("a", epoch=3, step=400) == "a-step-0000400.ckpt"
    named = checkpoint_name("{epoch:02d}", epoch=3, step=400, insert_names=True)
    assert named == "epoch=03-step-step=0000400.ckpt"


@pytest.mark.parametrize("template", ["{val_loss}", "{epoch:xyz}", "{", "a/{step}", ".{step}"])
def test_a_name_that_cannot_be_made_is_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.filename="):
        checkpoint_name(template, epoch=0, step=0)


def test_another_runs_folder_is_refused_and_its_own_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    check_folder(folder, None)
    folder.mkdir()
    (folder / "notes.txt").touch()
    (folder / ".last.ckpt.1234.tmp").touch()
    check_folder(folder, None)
    (folder / "epoch-0000-step-0000005.ckpt").touch()
    with pytest.raises(UserError, match=r"holds checkpoints of another run .*resume.ckpt_path="):
        check_folder(folder, None)
    with pytest.raises(UserError, match="another run"):
        check_folder(folder, tmp_path / "elsewhere" / "last.ckpt")
    check_folder(folder, folder / "epoch-0000-step-0000005.ckpt")
    with pytest.raises(UserError, match="is a file"):
        check_folder(folder / "notes.txt", None)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io = AtomicCheckpointIO()
    io.save_checkpoint({"a": 1}, tmp_path / "x.ckpt")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        io.save_checkpoint({"a": 2}, tmp_path / "x.ckpt")
    assert io.load_checkpoint(tmp_path / "x.ckpt") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]


@pytest.mark.parametrize("hard_links", [True, False])
def test_last_is_the_newest_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not hard_links:
        monkeypatch.setattr(os, "link", no_links)
    for name in ("a", "b", "b"):
        (tmp_path / f"{name}.ckpt").write_text(name)
        last = link_last(tmp_path / f"{name}.ckpt")
        assert last.read_text() == name
        assert last.samefile(tmp_path / f"{name}.ckpt") is hard_links
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt", "last.ckpt"]


def test_the_newest_n_are_kept_and_the_receipt_says_which_went(train: Callable[..., Finished]) -> None:
    import json

    done = train("run", "trainer.max_steps=4", "checkpoint.every_n_train_steps=1", "checkpoint.save_top_k=2")
    names = [path.name for path in checkpoints_in(done.checkpoints)]
    assert names == ["epoch-0000-step-0000003.ckpt", "epoch-0000-step-0000004.ckpt", "last.ckpt"]
    listed = json.loads((done.folder / "receipt.json").read_text())["checkpoints"]
    assert [(entry["step"], entry.get("removed", False)) for entry in listed] == [
        (1, True),
        (2, True),
        (3, False),
        (4, False),
    ]


def test_keeping_none_but_the_last_keeps_the_last(train: Callable[..., Finished]) -> None:
    done = train("run", "trainer.max_steps=2", "checkpoint.every_n_train_steps=1", "checkpoint.save_top_k=0")
    assert [path.name for path in checkpoints_in(done.checkpoints)] == ["last.ckpt"]
    assert done.checkpoint()["marey"]["step"] == 2


def test_keeping_nothing_at_all_is_refused(small: Callable[..., EncoderConfig]) -> None:
    check_retention(small("checkpoint.save_top_k=0").checkpoint)
    with pytest.raises(UserError, match="would keep no checkpoint"):
        check_retention(small("checkpoint.save_top_k=0", "checkpoint.save_last=false").checkpoint)


def test_a_checkpoint_says_what_it_is(train: Callable[..., Finished]) -> None:
    done = train("run", "trainer.max_steps=2", "accumulate_grad_batches=2", "projector.norm_group=2")
    content = torch.load(done.checkpoints / "last.ckpt", weights_only=True)
    about = content["marey"]
    numbers = {key: about[key] for key in ("step", "epoch", "micro_step", "world_size")}
    assert numbers == {"step": 2, "epoch": 0, "micro_step": 4, "world_size": 1}
    assert (about["effective_batch"], about["statistic_batch"], about["norm_group"]) == (8, 4, 2)
    assert about["config"]["model"]["name"] == "vit_nano"
    assert about["receipt"]["consumed"]["clips"] == 16
    assert about["keys"].keys() == {"state_dict", "state_dict_ema"}
    assert about["preprocessing"]["layout"] == "B,C,T,H,W"
    assert {"epoch", "global_step", "optimizer_states", "lr_schedulers", "loops"} <= content.keys()


def test_without_an_average_there_is_no_empty_one(train: Callable[..., Finished]) -> None:
    content = train("run", "trainer.max_steps=1", "ema.enabled=false").checkpoint()
    assert "state_dict_ema" not in content
    assert content["marey"]["ema"] is None
    assert content["marey"]["keys"].keys() == {"state_dict"}
