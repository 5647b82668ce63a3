"""Checkpoints survive what disks, kills and other runs do to them."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from marey.core.errors import UserError
from marey.core.files import SEAL_BYTES, leftovers, read_seal, seal_holds
from marey.evaluation.checkpoint_file import read_archive
from marey.training import checkpoint as checkpoint_module
from marey.training.checkpoint import save_sealed
from marey.training.lock import NAME, alone_in, check_free
from marey.training.module import TrainingModule
from marey.training.reading import newest_complete, read_checkpoint

from .conftest import Finished

Train = Callable[..., Finished]
EVERY_STEP = "checkpoint.every_n_train_steps=1"


def content_of(step: int) -> dict[str, Any]:
    return {"state_dict": {"w": torch.arange(5000.0) + step}, "marey": {"format": 1, "kind": "encoder", "step": step}}


def test_a_seal_is_a_zip_comment_and_covers_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    digest = save_sealed(content_of(1), path)
    assert read_seal(path) == digest
    assert seal_holds(path)
    assert zipfile.ZipFile(path).comment.endswith(digest.encode())
    assert torch.equal(torch.load(path, weights_only=True)["state_dict"]["w"], content_of(1)["state_dict"]["w"])
    whole = path.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - SEAL_BYTES - 1, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert not seal_holds(path), place
    torch.save(content_of(1), path)
    assert read_seal(path) is None


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def foreign(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)


def another_file(path: Path) -> None:
    path.write_text("<html>not found</html>")


def executing(path: Path) -> None:
    torch.save({"state_dict": Bomb()}, path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncated, "cut off, damaged or no checkpoint"),
        (flipped, "its SHA-256 does not match"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (foreign, "was not written by this version"),
        (another_file, "cut off, damaged or no checkpoint"),
        (executing, "would execute code"),
        (Path.unlink, "is not a file"),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_what_is_no_whole_checkpoint_is_refused_and_the_newest_whole_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], reason: str, exact: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 3, 4):
        save_sealed(content_of(step), tmp_path / f"{step}.ckpt")
    flipped(tmp_path / "3.ckpt")  # damaged as well, so it is not the one to name
    damage(tmp_path / "4.ckpt")
    with pytest.raises(UserError, match=reason) as refused:
        read_checkpoint(tmp_path / "4.ckpt", exact=exact)
    assert str(refused.value).endswith(f"the newest complete checkpoint there is resume.ckpt_path={tmp_path}/2.ckpt")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "exploded").exists()
    if reason != "was not written by this version":  # evaluation tells what a foreign file is
        with pytest.raises(UserError):
            read_archive(tmp_path / "4.ckpt")


def test_weights_of_an_unsealed_file_are_taken_with_a_note_and_its_state_is_not(tmp_path: Path) -> None:
    torch.save(content_of(7), tmp_path / "old.ckpt")
    _, notes = read_checkpoint(tmp_path / "old.ckpt", exact=False)
    assert "carries no completion marker" in notes[0]
    with pytest.raises(UserError, match=r"completion marker .*resume\.weights_only=true.*; give another checkpoint"):
        read_checkpoint(tmp_path / "old.ckpt", exact=True)
    assert newest_complete(tmp_path) is None


def test_an_interrupted_write_is_cleaned_up_by_the_next_run_in_the_folder(train: Train, tmp_path: Path) -> None:
    kept, run = tmp_path / "run-checkpoints", tmp_path / "run"
    (run / "exposure").mkdir(parents=True)
    kept.mkdir()
    left = [run / ".receipt.json.89abcdef.tmp", kept / ".5.ckpt.0123abcd.tmp", run / "exposure/.s.parquet.01234567.tmp"]
    for path in left:
        path.write_bytes(b"x" * 600_000)
    mine = kept / ".notes.tmp"
    mine.touch()
    done = train("run", "trainer.max_steps=1")
    line = next(line for line in done.lines if "interrupted write" in line)
    assert (
        "removed 3 files (1.8 MB) that an interrupted write left: .receipt.json.89abcdef.tmp, .5.ckpt.0123abcd.tmp"
        in line
    )
    assert leftovers(kept) == leftovers(run) == leftovers(run / "exposure") == []
    assert mine.exists()


HOLD = """
import sys, time
from pathlib import Path
from marey.training.lock import alone_in
with alone_in([("checkpoint.dirpath", Path(sys.argv[1]))], run_dir=Path("there")):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_in_use_is_refused_until_its_run_is_killed(train: Train, tmp_path: Path) -> None:
    kept = tmp_path / "run-checkpoints"
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(kept)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        sentence = rf"run-checkpoints is in use by another run \(process {other.pid} on .*set checkpoint\.dirpath to"
        with pytest.raises(UserError, match=sentence):
            check_free(kept, key="checkpoint.dirpath")
        with pytest.raises(UserError, match=sentence):
            train("run", "trainer.max_steps=1")
        assert not (tmp_path / "run" / "receipt.json").exists()
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    assert train("run", "trainer.max_steps=1").newest is not None
    assert not (kept / NAME).exists()


