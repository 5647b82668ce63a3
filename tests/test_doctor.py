"""``marey doctor``: each check against facts, the jobs that gather facts, and the command as a person runs it."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from marey import cli
from marey.core.errors import UserError
from marey.doctor import data, examine, machine, places, sample, software, verdicts
from marey.doctor.aside import Aside, Broken, Gone
from marey.doctor.data import DataRequest, Outcome, Pick
from marey.doctor.findings import (
    Cost,
    Finding,
    Report,
    Status,
    by_cost,
    fail,
    finding_text,
    ok,
    refused,
    remedy_text,
    warn,
)
from marey.doctor.findings import summary as summary_of
from marey.doctor.machine import Machine
from marey.doctor.needs import READING_BYTES, Needs
from marey.doctor.places import Place, PlaceFacts, Usage
from marey.doctor.run import NamedRun, compose, requests
from marey.latents.sidecar import write_sidecar
from marey.pixels.reading import READ_BYTES
from tests.pixels.conftest import cut, make_video
from tests.pixels.test_store import rows_of
from tests.pixels.test_store import write as write_store

OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL
GB = 1e9

HERE = Machine(
    cores=16,
    allowed=16,
    quota=None,
    load=0.5,
    omp_threads=None,
    omp_wait=None,
    memory=64 * GB,
    shm=Usage(32 * GB, 32 * GB),
    open_files=65536.0,
    processes=float("inf"),
    locked=float("inf"),
    infiniband=False,
)
RUN = Needs(
    ranks=2,
    nodes=1,
    workers=4,
    prefetch=2,
    chunk_bytes=0.1 * GB,
    reading_bytes=READING_BYTES,
    host_bytes=4 * GB,
    checkpoint_dir=Path("checkpoints"),
    checkpoint_bytes=2 * GB,
    checkpoints=10,
)


@pytest.fixture(autouse=True, scope="module")
def _ffmpeg_s_log_as_it_was() -> Iterator[None]:
    """Reading a sample lets FFmpeg's log into its errors, which is for a process aside; here it is undone."""
    logger = logging.getLogger("libav")
    before = av.logging.get_level(), logger.propagate, list(logger.handlers)
    yield
    av.logging.set_level(before[0])
    logger.propagate = before[1]
    logger.handlers = before[2]


def here(**changes: Any) -> Machine:
    return dataclasses.replace(HERE, **changes)


def run(**changes: Any) -> Needs:
    return dataclasses.replace(RUN, **changes)


class InProcess:
    """Runs jobs where the test runs; ``told`` answers some of them: a value, or an exception to raise."""

    def __init__(self, told: dict[str, Any] | None = None) -> None:
        self.told = told or {}

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, job: str, argument: Any = None, *, limit_s: float) -> Any:
        module, name = job.split(":")
        if name in self.told:
            answer = self.told[name]
            if isinstance(answer, Exception):
                raise answer
            return answer
        return getattr(importlib.import_module(module), name)(argument)


def request(path: Path | str, **changes: Any) -> DataRequest:
    asked = DataRequest(path=str(path), num_frames=8, frame_stride=2, pad_short=False, rate=15.0, clips=8)
    return dataclasses.replace(asked, **changes)


