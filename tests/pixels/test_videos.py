from __future__ import annotations

import mmap
import os
import pickle
import shutil
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import marey.pixels.buffers as buffers_module
import marey.pixels.guard as guard_module
import marey.pixels.videos as videos_module
from marey.core.errors import UserError
from marey.pixels.decode import Reading, index_file
from marey.pixels.episodes import EpisodeSource, FrameRequest
from marey.pixels.ingest import ingest
from marey.pixels.open import open_source
from marey.pixels.picture import Painter
from marey.pixels.pool import run_tasks
from marey.pixels.reader import VideoReader
from marey.pixels.store import FrameStore
from marey.pixels.videos import VideoEpisodes
from tests.pixels.conftest import cut, make_video, number_of, real_clip

pytestmark = pytest.mark.usefixtures("video_cache")


def request(episode: int, *steps: int) -> FrameRequest:
    return FrameRequest(episode, np.asarray(steps, np.int64))


def numbers(clip: torch.Tensor) -> list[int]:
    assert clip.dtype == torch.uint8
    return [number_of(frame.permute(1, 2, 0).numpy()) for frame in clip]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "clips"
    make_video(root / "a/1.mp4", frames=70, rate=25, b_frames=2)
    make_video(root / "a/2.mkv", stamps_ms=[0, 40, 120, 130, 500, 540, 900, 1100])
    make_video(root / "b/3.mp4", frames=10, rate=5)
    make_video(root / "b/4.gif", frames=12, rate=10, codec="gif")
    (root / "b/5.mp4").touch()
    cut(make_video(tmp_path / "whole.mp4", frames=100, front_index=True), root / "b/6.mp4", keep=0.7)
    return root


def test_episodes_from_files_are_those_of_a_store(folder: Path, tmp_path: Path) -> None:
    videos: EpisodeSource = open_source(str(folder), video_rate=15.0, video_episode_length=16)
    ingest([str(folder)], tmp_path / "s.lance", rate=15.0, episode_length=16, quality=100, workers=1)
    store = FrameStore.open(tmp_path / "s.lance")
    assert videos.lengths.tolist() == store.lengths.tolist()
    assert videos.labels is not None
    assert store.labels is not None
    assert videos.labels.tolist() == store.labels.tolist()
    assert videos.files == store.files
    assert videos.rate == store.rate == 15.0
    everything = [request(episode, *range(length)) for episode, length in enumerate(store.lengths.tolist())]
    clips = zip(videos.read(everything), store.read(everything), store.files, strict=True)
    for seen, stored, file in clips:
        assert numbers(seen) == numbers(stored)
        # A GIF's dither is finer than JPEG's chroma.
        assert file.endswith(".gif") or (seen.float() - stored.float()).abs().mean() < 3


def test_files_that_give_nothing_are_named_with_the_reason(folder: Path) -> None:
    videos = VideoEpisodes.open(str(folder), rate=15.0, episode_length=16)
    assert [(Path(item.path).name, item.reason) for item in videos.refused] == [("5.mp4", "is empty (0 bytes)")]
    assert str(folder / "b/5.mp4") not in videos.files


def test_a_source_of_bad_files_alone_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips/a.mp4").write_text("not a video\n" * 40)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(UserError, match=r"none of its 1 videos is usable.*a\.mp4: moov atom not found"):
            VideoEpisodes.open(str(tmp_path / "clips"), rate=15.0, episode_length=16)