def test_one_folder_for_both_is_locked_once(tmp_path: Path) -> None:
    both = [("hydra.run.dir", tmp_path), ("checkpoint.dirpath", tmp_path / "." / "")]
    with alone_in(both, run_dir=tmp_path) as notes:
        assert notes == []
        with pytest.raises(UserError, match="in use"), alone_in(both[:1], run_dir=tmp_path):
            pass


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A quota of this process: the kernel refuses to write past ``size`` bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_that_has_no_room_leaves_the_one_before_and_a_closed_receipt(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoint_module.AtomicCheckpointIO.save_checkpoint

    def with_a_quota(self: Any, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with files_of_at_most(100_000 if checkpoint["global_step"] == 3 else 10**9):
            save(self, checkpoint, path, storage_options)

    monkeypatch.setattr(checkpoint_module.AtomicCheckpointIO, "save_checkpoint", with_a_quota)
    settings = ("trainer.max_steps=5", EVERY_STEP, "checkpoint.save_top_k=1")
    with pytest.raises(UserError, match=r"step-0000003\.ckpt cannot be written \(File too large\)"):
        train("run", *settings)
    kept = tmp_path / "run-checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["epoch-0000-step-0000002.ckpt", "last.ckpt"]
    assert seal_holds(kept / "last.ckpt")
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    assert (receipt["status"], receipt["attempts"][-1]["status"]) == ("refused", "refused")
    assert f"resume.ckpt_path={kept}/last.ckpt resume.weights_only=false" in receipt["resume_command"]
    monkeypatch.undo()
    start = (f"resume.ckpt_path={kept}/last.ckpt", "resume.weights_only=false")
    assert train("run", *settings, *start).checkpoint()["marey"]["step"] == 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_records_that_cannot_be_written_stop_the_run_in_a_sentence(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    original, whole = Path.open, [True]

    def refusing(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self.name == "metrics.csv" and mode == "a" and len(whole) > 2:
            raise OSError(code, os.strerror(code))
        whole.extend([True] * (self.name == "metrics.csv" and mode == "a"))
        return original(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    monkeypatch.setattr("marey.training.receipt.Receipt.close", lambda *_: refusing(Path("metrics.csv"), "a"))
    with pytest.raises(UserError, match=rf"metrics\.csv cannot be written \({os.strerror(code)}\); checkpoints"):
        train("run", "trainer.max_steps=5", EVERY_STEP)
    monkeypatch.undo()
    assert seal_holds(tmp_path / "run-checkpoints" / "last.ckpt")


def test_a_kill_in_a_write_leaves_a_temporary_file_and_the_checkpoint_before(train: Train, tmp_path: Path) -> None:
    """What SIGKILL leaves, made in a child process that dies inside the write."""
    done = train("run", "trainer.max_steps=2", EVERY_STEP)
    script = (
        "import os, signal, sys\n"
        "from marey.core.files import SealingWriter, atomic_write\n"
        "with atomic_write(sys.argv[1]) as file:\n"
        "    SealingWriter(file).write(b'x' * 100_000)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target = done.checkpoints / "epoch-0000-step-0000003.ckpt"
    died = subprocess.run([sys.executable, "-c", script, str(target)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert not target.exists()
    assert len(leftovers(done.checkpoints)) == 1
    start = (f"resume.ckpt_path={done.checkpoints}/last.ckpt", "resume.weights_only=false")
    again = train("run", "trainer.max_steps=3", EVERY_STEP, *start)
    assert leftovers(done.checkpoints) == []
    assert again.checkpoint()["marey"]["step"] == 3


def test_retention_waits_for_the_receipt_and_never_takes_the_newest(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment the command in the receipt names a complete checkpoint."""
    seen: list[bool] = []
    original = TrainingModule.training_step

    def look(module: TrainingModule, batch: Any, batch_idx: int) -> Any:
        receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
        if receipt["checkpoints"]:
            seen.append(seal_holds(receipt["resume_command"].split("resume.ckpt_path=")[1].split()[0]))
        return original(module, batch, batch_idx)

    unlink = Path.unlink

    def watching(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".ckpt":
            receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
            assert str(path) not in receipt["resume_command"]
            assert next(e for e in receipt["checkpoints"] if e["path"] == str(path))["removed"]
        unlink(path, missing_ok)

    monkeypatch.setattr(TrainingModule, "training_step", look)
    monkeypatch.setattr(Path, "unlink", watching)
    train("run", "trainer.max_steps=4", EVERY_STEP, "checkpoint.save_top_k=1", "checkpoint.save_last=false")
    assert seen == [True, True, True]