def found_in(asked: DataRequest, aside: Any = None, *, limit_s: float = 60.0) -> dict[str, Finding]:
    return {finding.name: finding for finding in data.examine(asked, aside or InProcess(), limit_s=limit_s)}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole videos of two seconds, one whose index is cut away, one of three frames."""
    folder = tmp_path_factory.mktemp("videos")
    whole = make_video(folder / "whole.mp4", frames=50)
    make_video(folder / "slow.mp4", frames=20, rate=8)
    make_video(folder / "tiny.mp4", frames=3)
    cut(whole, folder / "damaged.mp4", keep=0.5)
    return folder


def latents(folder: Path, *, clips: int = 6, frames: int = 5) -> Path:
    rows = ["clip_id,path,length_frames,height,width"]
    for i in range(clips):
        write_sidecar(folder / f"c{i}.safetensors", torch.randn(4, frames, 3, 2), metadata={})
        rows.append(f"c{i},c{i}.safetensors,{frames},3,2")
    (folder / "manifest.csv").write_text("\n".join(rows) + "\n")
    return folder / "manifest.csv"


# --- findings ---------------------------------------------------------------------------------------------------------


def test_failures_come_first_and_the_costliest_to_find_out_late_before_the_others() -> None:
    given = [
        warn("a", "x", Cost.LATE, "do"),
        fail("b", "x", Cost.START, "do"),
        ok("c", "x", Cost.LATE),
        fail("d", "x", Cost.LATE, "do"),
        fail("e", "x", Cost.FIRST_BATCHES, "do"),
        warn("f", "x", Cost.THROUGHOUT, "do"),
    ]
    assert [finding.name for finding in by_cost(given)] == ["d", "e", "b", "a", "f"]


def test_a_finding_has_a_remedy_exactly_where_something_is_to_be_done() -> None:
    with pytest.raises(AssertionError):
        Finding(name="a", status=OK, found="x", cost=Cost.START, remedy="do")
    with pytest.raises(AssertionError):
        Finding(name="a", status=FAIL, found="x", cost=Cost.START)


def test_lines_fit_80_columns_and_long_paths_stay_whole() -> None:
    path = "/a/rather/long/folder/name/that/goes/on/for/more/than/eighty/columns/of/a/terminal/clip.mp4"
    finding = fail("reading", f"{'many words ' * 30}{path}", Cost.LATE, "other words " * 20)
    for text in (finding_text(finding, width=80), remedy_text(finding, width=80)):
        assert all(len(line) <= 80 or path in line for line in text.splitlines())
        assert text.startswith("FAIL  reading       ")
    assert path in finding_text(finding, width=80)


def test_a_refusal_becomes_what_is_wrong_and_what_to_do() -> None:
    finding = refused("data", "x is empty;\n  name another folder.", Cost.START, remedy="unused")
    assert (finding.found, finding.remedy) == ("x is empty", "name another folder")
    assert refused("data", "x is empty", Cost.START, remedy="look").remedy == "look"


@pytest.mark.parametrize(
    ("findings", "sentence"),
    [
        ([ok("a", "x", Cost.START)], "1 check in 3s: nothing stands in the way."),
        ([ok("a", "x", Cost.START), warn("b", "x", Cost.START, "do")], "2 checks in 3s: nothing fails, 1 warning."),
        (
            [fail("a", "x", Cost.START, "do"), fail("a", "x", Cost.START, "do"), warn("b", "x", Cost.START, "do")],
            "2 of 3 checks fail (a), with 1 warning; what to do stands above, costliest first",
        ),
        (
            [fail("a", "x", Cost.START, "do"), ok("b", "x", Cost.START)],
            "1 of 2 checks fails (a); what to do stands above, costliest first",
        ),
    ],
)
def test_the_summary_is_one_sentence(findings: list[Finding], sentence: str) -> None:
    assert summary_of(findings, seconds=3) == sentence


def test_a_check_that_breaks_is_a_failure_with_its_reason() -> None:
    def broken() -> Iterator[Finding]:
        yield ok("first", "x", Cost.START)
        raise ZeroDivisionError("by nothing")

    first, second = examine.shielded("second", broken)
    assert first.status is OK
    assert second.status is FAIL
    assert (second.name, second.found) == ("second", "this check itself broke (ZeroDivisionError: by nothing)")


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finding", "status", "says"),
    [
        (machine.check_python((3, 10, 2)), FAIL, "3.10.2"),
        (machine.check_python((3, 12, 0), bits=32), FAIL, "32 bits"),
        (machine.check_python(), OK, "64 bits"),
        (machine.check_cores(HERE), OK, "16 of 16 cores"),
        (machine.check_cores(here(quota=2.0)), OK, "2 of 16 cores usable (the control group gives 2 cores' time)"),
        (machine.check_cores(here(load=40.0)), WARN, "load average 40.0"),
        (machine.check_cores(HERE, RUN), OK, "16 of 16"),
        (machine.check_cores(here(allowed=4), RUN), WARN, "10 processes here: 2 ranks, each with 4 loader workers"),
        (machine.check_threads(HERE), OK, "not set: 16 a process"),
        (machine.check_threads(here(quota=4.0)), WARN, "16 threads share 4 cores"),
        (machine.check_threads(HERE, RUN), WARN, "16 threads in each of 2 ranks share 16 cores"),
        (machine.check_threads(here(omp_threads="8"), RUN), OK, "OMP_NUM_THREADS=8"),
        (machine.check_threads(here(allowed=2, omp_threads="1"), run(ranks=8)), OK, "OMP_NUM_THREADS=1"),
        (machine.check_threads(here(omp_threads="many")), WARN, "not a number"),
        (machine.check_memory(HERE), OK, "64.0 GB available"),
        (machine.check_memory(here(memory=None)), OK, "does not say"),
        (machine.check_memory(here(memory=2 * GB)), WARN, "2.0 GB"),
        (machine.check_memory(HERE, RUN, worker_bytes=0.3 * GB), OK, "take about 9.1 GB"),
        (machine.check_memory(here(memory=8 * GB), RUN, worker_bytes=0.3 * GB), FAIL, "take about 9.1 GB"),
        (machine.check_shared_memory(None), OK, "no /dev/shm"),
        (machine.check_shared_memory(HERE.shm), OK, "32.0 GB of 32.0 GB"),
        (machine.check_shared_memory(Usage(67e6, 67e6)), WARN, "67.0 MB"),
        (machine.check_shared_memory(Usage(67e6, 67e6), RUN), FAIL, "keep up to 1.6 GB there"),
        (machine.check_shared_memory(Usage(2 * GB, 2 * GB), RUN), WARN, "keep up to 1.6 GB there"),
        (machine.check_shared_memory(Usage(4 * GB, 4 * GB), RUN), OK, "keep up to 1.6 GB there"),
        (machine.check_shared_memory(Usage(67e6, 67e6), run(workers=0)), OK, "no workers"),
        (machine.check_shared_memory(Usage(67e6, 67e6), run(chunk_bytes=0.0)), WARN, "67.0 MB"),
        (machine.check_limits(HERE), OK, "open files 65,536, processes no limit, locked memory no limit"),
        (machine.check_limits(here(open_files=256.0)), WARN, "may hold 1,024 files open"),
        (machine.check_limits(here(open_files=4096.0), run(workers=200)), WARN, "6,256 files"),
        (machine.check_limits(here(processes=20.0), RUN), FAIL, "needs 10 processes"),
        (machine.check_limits(here(locked=8e6, infiniband=True), run(nodes=2)), WARN, "InfiniBand"),
        (machine.check_limits(here(locked=8e6, infiniband=True), RUN), OK, "8.0 MB"),
    ],
)
def test_what_the_machine_allows_is_judged(finding: Finding, status: Status, says: str) -> None:
    assert finding.status is status, finding
    assert says in finding.found


def test_this_machine_can_be_looked_at() -> None:
    found = machine.look()
    assert 1 <= found.usable <= found.cores
    assert found.open_files > 0


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({}, "0::/\n", (None, None)),
        ({"cpu.max": "max 100000", "memory.max": "max"}, "0::/\n", (None, None)),
        ({"cpu.max": "250000 100000", "memory.max": "1000", "memory.current": "400"}, "0::/\n", (2.5, 600.0)),
        # The tightest of a group and those around it holds.
        ({"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, "0::/job/step\n", (4.0, None)),
        ({"job/cpu.max": "100000 100000", "job/step/cpu.max": "800000 100000"}, "0::/job/step\n", (1.0, None)),
        (
            {
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "9e18",
            },
            "3:cpu:/\n4:memory:/\n",
            (0.5, None),
        ),
        ({"cpu/cpu.cfs_quota_us": "-1"}, "3:cpu:/\n", (None, None)),
    ],
)
def test_limits_of_control_groups_are_found(
    tmp_path: Path, files: dict[str, str], own: str, expected: tuple[float | None, float | None]
) -> None:
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    assert machine.cgroup_limits(tmp_path / "cgroup", tmp_path / "own") == expected


CHECKPOINTS = Place("checkpoints", Path("checkpoints"), "set checkpoint.dirpath")
CACHE = Place("cache", Path("cache"), "set MAREY_CACHE")


@pytest.mark.parametrize(
    ("place", "free", "needs", "status", "says"),
    [
        (CACHE, 100 * GB, None, OK, "100.0 GB free for cache"),
        (CACHE, 5 * GB, None, WARN, "5.0 GB"),
        (CACHE, 0.5 * GB, None, FAIL, "500.0 MB"),
        (CACHE, 5 * GB, RUN, WARN, "5.0 GB"),
        (CHECKPOINTS, 100 * GB, RUN, OK, "about 2.0 GB, the run keeps 10"),
        (CHECKPOINTS, 15 * GB, RUN, FAIL, "the run keeps 10"),
        (CHECKPOINTS, 15 * GB, run(checkpoints=None), OK, "about 2.0 GB"),
        (CHECKPOINTS, 3 * GB, run(checkpoints=None), FAIL, "about 2.0 GB"),
        (CHECKPOINTS, 5 * GB, run(checkpoint_bytes=None), WARN, "5.0 GB"),
    ],
)
def test_room_is_held_against_what_a_run_writes(
    place: Place, free: float, needs: Needs | None, status: Status, says: str
) -> None:
    finding = places.check_disk(place, PlaceFacts(Usage(1000 * GB, free, 10**6), None), needs)
    assert finding.status is status, finding
    assert finding.cost is Cost.LATE
    assert says in finding.found
    assert status is OK or place.elsewhere in str(finding.remedy)


def test_a_disk_without_inodes_is_full() -> None:
    assert places.check_disk(CACHE, PlaceFacts(Usage(GB * 1e3, GB * 1e3, 12), None)).status is FAIL


def test_a_place_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    facts = places.look_at(Place("cache", tmp_path / "not" / "yet", "set MAREY_CACHE"))
    assert facts.problem is None
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = Place("cache", tmp_path / "file" / "cache", "set MAREY_CACHE")
    finding = places.check_disk(place, places.look_at(place))
    assert finding.status is FAIL
    assert f"{tmp_path / 'file'} is not a folder" in finding.found
    gone = Place("cache", Path("/proc/marey-cache"), "set MAREY_CACHE")
    assert "nothing can be written in /proc" in places.check_disk(gone, places.look_at(gone)).found


# --- the software -----------------------------------------------------------------------------------------------------

GPU = {"name": "Great GPU", "problem": None, "free": 79 * GB, "total": 80 * GB, "bf16": True}
BOX = {"cuda": [GPU, GPU], "mps": False, "built_for": "13.0", "complaint": None, "cards": 2, "driver": "550.54"}
DECODED = {"version": "18", "ffmpeg": "8", "encoder": "libx264", "frames": 16, "worst": 1.0}
JPEG = {"version": "1.9", "fault": None, "worst": 2}


@pytest.mark.parametrize(
    ("finding", "status", "says"),
    [
        (verdicts.check_packages(["numpy>=2.0", "x>=1; extra == 'y'"], lambda _: "2.0.1"), OK, "all 1"),
        (verdicts.check_packages(["numpy>=2.10"], lambda _: "2.9"), FAIL, "numpy 2.9 is older than 2.10"),
        (verdicts.check_packages(["torch>=2.14"], lambda _: "2.14.1+cu130"), OK, "all 1"),
        (verdicts.check_packages(["numpy>=2.0"], lambda _: None), FAIL, "numpy is not installed"),
        (verdicts.check_packages(), OK, "none older than tested"),
        (verdicts.check_torch({"version": "2", "seconds": 3.0, "cuda": None, "hip": None}), OK, "CPU alone"),
        (verdicts.check_torch({"version": "2", "seconds": 90.0, "cuda": "13.0", "hip": None}), WARN, "CUDA 13.0"),
        (verdicts.check_devices(BOX), OK, "2 x Great GPU, 79.0 GB of 80.0 GB free, driver 550.54, bfloat16"),
        (verdicts.check_devices({**BOX, "cuda": [GPU, {**GPU, "free": 9 * GB}]}), WARN, "holds memory of GPU 1"),
        (verdicts.check_devices({**BOX, "cuda": [{**GPU, "bf16": False}]}), WARN, "cannot compute in bfloat16"),
        (
            verdicts.check_devices({**BOX, "cuda": [{"name": "G", "problem": "no kernel image"}]}),
            FAIL,
            "no kernel image",
        ),
        (
            verdicts.check_devices({**BOX, "cuda": [], "complaint": "driver too old"}),
            FAIL,
            "none usable: driver too old",
        ),
        (verdicts.check_devices({**BOX, "cuda": [], "built_for": None}), FAIL, "this torch is a CPU build"),
        (verdicts.check_devices({**BOX, "cuda": [], "cards": 0, "driver": None}), OK, "no GPU"),
        (verdicts.check_devices({**BOX, "cuda": [], "cards": 0, "driver": None, "mps": True}), OK, "Apple GPU"),
        (verdicts.check_decoder(DECODED, frames=16), OK, "16 of 16 frames"),
        (verdicts.check_decoder({**DECODED, "frames": 15}, frames=16), FAIL, "15 of 16 frames"),
        (verdicts.check_decoder({**DECODED, "worst": 40.0}, frames=16), FAIL, "grey off by 40"),
        (verdicts.check_torchcodec(None), OK, "not installed"),
        (verdicts.check_torchcodec({"version": "1", "shape": (3, 64, 64)}), OK, "decodes"),
        (verdicts.torchcodec_is_broken("no libavutil"), WARN, "no libavutil"),
        (verdicts.check_jpeg(JPEG), OK, "1.9"),
        (verdicts.check_jpeg({**JPEG, "fault": "is not a whole JPEG"}), FAIL, "is not a whole JPEG"),
        (verdicts.check_jpeg({**JPEG, "worst": 200}), FAIL, "is off by 200"),
        (verdicts.check_lance({"version": "1", "right": True, "seconds": 1.0}), OK, "Lance 1"),
        (verdicts.check_lance({"version": "1", "right": False, "seconds": 1.0}), FAIL, "not those that were written"),
        (verdicts.check_worker({"method": "spawn", "right": True, "bytes": 1e8, "seconds": 1.0}), OK, "100.0 MB"),
        (verdicts.check_worker({"method": "spawn", "right": True, "bytes": 1e8, "seconds": 99.0}), WARN, "99.0 s"),
        (
            verdicts.check_worker({"method": "spawn", "right": False, "bytes": 1e8, "seconds": 1.0}),
            FAIL,
            "other values",
        ),
    ],
)
def test_what_is_installed_is_judged(finding: Finding, status: Status, says: str) -> None:
    assert finding.status is status, finding
    assert says in finding.found


@pytest.mark.parametrize(
    ("job", "verdict"),
    [
        (software.torch_facts, verdicts.check_torch),
        (software.torchvision_facts, verdicts.check_torchvision),
        (software.decoder_facts, lambda facts: verdicts.check_decoder(facts, frames=software.CLIP_FRAMES)),
        (software.jpeg_facts, verdicts.check_jpeg),
        (software.lance_facts, verdicts.check_lance),
    ],
)
def test_what_the_tests_run_on_passes(job: Callable[[None], Any], verdict: Callable[[Any], Finding]) -> None:
    finding = verdict(job(None))
    assert finding.status is OK, finding


def test_devices_are_told_whatever_there_is() -> None:
    facts = software.device_facts(None)
    assert len(facts["cuda"]) == torch.cuda.device_count()
    assert facts["mps"] == torch.backends.mps.is_available()
    assert facts["built_for"] == torch.version.cuda


def test_the_driver_is_read_from_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n")
    assert software.nvidia_driver(tmp_path / "version") == "550.54.15"
    assert software.nvidia_driver(tmp_path / "absent") is None


# --- the process aside ------------------------------------------------------------------------------------------------


def test_a_job_that_hangs_or_dies_costs_its_own_time_and_the_next_one_is_answered() -> None:
    with Aside() as aside:
        assert aside.ask("math:sqrt", 9.0, limit_s=60) == 3.0
        start = time.monotonic()
        with pytest.raises(Gone, match=r"did not answer within 0\.3 s, so it was stopped"):
            aside.ask("time:sleep", 60, limit_s=0.3)
        assert time.monotonic() - start < 50
        with pytest.raises(Gone, match=r"ended its process \(exit code 3\)"):
            aside.ask("os:_exit", 3, limit_s=60)
        with pytest.raises(Gone, match=r"ended its process \(SIGSEGV\)"):
            aside.ask("ctypes:string_at", 0, limit_s=60)
        with pytest.raises(Gone, match=r"ended its process \(exit code 1\): the last words"):
            aside.ask("sys:exit", "the last words", limit_s=60)
        with pytest.raises(Broken, match="JSONDecodeError: Expecting value"):
            aside.ask("json:loads", "x", limit_s=60)
        with pytest.raises(Broken, match="ModuleNotFoundError: No module named 'no_such_package'"):
            aside.ask("no_such_package:f", limit_s=60)
        assert aside.ask("math:sqrt", 16.0, limit_s=60) == 4.0
        process = aside._process
        assert process is not None
    assert process.returncode is not None, "the process is left running"


@pytest.mark.parametrize("answer", [Broken("ImportError: libtorch_cuda.so"), Gone("ended its process (SIGILL)")])
def test_an_installation_that_does_not_import_is_a_failure_and_not_the_end(answer: Exception) -> None:
    aside = InProcess({"torch_facts": answer})
    (finding,) = examine._tried(aside, "torch", "torch_facts", verdicts.check_torch)
    assert finding.status is FAIL
    assert str(answer) in finding.found
    assert "pip install --upgrade torch torchvision" in str(finding.remedy)


# --- the data ---------------------------------------------------------------------------------------------------------


def test_a_damaged_video_is_named_with_the_decoder_s_reason(videos: Path) -> None:
    found = found_in(request(videos))
    assert found["data"].status is OK
    assert "4 video files" in found["data"].found
    reading = found["reading"]
    assert reading.status is WARN
    assert "3 of 4 videos read" in reading.found
    assert f"{videos / 'damaged.mp4'} moov atom not found" in reading.found
    assert found["clip length"].status is WARN
    assert "1 of 3 videos shorter than a clip's 15 stored frames" in found["clip length"].found
    assert found["frame rate"].status is WARN
    assert "1 of 3 videos slower" in found["frame rate"].found
    assert "data.video_rate=8" in str(found["frame rate"].remedy)


def test_a_file_that_cannot_be_read_at_all_fails(videos: Path) -> None:
    found = found_in(request(videos / "damaged.mp4"))
    assert found["reading"].status is FAIL
    assert list(found) == ["data", "reading"]


def test_a_short_repeated_clip_is_a_warning_and_a_whole_video_is_fine(videos: Path) -> None:
    padded = found_in(request(videos / "tiny.mp4", pad_short=True))
    assert padded["clip length"].status is WARN
    assert found_in(request(videos / "tiny.mp4"))["clip length"].status is FAIL
    assert {finding.status for finding in found_in(request(videos / "whole.mp4")).values()} == {OK}


def test_a_list_and_a_pattern_of_videos_are_read(videos: Path) -> None:
    (videos / "list.csv").write_text("path,label\nwhole.mp4,0\nslow.mp4,1\n")
    assert "2 of 2 videos read" in found_in(request(videos / "list.csv"))["reading"].found
    assert "1 of 1 video read" in found_in(request(videos / "who*.mp4"))["reading"].found


@pytest.mark.parametrize("name", ["empty", "absent", "absent.lance", "absent.csv", "absent.parquet"])
def test_what_holds_nothing_is_one_failure_that_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (finding,) = data.examine(request(tmp_path / name), InProcess(), limit_s=60.0)
    assert finding.status is FAIL
    assert str(tmp_path / name) in finding.found
    assert finding.remedy


def test_clips_of_a_store_are_read_and_its_short_episodes_counted(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s.lance", rows_of({0: 20, 1: 4, 2: 15, 3: 30}))
    found = found_in(request(path))
    assert "4 episodes, 69 frames of 48 x 64, frames/s not recorded" in found["data"].found
    assert "1 of 4 episodes shorter" in found["clip length"].found
    assert "3 of 3 clips read" in found["reading"].found
    assert "clips/s" in found["reading"].found
    assert found["reading"].status is OK


def test_a_damaged_frame_of_a_store_is_named(tmp_path: Path) -> None:
    rows = rows_of({0: 20, 1: 20})
    rows[27]["frame"] = rows[27]["frame"][:40]  # episode 1, step 7
    path = write_store(tmp_path / "s.lance", rows)
    found = found_in(request(path, frame_stride=1))
    assert found["reading"].status is WARN
    assert "1 of 2 clips read" in found["reading"].found
    assert "episode 1, step 7" in found["reading"].found


def test_missing_and_mistaken_sidecars_are_named(tmp_path: Path) -> None:
    manifest = latents(tmp_path)
    assert {finding.status for finding in found_in(request(manifest)).values()} == {OK}
    (tmp_path / "c1.safetensors").unlink()
    write_sidecar(tmp_path / "c3.safetensors", torch.randn(4, 7, 3, 2), metadata={})
    for path in (manifest, tmp_path):  # the folder that an encode leaves does as well
        found = found_in(request(path))
        assert found["sidecars"].status is FAIL
        assert f"1 of 6 files missing: {tmp_path / 'c1.safetensors'}" in found["sidecars"].found
        assert found["reading"].status is FAIL
        assert found["reading"].cost is Cost.LATE
        assert "4 of 5 sidecars read" in found["reading"].found
        assert "clip c3" in found["reading"].found
        assert "length_frames 5 in the manifest, 7 in the file" in found["reading"].found
    replacing = found_in(request(manifest, stops_on_bad_clip=False))
    assert replacing["reading"].status is WARN


def test_latents_of_two_codecs_do_not_make_one_run(tmp_path: Path) -> None:
    manifest = latents(tmp_path)
    write_sidecar(tmp_path / "c2.safetensors", torch.randn(16, 5, 3, 2), metadata={})
    assert "4 and 16 channels" in found_in(request(manifest))["reading"].found


def test_clips_shorter_than_every_window_are_counted(tmp_path: Path) -> None:
    found = found_in(request(latents(tmp_path), latent_frames=6))
    assert found["clip length"].status is FAIL
    assert "6 of 6 clips shorter than the shortest window's 6 latent frames" in found["clip length"].found


def test_a_manifest_is_refused_where_a_run_reads_frames(tmp_path: Path) -> None:
    (finding,) = data.examine(request(latents(tmp_path), pixels=True), InProcess(), limit_s=60.0)
    assert finding.status is FAIL
    assert "is a manifest of stored latents" in finding.found


class HangingAside(Aside):
    """The decoder of one file never returns: its process sleeps instead."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def ask(self, job: str, argument: Any = None, *, limit_s: float) -> Any:
        if job.endswith(":read") and argument[1].name.endswith(self.name):
            return super().ask("time:sleep", 600, limit_s=limit_s)
        return super().ask(job, argument, limit_s=limit_s)


