from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import marey.pixels.committer as committer_module
import marey.pixels.ingest as ingest_module
import marey.pixels.pool as pool_module
from marey.core.errors import UserError
from marey.pixels.ingest import ingest
from marey.pixels.ingest_worker import CHUNK_FRAMES
from marey.pixels.pool import Finished, Refused, run_tasks
from marey.pixels.report import report_path
from marey.pixels.store import FrameStore
from marey.pixels.storeformat import partial_path
from marey.pixels.unfinished import Unfinished
from tests.pixels.conftest import cut, make_video, real_clip

Rows = list[dict[str, Any]]


def rows_of(store: Path) -> Rows:
    return lance.dataset(str(store)).to_table().to_pylist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of several lengths, good and bad, in an order that mixes them."""
    root = tmp_path_factory.mktemp("clips")
    for number, frames in enumerate((40, 300, 7, 160, 1, 129)):
        make_video(root / f"{number}.mp4", frames=frames, rate=25, b_frames=2 * (number % 2))
    (root / "0b empty.mp4").touch()
    (root / "2b text.mp4").write_text("not a video\n" * 50)
    cut(make_video(root / "whole.mp4", frames=100, front_index=True), root / "9 cut ü.mp4", keep=0.7)
    (root / "whole.mp4").unlink()
    os.mkfifo(root / "5b fifo.mp4")
    return root


@pytest.fixture(scope="module")
def plain(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What an uninterrupted ingest with one worker gives."""
    out = tmp_path_factory.mktemp("plain") / "s.lance"
    ingest([str(clips)], out, rate=25.0, episode_length=50, workers=1)
    return rows_of(out)


def test_episodes_follow_the_files_in_order(plain: Rows, clips: Path) -> None:
    names = list(dict.fromkeys(Path(row["source"]).name for row in plain))
    assert names == ["0.mp4", "1.mp4", "2.mp4", "3.mp4", "4.mp4", "5.mp4", "9 cut ü.mp4"]
    lengths: dict[int, int] = {}
    for row in plain:
        assert row["step_idx"] == lengths.setdefault(row["episode_idx"], 0)
        lengths[row["episode_idx"]] += 1
        assert row["source_step"] % 50 == row["step_idx"]
    assert list(lengths) == list(range(len(lengths)))
    assert list(lengths.values())[:11] == [40, *[50] * 6, 7, *[50] * 3]
    assert {row["label"] for row in plain} == {None}
    assert {row["true_rate"] for row in plain if not row["source"].endswith("4.mp4")} == {25.0}
    assert {row["true_rate"] for row in plain if row["source"].endswith("4.mp4")} == {None}


@pytest.mark.parametrize("commit_rows", [1, 4096])
def test_any_number_of_workers_gives_the_same_rows(
    clips: Path, plain: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit_rows: int
) -> None:
    monkeypatch.setattr(committer_module, "COMMIT_ROWS", commit_rows)
    ingest([str(clips)], tmp_path / "s.lance", rate=25.0, episode_length=50, workers=3)
    assert rows_of(tmp_path / "s.lance") == plain