def test_frames_read_at_random_equal_those_read_in_order(tmp_path: Path) -> None:
    """Bit for bit, before any JPEG: seeking must not change a pixel."""
    path = str(real_clip("carphone_pristine.mp4"))
    painter = Painter()
    in_order = {
        step: painter.rgb(shown.frame)
        for shown in Reading(path, rate=15.0)
        for step in range(shown.step, shown.step + shown.span)
    }
    source = VideoEpisodes.open(path, rate=15.0, episode_length=20)
    order = np.random.default_rng(0).permutation(len(in_order))
    for step in order.tolist():
        (clip,) = source.read([request(step // 20, step % 20)])
        assert np.array_equal(clip[0].permute(1, 2, 0).numpy(), in_order[step])


@pytest.fixture(scope="module")
def reordered(tmp_path_factory: pytest.TempPathFactory) -> VideoReader:
    path = make_video(tmp_path_factory.mktemp("v") / "a.mp4", frames=120, rate=25, b_frames=3, keys_every=25)
    return VideoReader(str(path), index_file(str(path), rate=25.0))


@given(steps=st.lists(st.integers(0, 119), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_reads_gives_the_frames_asked_for(reordered: VideoReader, steps: list[int]) -> None:
    for step in steps:
        assert number_of(reordered.fetch([step])[step]) == step
    assert {step: number_of(image) for step, image in reordered.fetch(steps).items()} == {s: s for s in steps}


def test_reading_on_decodes_every_frame_once(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", frames=96, rate=25, b_frames=3, keys_every=96)
    decoded: list[int] = []
    reader = VideoReader(str(path), index_file(str(path), rate=25.0), tick=lambda: decoded.append(1))
    for start in range(0, 96, 8):
        steps = range(start, start + 8)
        assert [number_of(picture) for picture in reader.fetch(steps).values()] == [*steps]
    assert len(decoded) == 96


def test_a_clip_keeps_its_pixels_while_it_is_held_and_leaves_its_memory_to_the_next(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", frames=40)
    source = VideoEpisodes.open(str(path), rate=25.0, episode_length=40)
    held = [source.read([request(0, start, start + 2)])[0] for start in (0, 10, 20)]
    assert [numbers(clip) for clip in held] == [[0, 2], [10, 12], [20, 22]]
    assert len({clip.untyped_storage().data_ptr() for clip in held}) == 3
    places = [clip.untyped_storage().data_ptr() for clip in held]
    part = held[0][1:]
    del held
    fresh = [source.read([request(0, start, start + 2)])[0] for start in (5, 15, 25)]
    assert numbers(part) == [2]
    assert len({clip.untyped_storage().data_ptr() for clip in fresh} & set(places[1:])) == 2
    assert places[0] not in {clip.untyped_storage().data_ptr() for clip in fresh}
    del source
    assert [numbers(clip) for clip in fresh] == [[5, 7], [15, 17], [25, 27]]  # also when the decoder is gone


@given(lost=st.sets(st.integers(1, 118), min_size=1, max_size=8))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pixels_of_a_file_that_lost_packets_do_not_depend_on_what_else_is_asked_for(
    tmp_path: Path, reordered: VideoReader, lost: set[int]
) -> None:
    """The decoder fills holes from what it decoded before, so nothing may be left out on the way to a frame."""
    path = tmp_path / "lossy.mp4"
    without_packets(Path(reordered.path), path, lost)
    index = index_file(str(path), rate=25.0)
    painter = Painter()
    whole: dict[int, NDArray[np.uint8]] = {}
    for shown in Reading(str(path), rate=25.0):
        whole |= dict.fromkeys(range(shown.step, shown.step + shown.span), painter.rgb(shown.frame))
    reader = VideoReader(str(path), index)
    for steps in ([100, 30], [5], [*range(40, 80, 6)], [119]):
        for step, picture in reader.fetch([step for step in steps if step in whole]).items():
            assert np.array_equal(picture, whole[step])


def without_packets(source: Path, target: Path, lost: set[int]) -> None:
    """A copy from which packets are missing, by their place in the file."""
    with av.open(str(source)) as whole, av.open(str(target), "w") as copy:
        stream = whole.streams.video[0]
        out = copy.add_stream_from_template(stream)
        for number, packet in enumerate(whole.demux(stream)):
            if packet.size and (number not in lost or packet.is_keyframe):
                packet.stream = out
                copy.mux(packet)


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="this system cannot give back a part of a file's memory")
def test_memory_that_lies_unused_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "KEEP_BYTES", 0)
    make_video(tmp_path / "clips" / "0.mp4", frames=10)
    make_video(tmp_path / "clips" / "1.mp4", frames=10, height=240, width=320)
    source = VideoEpisodes.open(str(tmp_path / "clips"), rate=25.0, episode_length=10)
    small, large = request(0, *range(8)), request(1, *range(8))
    for _ in range(3):
        assert numbers(source.read([small])[0]) == [*range(8)]
        clip = source.read([large])[0]  # too large for the block of the clip before, which goes
        assert numbers(clip) == [*range(8)]
        assert source._guard is not None
        assert source._guard._process is not None
        held = os.fstat(source._guard._process.memory.file.fileno()).st_blocks * 512
        assert clip.nbytes <= held < clip.nbytes + (1 << 20)
        kept = source.read([small, large])  # a block each while both are held
        assert [numbers(one) for one in (*kept, clip)] == [[*range(8)]] * 3
        del kept, clip


def test_a_clock_that_runs_backwards_is_read_by_counting(tmp_path: Path) -> None:
    """Two recordings in one transport stream, the second's clock starting anew."""
    first = make_video(tmp_path / "a.ts", frames=30, rate=25)
    second = make_video(tmp_path / "b.ts", frames=40, rate=25)
    (tmp_path / "joined.ts").write_bytes(first.read_bytes() + second.read_bytes())
    index = index_file(str(tmp_path / "joined.ts"), rate=25.0)
    assert not index.seekable
    source = VideoEpisodes.open(str(tmp_path / "joined.ts"), rate=25.0, episode_length=1000)
    expected = [*range(30), *range(40)]
    assert numbers(source.read([request(0, *range(70))])[0]) == expected
    assert numbers(source.read([request(0, 50, 3, 65)])[0]) == [expected[step] for step in (50, 3, 65)]


@pytest.fixture
def in_the_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs these lines in the decoding process before each read, with ``payload`` and ``reader`` at hand."""

    def install(lines: str) -> None:
        (tmp_path / "changed.py").write_text(
            "import ctypes, os, signal, time\n"
            "import marey.pixels.reader as reader\n"
            "from marey.pixels.framejob import _open, read_frames as whole\n"
            "def read_frames(payload, tick):\n"
            f"{textwrap.indent(textwrap.dedent(lines).strip(), '    ')}\n"
            "    return whole(payload, tick)\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(guard_module, "JOB", "changed:read_frames")

    return install


def test_one_call_reads_each_file_forward_once(
    folder: Path, tmp_path: Path, in_the_decoder: Callable[[str], None]
) -> None:
    in_the_decoder(
        f"""
        decoded = reader._decoded
        def counted(packet, stream):
            frames = decoded(packet, stream)
            with open({str(tmp_path / "decoded")!r}, "a") as file:
                file.write("." * len(frames))
            return frames
        reader._decoded = counted
        """
    )
    source = VideoEpisodes.open(str(folder / "a/1.mp4"), rate=25.0, episode_length=35)
    source.read([request(1, 30, 0), request(0, 3, 34), request(1, 5)])
    assert 0 < len((tmp_path / "decoded").read_text()) <= 70


def test_only_a_few_files_stay_open(tmp_path: Path) -> None:
    for number in range(guard_module.OPEN_FILES + 3):
        make_video(tmp_path / "clips" / f"{number}.mp4", frames=3)
    source = VideoEpisodes.open(str(tmp_path / "clips"), rate=25.0, episode_length=8)
    for _ in range(2):
        for episode in range(len(source.lengths)):
            assert numbers(source.read([request(episode, 2)])[0]) == [2]
    assert source._guard is not None
    assert source._guard._process is not None
    links = Path(f"/proc/{source._guard._process.child.process.pid}/fd").iterdir()
    open_files = [str(link.readlink()) for link in links if link.is_symlink()]
    assert sum(str(tmp_path) in name for name in open_files) == guard_module.OPEN_FILES


def test_the_index_is_made_once_and_again_when_the_file_or_the_rate_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_video(tmp_path / "a.mp4", frames=20)
    runs: list[int] = []
    whole = run_tasks

    def counted(job: str, tasks: list[tuple[int, dict[str, object]]], **options: object) -> object:
        runs.append(len(tasks))
        return whole(job, tasks, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(videos_module, "run_tasks", counted)

    def opened(rate: float = 25.0) -> VideoEpisodes:
        return VideoEpisodes.open(str(path), rate=rate, episode_length=8)

    first = opened()
    assert opened().version == first.version
    assert runs == [1]
    assert opened(12.5).version != first.version
    assert runs == [1, 1]
    make_video(path, frames=21)
    assert opened().version != first.version
    assert opened().lengths.tolist() == [8, 8, 5]
    assert runs == [1, 1, 1]


@pytest.mark.parametrize("change", ["grown", "gone"])
def test_a_file_that_changes_after_indexing_is_named(tmp_path: Path, change: str) -> None:
    path = make_video(tmp_path / "a.mp4", frames=20)
    source = VideoEpisodes.open(str(path), rate=25.0, episode_length=8)
    if change == "gone":
        path.unlink()
    else:
        make_video(path, frames=30)
    with pytest.raises(UserError, match=r"a\.mp4"):
        source.read([request(0, 0)])


def test_a_read_that_takes_too_long_names_the_file(tmp_path: Path, in_the_decoder: Callable[[str], None]) -> None:
    path = make_video(tmp_path / "a.mp4", frames=40)
    in_the_decoder(
        """
        decoded = reader._decoded
        def slow(packet, stream):
            time.sleep(0.02)
            return decoded(packet, stream)
        reader._decoded, reader.READ_LIMIT_S = slow, 0.1
        """
    )
    source = VideoEpisodes.open(str(path), rate=25.0, episode_length=40)
    with pytest.raises(UserError, match=r"a\.mp4: finding one frame took more than 0\.1 s"):
        source.read([request(0, 35)])


def test_a_decoder_that_hangs_or_dies_in_a_read_costs_that_clip_alone(
    tmp_path: Path, in_the_decoder: Callable[[str], None]
) -> None:
    for name in ("a", "hang", "segfault", "trip", "z"):
        make_video(tmp_path / "clips" / f"{name}.mp4", frames=20)
    in_the_decoder(
        """
        path = "" if payload["opens"] is None else payload["opens"][0]
        if path.endswith("hang.mp4"):
            time.sleep(3600)
        if path.endswith("segfault.mp4"):
            ctypes.string_at(0)
        if path.endswith("trip.mp4"):
            raise KeyError("odd")
        """
    )
    source = VideoEpisodes.open(str(tmp_path / "clips"), rate=25.0, episode_length=8, stall_s=1.5)
    episode = {name: next(i for i, file in enumerate(source.files) if f"{name}.mp4" in file) for name in ("a", "z")}
    bad = {Path(file).stem: number for number, file in reversed(list(enumerate(source.files)))}
    begun = time.monotonic()
    asked = [(episode["a"], 1), (bad["hang"], 2), (bad["segfault"], 3), (bad["trip"], 4), (episode["z"], 5)]
    clips = source.read_each([request(*pair) for pair in [*asked, (episode["a"], 6)]])
    assert time.monotonic() - begun < 30
    assert [numbers(clip) if isinstance(clip, torch.Tensor) else str(clip) for clip in clips] == [
        [1],
        f"{tmp_path}/clips/hang.mp4: no new frame for 1.5 s, so the decoder was stopped",
        f"{tmp_path}/clips/segfault.mp4: the decoder died (SIGSEGV)",
        f"{tmp_path}/clips/trip.mp4: reading it failed with KeyError: 'odd'",
        [5],
        [6],
    ]
    with pytest.raises(UserError, match="the decoder died"):
        source.read([request(episode["a"], 0), request(bad["segfault"], 0)])


def test_the_other_clips_of_a_file_of_which_one_cannot_be_read_are_read(
    tmp_path: Path, in_the_decoder: Callable[[str], None]
) -> None:
    path = make_video(tmp_path / "a.mp4", frames=40)
    in_the_decoder("if 11 in payload['steps']: os.kill(os.getpid(), signal.SIGKILL)")
    source = VideoEpisodes.open(str(path), rate=25.0, episode_length=8)
    clips = source.read_each([request(0, 1, 2), request(1, 3), request(4, 7, 0)])
    assert [numbers(clip) if isinstance(clip, torch.Tensor) else str(clip) for clip in clips] == [
        [1, 2],
        f"{path}: the decoder died (SIGKILL)",
        [39, 32],
    ]


def test_no_decoding_process_outlives_its_source(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", frames=5)
    source = VideoEpisodes.open(str(path), rate=25.0, episode_length=8)
    source.read([request(0, 1)])
    assert source._guard is not None
    assert source._guard._process is not None
    process = source._guard._process.child.process
    assert process.poll() is None
    del source
    assert process.poll() == -signal.SIGKILL


def test_a_decoder_that_hangs_while_indexing_costs_its_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging.py").write_text(
        "import time\n"
        "from marey.pixels.decode import index_job as whole\n"
        "def index_job(payload, tick):\n"
        "    if payload['path'].endswith('bad.mp4'):\n"
        "        time.sleep(3600)\n"
        "    return whole(payload, tick)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(videos_module, "JOB", "hanging:index_job")
    make_video(tmp_path / "clips/bad.mp4", frames=5)
    make_video(tmp_path / "clips/good.mp4", frames=5)
    source = VideoEpisodes.open(str(tmp_path / "clips"), rate=25.0, episode_length=8, stall_s=1.0)
    assert source.lengths.tolist() == [5]
    assert [item.reason for item in source.refused] == ["no new frame for 1 s, so the decoder was stopped"]
    monkeypatch.undo()
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    # A hang may be the machine's: it is not remembered.
    assert VideoEpisodes.open(str(tmp_path / "clips"), rate=25.0, episode_length=8).refused == []


def test_a_pickled_source_reads_on(folder: Path) -> None:
    source = VideoEpisodes.open(str(folder / "a/1.mp4"), rate=25.0, episode_length=16)
    source.read([request(0, 3)])
    again = pickle.loads(pickle.dumps(source))
    assert numbers(again.read([request(1, 4)])[0]) == [20]
    with pytest.raises(IndexError):
        again.read([request(0, 16)])


def test_a_turned_camera_is_upright_in_files_too(tmp_path: Path) -> None:
    make_video(tmp_path / "a.mp4", frames=3, height=50, width=70, rotation=90)
    source = VideoEpisodes.open(str(tmp_path / "a.mp4"), rate=25.0, episode_length=8)
    assert source.read([request(0, 0, 1)])[0].shape == (2, 3, 70, 50)


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_video(tmp_path / "a.mp4", frames=3)
    (tmp_path / "file").touch()
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="MAREY_CACHE"):
        VideoEpisodes.open(str(path), rate=25.0, episode_length=8)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def test_what_is_neither_store_nor_video_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / "gone.lance"):
        with pytest.raises(UserError, match="does not exist"):
            open_source(str(path), video_rate=15.0, video_episode_length=16)


def test_a_name_that_is_no_text_is_refused_like_any_bad_file(tmp_path: Path) -> None:
    make_video(tmp_path / "clips/a.mp4", frames=5)
    odd = os.fsencode(tmp_path / "clips") + b"/\xff.mp4"
    try:
        shutil.copy(os.fsencode(tmp_path / "clips/a.mp4"), odd)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    source = VideoEpisodes.open(str(tmp_path / "clips"), rate=25.0, episode_length=8)
    assert source.files == [str(tmp_path / "clips/a.mp4")]
    ((path, reason),) = source.refused
    assert path.encode().endswith(rb"\udcff.mp4")
    assert "not UTF-8" in reason