def test_a_decoder_that_hangs_is_stopped_and_named_and_the_others_are_read(
    videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "LEAST_S", 0.5)
    monkeypatch.setattr(data, "SHARE", 20)
    with HangingAside("slow.mp4") as aside:
        aside.ask("marey.doctor.sample:load", limit_s=120)
        start = time.monotonic()
        found = found_in(dataclasses.replace(request(videos), clips=4), aside)["reading"]
        took = time.monotonic() - start
    assert "2 of 4 videos read" in found.found
    assert f"{videos / 'slow.mp4'}: reading it did not answer within 3 s" in found.found
    assert took < 300


def test_reading_ends_when_its_time_is_up() -> None:
    now = 0.0

    class Slow(InProcess):
        def ask(self, job: str, argument: Any = None, *, limit_s: float) -> Any:
            nonlocal now
            now += 6.0
            return {"error": None, "frames": 4, "seconds": 0.06}

    picks = [Pick(name=f"clip {i}", store="s") for i in range(50)]
    outcomes = data.read_sample(request("s"), picks, Slow(), limit_s=20.0, clock=lambda: now)
    assert len(outcomes) == 4
    finding = data.check_reading(request("s"), {"kind": "store", "picks": picks}, outcomes)
    assert finding.status is OK
    assert "time was up before 46 more" in finding.found


