"""Stopping an ingest at any moment: by a kill, by Ctrl-C, by a full disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest

import marey.pixels.committer as committer_module
import marey.pixels.ingest as ingest_module
from marey.core.errors import UserError
from marey.pixels.ingest import ingest
from marey.pixels.report import report_path
from marey.pixels.store import FrameStore
from marey.pixels.storeformat import partial_path
from marey.pixels.unfinished import Unfinished
from tests.pixels.ingest_cases import Rows, children_of, rows_of


class Killed(BaseException):
    """Stands for SIGKILL: nothing between the raise and the end of the process runs."""


def test_a_stop_at_any_write_leads_to_the_same_store(
    clips: Path, plain: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Die before or after the n-th write of the main process, then go on, until a run survives."""
    monkeypatch.setattr(committer_module, "COMMIT_ROWS", 100)
    out = tmp_path / "s.lance"
    left = 0

    def step() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed

    def dying(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            step()
            result = whole(*args, **kwargs)
            step()
            return result

        monkeypatch.setattr(owner, name, wrapped)

    dying(Unfinished, "record")
    dying(lance, "write_dataset")
    dying(lance.LanceDataset, "update_schema_metadata")
    dying(lance.LanceDataset, "cleanup_old_versions")
    dying(Path, "rename")
    dying(Path, "unlink")
    deaths = 0
    limit = 4
    while True:
        left = limit
        try:
            ingest([str(clips)], out, rate=25.0, episode_length=50, workers=2)
            break
        except Killed:
            deaths += 1
            limit += 1 + deaths % 3
    assert deaths > 8
    assert rows_of(out) == plain
    assert json.loads(report_path(out).read_text())["frames"] == len(plain)
    left = 10**6
    assert ingest([str(clips)], out, rate=25.0, episode_length=50).already_complete
    assert not partial_path(out).exists()


SCRIPT = """
import sys
from marey.pixels.ingest import ingest
ingest([sys.argv[1]], sys.argv[2], rate=25.0, episode_length=50, workers=2)
"""


def test_sigkill_at_random_moments_leads_to_the_same_store(clips: Path, plain: Rows, tmp_path: Path) -> None:
    out = tmp_path / "s.lance"
    command = [sys.executable, "-c", SCRIPT, str(clips), str(out)]
    kills = 0
    for delay in (0.2, 0.4, 0.6, None):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not children_of(process):
            time.sleep(0.01)
        try:
            _, errors = process.communicate(timeout=delay)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            kills += 1
        assert "Traceback" not in errors, errors
    assert kills
    assert rows_of(out) == plain


def test_ctrl_c_leaves_work_to_go_on_from_and_no_process(clips: Path, plain: Rows, tmp_path: Path) -> None:
    out = tmp_path / "s.lance"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(clips), str(out)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(partial_path(out).glob("chunks/*.arrow")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    children = children_of(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert not out.exists()
    with pytest.raises(UserError, match="not finished"):
        FrameStore.open(out)
    ingest([str(clips)], out, rate=25.0, episode_length=50, workers=1)
    assert rows_of(out) == plain


def test_other_settings_do_not_go_on_from_unfinished_work(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s.lance"

    def die(self: Unfinished) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "publish", die)
        with pytest.raises(Killed):
            ingest([str(clips / "0.mp4")], out, workers=1)
    with pytest.raises(UserError, match=r"rate=15\.0, and this command says rate=10\.0"):
        ingest([str(clips / "0.mp4")], out, rate=10.0)
    with pytest.raises(UserError, match="other files"):
        ingest([str(clips / "1.mp4")], out)


def test_a_second_ingest_into_the_same_store_is_refused(clips: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.lance"
    with Unfinished.hold(out), pytest.raises(UserError, match="another `marey ingest` is writing"):
        ingest([str(clips)], out)
    shutil.rmtree(partial_path(out))
    assert ingest([str(clips / "0.mp4")], out, workers=1).used == 1


def test_a_full_disk_is_one_sentence_and_not_the_files_fault(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s.lance"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "fulldisk.py").write_text(
        "import errno, os\n"
        "import marey.pixels.ingest_worker as worker\n"
        "def full(path):\n"
        "    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "worker.atomic_write = full\n"
        "ingest_file = worker.ingest_file\n"
    )
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "bad"))
        patch.setattr(ingest_module, "JOB", "fulldisk:ingest_file")
        with pytest.raises(UserError, match=r"No space left on device.*same command again"):
            ingest([str(clips / "0.mp4")], out, workers=1)
    assert ingest([str(clips / "0.mp4")], out, workers=1).refused == []


class FullDisk:
    """Every write from the ``after``-th on fails as on a full disk, until there is room again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.after: int | None = None
        self.writes = 0
        for owner, name in (
            (os, "fsync"),
            (os, "mkdir"),
            (os, "rename"),
            (os, "replace"),
            (lance, "write_dataset"),
            (lance.LanceDataset, "update_schema_metadata"),
            (lance.LanceDataset, "cleanup_old_versions"),
        ):
            monkeypatch.setattr(owner, name, self._filling(getattr(owner, name)))

    def _filling(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.writes += 1
            if self.after is not None and self.writes > self.after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args, **kwargs)

        return wrapped


def test_a_disk_that_fills_up_at_any_write_is_one_sentence_and_the_same_command_goes_on(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer_module, "COMMIT_ROWS", 100)
    sources = [str(clips / name) for name in ("0.mp4", "0b empty.mp4", "2.mp4", "3.mp4")]
    expected = tmp_path / "expected.lance"
    ingest(sources, expected, rate=25.0, workers=1)
    out = tmp_path / "s.lance"
    disk = FullDisk(monkeypatch)
    said: list[str] = []
    while True:
        disk.after, disk.writes = len(said), 0
        try:
            ingest(sources, out, rate=25.0, workers=1)
            break
        except UserError as error:
            said.append(str(error))
            assert not out.exists() or FrameStore.open(out).lengths.sum() == 207
    assert len(said) >= 8
    assert all(text.startswith("cannot write to") and "No space left on device" in text for text in said)
    assert all("same command again" in text for text in said[1:])  # before the first write there is nothing to go on
    assert rows_of(out) == rows_of(expected)
    assert not list(tmp_path.glob("**/*.tmp"))
    assert not partial_path(out).exists()
    assert json.loads(report_path(out).read_text())["frames"] == 207


@pytest.mark.parametrize("name", ["plan.json", "journal.jsonl", "store.lance"])
def test_damaged_unfinished_work_is_one_sentence(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out = tmp_path / "s.lance"

    def die(self: Unfinished) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "publish", die)
        with pytest.raises(Killed):
            ingest([str(clips / "2.mp4")], out, workers=1)
    path = partial_path(out) / name
    if path.is_dir():
        (path,) = path.glob("_versions/*.manifest")
    path.write_bytes(b'["not", "ours"]\n')
    with pytest.raises(UserError, match=r"is damaged; delete .*partial and run the command again"):
        ingest([str(clips / "2.mp4")], out, workers=1)
    shutil.rmtree(partial_path(out))
    assert ingest([str(clips / "2.mp4")], out, workers=1).used == 1
