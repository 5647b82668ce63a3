"""Decoders that hang or crash."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import marey.pixels.ingest as ingest_module
import marey.pixels.pool as pool_module
from marey.core.errors import MachineError, UserError
from marey.pixels.episodes import FrameRequest
from marey.pixels.ingest import ingest
from marey.pixels.pool import Finished, Refused, run_tasks
from marey.pixels.videos import VideoEpisodes
from tests.pixels.ingest_cases import Rows, children_of, rows_of

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


def test_all_decoders_that_have_work_start_at_once(silent_job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    at_first_word: list[int] = []
    start, hear = pool_module.start_child, pool_module.hear

    def counted(job: str) -> pool_module.Child:
        started.append(1)
        return start(job)

    def heard(child: pool_module.Child) -> pool_module.Event | None:
        at_first_word.append(len(started))
        return hear(child)

    monkeypatch.setattr(pool_module, "start_child", counted)
    monkeypatch.setattr(pool_module, "hear", heard)
    events = list(run_tasks(silent_job, ((number, {"s": 0.0}) for number in range(3)), workers=2, stall_s=60.0))
    assert sorted(events) == [Finished(number, "done") for number in range(3)]
    assert at_first_word[0] == len(started) == 2
    started.clear()
    assert len(list(run_tasks(silent_job, [(0, {"s": 0.0})], workers=8, stall_s=60.0))) == len(started) == 1


def test_a_decoder_that_is_slow_to_start_is_one_sentence(
    silent_job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "START_LIMIT_S", 0.3)
    # A decoder that takes its time before it says anything: the start is what is late, not the file.
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(30)\n")
    with pytest.raises(UserError, match="did not start within"):
        list(run_tasks(silent_job, [(0, {"s": 0})], workers=1, stall_s=1.0))


def test_a_decoder_that_dies_at_start_is_one_sentence(
    silent_job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(9)\n")
    with pytest.raises(MachineError, match=r"ended while it was starting \(exit code 9\); .*--workers"):
        list(run_tasks(silent_job, [(0, {"s": 0})], workers=1, stall_s=1.0))


def test_a_decoder_that_cannot_start_is_no_reason_to_leave_out_a_clip(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    source = VideoEpisodes.open(str(clips / "0.mp4"), rate=25.0, episode_length=50)
    request = FrameRequest(0, np.arange(2))
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for limit, why in ((120.0, "ended while it was starting"), (0.0, "did not start within")):
        monkeypatch.setattr(pool_module, "START_LIMIT_S", limit)
        if limit == 0.0:
            (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(30)\n")
        with pytest.raises(MachineError, match=why):
            source.read_each([request, request])
    monkeypatch.undo()
    (frames,) = source.read_each([request])
    assert not isinstance(frames, UserError)


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