def test_a_long_video_is_decoded_for_as_long_as_it_may_take(videos: Path) -> None:
    pick = Pick(name=str(videos / "whole.mp4"), video=True)
    facts = sample.read((request(videos), pick, 0.0))
    assert facts["error"] is None
    assert not facts["whole"]
    assert facts["frames"] < 50
    outcome = Outcome(name=pick.name, facts=facts)
    finding = data.check_lengths(request(videos), {"kind": "videos"}, [outcome])
    assert finding.status is OK
    assert "no video was read to its end" in finding.found


@pytest.mark.parametrize(("total", "wanted", "expected"), [(10, 3, [0, 4, 9]), (2, 8, [0, 1]), (1, 8, [0])])
def test_a_sample_is_spread_over_all_the_data(total: int, wanted: int, expected: list[int]) -> None:
    assert sample._spread(total, wanted) == expected


def test_a_truncated_video_that_still_decodes_is_a_warning() -> None:
    facts = {"frames": 10, "seconds": 1.0, "partial": "10 of 40 promised frames decode"}
    outcome = Outcome(name="a.mp4", facts=facts)
    finding = data.check_reading(request("v"), {"kind": "videos", "picks": [0]}, [outcome])
    assert finding.status is WARN
    assert "a.mp4: 10 of 40 promised frames decode" in finding.found