def test_every_file_that_is_not_wholly_read_is_in_the_report(clips: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.lance"
    report = ingest([str(clips)], out, rate=50.0, workers=2)
    assert {Path(item["path"]).name: item["reason"] for item in report.refused} == {
        "0b empty.mp4": "is empty (0 bytes)",
        "2b text.mp4": "moov atom not found (Invalid data found when processing input)",
        "5b fifo.mp4": "is a FIFO, not a regular file",
    }
    (partial,) = report.partial
    assert Path(partial["path"]).name == "9 cut ü.mp4"
    assert partial["promised"] == 100 > partial["decoded"] > 10
    assert (report.sources, report.used) == (10, 7)
    assert report.repeats == sum(item["repeats"] for item in report.slow) > 300
    written = json.loads(report_path(out).read_text(encoding="utf-8"))
    assert written["refused"] == report.refused
    assert written["frames"] == report.frames == len(rows_of(out))
    assert "refused   " in report.text()
    assert "0b empty.mp4: is empty (0 bytes)" in report.text()
    assert not partial_path(out).exists()


def test_the_same_command_again_has_nothing_to_do_and_another_is_refused(clips: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.lance"
    first = ingest([str(clips / "0.mp4")], out, workers=1)
    version = FrameStore.open(out).version
    again = ingest([str(clips / "0.mp4")], out, workers=2)
    assert again.already_complete
    assert not first.already_complete
    assert "already complete" in again.text()
    assert FrameStore.open(out).version == version
    report_path(out).unlink()
    without = ingest([str(clips / "0.mp4")], out)
    assert (without.already_complete, without.frames, without.hours) == (True, first.frames, first.hours)
    with pytest.raises(UserError, match=r"quality=90.*quality=80"):
        ingest([str(clips / "0.mp4")], out, quality=80)
    with pytest.raises(UserError, match="other files"):
        ingest([str(clips / "1.mp4")], out)


def test_what_stands_in_the_way_is_not_touched(clips: Path, tmp_path: Path) -> None:
    for name in ("folder.lance", "file.lance"):
        (tmp_path / name).mkdir() if name.startswith("folder") else (tmp_path / name).write_text("mine")
        with pytest.raises(UserError, match="exists and is not a store made by this command"):
            ingest([str(clips)], tmp_path / name)
    lance.write_dataset(pa.table({"x": [1]}), str(tmp_path / "table.lance"))
    with pytest.raises(UserError, match="exists and is not a store"):
        ingest([str(clips)], tmp_path / "table.lance")
    partial_path(tmp_path / "s.lance").mkdir()
    (partial_path(tmp_path / "s.lance") / "mine.txt").touch()
    with pytest.raises(UserError, match="no unfinished ingest"):
        ingest([str(clips)], tmp_path / "s.lance")
    assert (partial_path(tmp_path / "s.lance") / "mine.txt").exists()


def test_no_usable_file_leaves_no_store_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mp4").touch()
    with pytest.raises(UserError, match=r"none of the 1 videos is usable.*a\.mp4: is empty \(0 bytes\)"):
        ingest([str(tmp_path / "clips")], tmp_path / "s.lance")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["clips", "s.report.json"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rate", 0.0),
        ("short_edge", 1),
        ("quality", 101),
        ("episode_length", 0),
        ("workers", 0),
        ("stall_s", 0.0),
        ("min_frames", 0),
        ("labels", "yes"),
    ],
)
def test_an_impossible_option_is_refused_by_name(clips: Path, tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{option}={value if value else 0}"):
        ingest([str(clips)], tmp_path / "s.lance", **{option: value})


def test_a_file_with_too_few_frames_is_refused(clips: Path, tmp_path: Path) -> None:
    report = ingest([str(clips / "2.mp4"), str(clips / "0.mp4")], tmp_path / "s.lance", rate=25.0, min_frames=8)
    assert [item["reason"] for item in report.refused] == ["gives 7 frames at 25 frames/s, fewer than min_frames=8"]
    assert {row["source_idx"] for row in rows_of(tmp_path / "s.lance")} == {1}


def test_labels_and_further_columns_of_a_list_are_stored(clips: Path, tmp_path: Path) -> None:
    (clips / "list.csv").write_text("path,label,camera\n2.mp4,walk,left\n0.mp4,run,\n4.mp4,,right\n")
    report = ingest([str(clips / "list.csv")], tmp_path / "s.lance", workers=1)
    assert report.label_names == ["run", "walk"]
    rows = rows_of(tmp_path / "s.lance")
    seen = {Path(row["source"]).name: (row["label"], json.loads(row["extra"])) for row in rows}
    assert seen == {
        "2.mp4": (1, {"camera": "left"}),
        "0.mp4": (0, {"camera": ""}),
        "4.mp4": (None, {"camera": "right"}),
    }
    assert FrameStore.open(tmp_path / "s.lance").label_names == ["run", "walk"]


def test_a_name_that_is_no_text_is_refused_and_the_others_go_on(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    folder = os.fsencode(tmp_path / "clips")
    shutil.copy(os.fsencode(clips / "2.mp4"), folder + b"/a\xff.mp4")
    shutil.copy(os.fsencode(clips / "2.mp4"), folder + b"/b.mp4")
    report = ingest([str(tmp_path / "clips")], tmp_path / "s.lance", workers=1)
    assert report.used == 1
    assert "\\xff" in report.refused[0]["path"] or "\\udcff" in report.refused[0]["path"]
    assert "UTF-8" in report.refused[0]["reason"]


# Stopping at any moment


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


def children_of(process: subprocess.Popen[Any]) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


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


def test_an_unwritable_place_is_one_sentence(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        ingest([str(clips / "0.mp4")], tmp_path / "file" / "s.lance")


# Decoders that hang or crash

FAULTY = """
import ctypes, os, signal, time
from marey.pixels.ingest_worker import ingest_file as whole

def ingest_file(payload, tick):
    name = os.path.basename(payload["path"])
    if name.startswith("0"):
        tick(5, 0.1)
        time.sleep(3600)
    if name.startswith("1"):
        ctypes.string_at(0)
    if name.startswith("3"):
        whole(payload, tick)
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("5"):
        raise KeyError("odd")
    return whole(payload, tick)
"""


def test_a_decoder_that_hangs_or_dies_costs_its_file_alone(
    clips: Path, plain: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ingest_module, "JOB", "faulty:ingest_file")
    begun = time.monotonic()
    sources = [str(clips / f"{number}.mp4") for number in range(6)]
    report = ingest(sources, tmp_path / "s.lance", rate=25.0, episode_length=50, workers=2, stall_s=1.5)
    assert time.monotonic() - begun < 30
    assert {Path(item["path"]).name: item["reason"] for item in report.refused} == {
        "0.mp4": "no new frame for 1.5 s, so the decoder was stopped",
        "1.mp4": "the decoder died (SIGSEGV)",
        "3.mp4": "the decoder died (SIGKILL)",
        "5.mp4": "reading it failed with KeyError: 'odd'",
    }
    expected = [row["frame"] for row in plain if Path(row["source"]).name in ("2.mp4", "4.mp4")]
    assert [row["frame"] for row in rows_of(tmp_path / "s.lance")] == expected


def test_a_decoder_that_goes_on_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "def job(payload, tick):\n"
        "    for n in range(10):\n"
        "        time.sleep(0.3)\n"
        "        tick(n, 0.0)\n"
        "    return n\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    events = list(run_tasks("slow:job", [(0, {})], workers=1, stall_s=1.5))
    assert events[-1] == Finished(0, 9)
    events = list(run_tasks("slow:job", [(0, {})], workers=1, stall_s=0.1))
    assert isinstance(events[-1], Refused)


@pytest.fixture
def silent_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job that says nothing for as many seconds as its payload says."""
    (tmp_path / "silent.py").write_text(
        "import time\ndef job(payload, tick):\n    time.sleep(payload['s'])\n    return 'done'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "silent:job"


def test_a_decoder_that_gets_too_little_of_the_cpu_is_given_longer_and_not_for_ever(
    silent_job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (event,) = run_tasks(silent_job, [(0, {"s": 2.0})], workers=1, stall_s=1.0)
    assert isinstance(event, Refused)  # it sleeps
    monkeypatch.setattr(pool_module, "_cpu_seconds", lambda _pid: 0.1 * time.monotonic())
    assert list(run_tasks(silent_job, [(0, {"s": 2.0})], workers=1, stall_s=1.0)) == [Finished(0, "done")]
    begun = time.monotonic()
    (event,) = run_tasks(silent_job, [(0, {"s": 3600})], workers=1, stall_s=0.5)
    assert isinstance(event, Refused)
    assert time.monotonic() - begun >= 0.5 * pool_module.STARVED


def test_a_decoder_that_had_the_cpu_and_gave_nothing_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spinning.py").write_text("def job(payload, tick):\n    while True: pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (event,) = run_tasks("spinning:job", [(0, {})], workers=1, stall_s=0.5)
    assert event == Refused(0, "no new frame for 0.5 s, so the decoder was stopped", lasting=False)


def test_the_cpu_time_of_a_process_is_counted() -> None:
    before = pool_module._cpu_seconds(os.getpid())
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    used = pool_module._cpu_seconds(os.getpid()) - before
    assert used == 0 if not Path("/proc/self/stat").exists() else 0.05 < used < 10


def test_a_decoder_that_is_slow_to_start_is_one_sentence(
    silent_job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "START_LIMIT_S", 0.3)
    # A decoder that takes its time before it says anything: the start is what is late, not the file.
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(30)\n")
    with pytest.raises(UserError, match="did not start within"):
        list(run_tasks(silent_job, [(0, {"s": 0})], workers=1, stall_s=1.0))


def test_a_decoder_does_not_outlive_its_parent(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("import time\ndef job(payload, tick):\n    time.sleep(3600)\n")
    code = (
        "from marey.pixels.pool import run_tasks\n"
        "print(list(run_tasks('stuck:job', [(0, {})], workers=1, stall_s=3600)))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(tmp_path)})
    deadline = time.monotonic() + 60
    while not (children := children_of(process)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    process.kill()
    process.wait()
    while [child for child in children if Path(f"/proc/{child}/fd").exists() and _alive(child)]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def test_a_long_file_is_committed_in_pieces_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = lance.write_dataset

    def watched(table: pa.Table, *args: Any, **kwargs: Any) -> Any:
        sizes.append(table.num_rows)
        return write(table, *args, **kwargs)

    monkeypatch.setattr(lance, "write_dataset", watched)
    monkeypatch.setattr(committer_module, "COMMIT_ROWS", 2 * CHUNK_FRAMES)
    make_video(tmp_path / "a.mp4", frames=700)
    ingest([str(tmp_path / "a.mp4")], tmp_path / "s.lance", rate=25.0, workers=1)
    assert sizes == [256, 256, 188]


def test_camera_clips_become_a_store(tmp_path: Path) -> None:
    names = ("bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4")
    report = ingest([str(real_clip(name)) for name in names], tmp_path / "s.lance", workers=2)
    assert (report.used, report.episodes, report.frames) == (3, 4, 150 + 80 + 61)
    assert (report.refused, report.partial, report.repeats) == ([], [], 0)
    store = FrameStore.open(tmp_path / "s.lance")
    assert sorted(set(zip(store.heights.tolist(), store.widths.tolist(), strict=True))) == [
        (144, 176),
        (272, 640),
        (384, 683),
    ]