# --- the run ----------------------------------------------------------------------------------------------------------


def test_words_are_data_unless_they_set_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a=b.mp4").touch()
    words = ["demo:train", "recipe=smoke", "a=b.mp4", "+data.x=1", "x/y.csv", "trainer.max_steps=5", "clips/*.mp4"]
    paths, overrides = examine.split_words(words)
    assert paths == ["demo:train", "a=b.mp4", "x/y.csv", "clips/*.mp4"]
    assert overrides == ["recipe=smoke", "+data.x=1", "trainer.max_steps=5"]


def composed(*overrides: str, paths: tuple[str, ...] = (), config_name: str | None = None) -> NamedRun:
    return compose(overrides, paths=paths, config_name=config_name, config_dir=None)


def test_what_a_run_needs_follows_from_its_configuration() -> None:
    assert READING_BYTES == READ_BYTES
    one = composed("data=demo", "trainer.devices=1", "trainer.num_nodes=1", "trainer.max_steps=5000").needs
    assert (one.ranks, one.workers, one.processes, one.checkpoints) == (1, 12, 13, 3)
    weights = 86_000_000  # ViT-B: weights, two moments, the average
    assert one.checkpoint_bytes is not None
    assert 4 * 4 * weights < one.checkpoint_bytes < 1.1 * 4 * 4 * weights
    two = composed("data=demo", "trainer.devices=2", "trainer.max_steps=5000").needs
    assert two.shared_bytes == 2 * one.shared_bytes > 0
    floats = composed("data=demo", "trainer.devices=1", "loader.normalize_on_gpu=false").needs
    assert floats.chunk_bytes == 4 * one.chunk_bytes
    assert composed("data=demo", "checkpoint.save_top_k=3").needs.checkpoints == 3


def test_named_data_stands_for_the_run_s_own() -> None:
    run = composed("recipe=smoke", paths=("my videos",))
    assert run.config.data.train == "my videos"
    (asked,) = requests(run, ["my videos"], clips=3)
    assert (asked.path, asked.pixels, asked.clips) == ("my videos", True, 3)
    (alone,) = requests(None, ["my videos"], clips=3)
    assert (alone.num_frames, alone.frame_stride, alone.span, alone.pixels) == (16, 2, 31, False)
    both = requests(composed("data=demo"), [], clips=3)
    assert [one.path for one in both] == ["demo:train", "demo:heldout"]
    causal = composed("data.buckets=[[2,3],[4,4]]", paths=("a.csv",), config_name="causal_video")
    (windows,) = requests(causal, ["a.csv"], clips=3)
    assert windows.latent_frames == 5


def test_a_run_that_this_machine_cannot_start_is_refused_with_every_reason(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    run = composed("data=demo", "trainer.accelerator=gpu", f"checkpoint.dirpath={tmp_path}")
    first, second = run.check({"cuda": [], "mps": False})
    assert first.status is second.status is FAIL
    assert "asks for a GPU" in first.found
    assert "holds checkpoints of another run" in second.found
    small = composed("data=demo", "recipe=smoke", f"checkpoint.dirpath={tmp_path / 'new'}")
    (fine,) = small.check({"cuda": [], "mps": False})
    assert fine.status is OK


# --- the command ------------------------------------------------------------------------------------------------------

STARTED = {"method": "forkserver", "right": True, "bytes": 10_000_000, "seconds": 1.0}


def test_the_command_finds_what_is_wrong_and_exits_with_2(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything for real, in processes aside: workers, Lightning, damaged data."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(videos, tmp_path / "videos")
    latents(tmp_path / "lat")
    (tmp_path / "lat" / "c4.safetensors").unlink()
    (tmp_path / "lat" / "c0.safetensors").write_bytes(b"not latents")
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "videos", "lat", "nothing.lance", "--clips", "4"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert all(len(line) <= 80 or str(tmp_path) in line for line in said.out.splitlines())
    assert "ok    torch         " in said.out
    assert "ok    lightning     " in said.out
    assert "a loader worker (" in said.out
    assert "damaged.mp4" in said.out
    assert "c4.safetensors" in said.out
    checks, todo = said.out.split("To do, costliest first\n")
    assert todo.splitlines()[0].startswith("FAIL  reading       lat: would show hours into a run; encode them again")
    assert [line.split()[1] for line in todo.splitlines() if line.startswith("FAIL")] == ["reading", "sidecars", "data"]
    (line,) = said.err.splitlines()
    assert line.startswith("marey: 3 of ")
    assert "checks fail (sidecars, reading, data)" in line
    page = (Path(__file__).parents[1] / "docs" / "doctor.md").read_text()
    named = {line[6:20].strip() for line in checks.splitlines() if line[:6].strip() in ("ok", "warn", "FAIL")}
    assert not [name for name in named if f"`{name}`" not in page], "docs/doctor.md says what each check looks at"


def test_the_command_exits_with_0_where_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = {"worker_facts": STARTED, "training_facts": {"version": "2.6", "seconds": 3.0}}
    monkeypatch.setattr(examine, "Aside", lambda: InProcess(told))
    monkeypatch.setattr(places, "LOW_DISK", 0.0)
    monkeypatch.setattr(places, "NO_DISK", 0.0)
    make_video(tmp_path / "v" / "a.mp4", frames=60)
    cli.main(["doctor", "v", "recipe=smoke", "loader.num_workers=0"])
    said = capsys.readouterr()
    assert said.err == ""
    last = said.out.splitlines()[-1]
    assert "nothing stands in the way." in last or "nothing fails, " in last
    assert "ok    run           smoke: it composes" in said.out
    assert "1 of 1 video read" in said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v"], "the doctor leaves nothing behind"


def test_a_run_that_does_not_compose_is_one_failure_among_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = {"worker_facts": STARTED, "training_facts": Gone("did not answer within 180 s, so it was stopped")}
    monkeypatch.setattr(examine, "Aside", lambda: InProcess(told))
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "model.nmae=vit_tiny"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "FAIL  run           model.nmae is not a key of the configuration" in said.out
    assert "did you mean model.name?" in " ".join(said.out.split())
    assert "FAIL  lightning     trying it did not answer within 180 s" in said.out
    assert "(run, lightning)" in said.err


@pytest.mark.parametrize("limit", ["0", "-1", "inf", "nan", "soon"])
def test_a_limit_must_be_some_seconds(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", f"--limit={limit}"])
    assert ended.value.code == 2
    assert "is not a number of seconds above 0" in capsys.readouterr().err


def test_on_a_terminal_the_report_is_coloured_and_says_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    with Report() as report:
        report.checking("disk")
        report.add(ok("python", "3.11", Cost.START))
        report.add(fail("cache", "no room [bold]at all[/bold]", Cost.LATE, "make room"))
        assert report.close().startswith("1 of 2 checks fails (cache)")
    said = capsys.readouterr().out
    assert "\x1b[1;31mFAIL\x1b[0m  cache         no room [bold]at all[/bold]" in said
    assert "would show hours into a run; make room" in said


def test_a_path_that_is_long_is_repeated_by_its_last_part_alone() -> None:
    long = "/data/somewhere/deep/down/in/a/shared/disk/kinetics"
    assert request(long).label == ".../kinetics"
    assert request("videos/").label == "videos"


def test_the_sizes_of_the_numbers_are_numbers(tmp_path: Path) -> None:
    """Facts cross a process boundary by pickle; numpy's own scalars would drag numpy into the parent."""
    path = write_store(tmp_path / "s.lance", rows_of({0: 20}))
    facts = sample.look(request(path))
    flat = [value for value in facts.values() if not isinstance(value, list)]
    assert not any(isinstance(value, np.generic) for value in flat)


def test_the_user_s_own_refusal_keeps_its_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        sample.look(request(tmp_path / "gone.lance"))
