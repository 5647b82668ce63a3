"""What reaching the tokens of a clip costs, counted: files opened, frames decoded, table reads, bytes shipped."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import av
import lance
import numpy as np
import pytest
import simplejpeg
import torch

import marey.pixels.guard as guard_module
import marey.pixels.ingest as ingest_module
from marey.config.compose import load_config
from marey.core.tokens import ViewChunk
from marey.pixels.dataset import ClipDataset, build_train_dataset
from marey.pixels.episodes import FrameRequest
from marey.pixels.ingest import ingest
from marey.pixels.store import FrameStore
from marey.pixels.videos import VideoEpisodes
from marey.training.cost import step_cost
from tests.costs import watched_av
from tests.costs.watched_av import Seen, read_log
from tests.pixels.conftest import make_video
from tests.pixels.memory_source import MemorySource
from tests.training.conftest import FRAMES, SMALL, write_store

ROOT = Path(__file__).parents[2]
TICKS = 12_800 // 25
"""Of a frame, in an MP4 of 25 frames per second as FFmpeg writes it."""


class _Boundary(pickle.Pickler):
    """What a worker sends: tensors by their storage, which is shipped whole, and the rest as bytes."""

    def __init__(self) -> None:
        self.rest = io.BytesIO()
        self.storages: dict[int, int] = {}
        super().__init__(self.rest)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()
            return torch.Tensor, ()
        return NotImplemented


def shipped(chunk: ViewChunk) -> tuple[int, int]:
    """Bytes of the tensors of a chunk, and of everything else about it."""
    boundary = _Boundary()
    boundary.dump(chunk)
    return sum(boundary.storages.values()), len(boundary.rest.getvalue())


def test_a_worker_ships_the_kept_patches_and_where_they_were_and_nothing_else() -> None:
    config = load_config(["data.train=memory", "augmentation.color_jitter_prob=0"])
    dataset = build_train_dataset(config, [MemorySource([40] * 2, size=(60, 80))])
    kept = 157 + 10 * 29  # 5% of the 16 x 14 x 14 tokens of the global view, and of 16 x 6 x 6 ten times
    patch = 16 * 16 * 3  # bytes
    position = 3 * 8
    row = 5 * 8  # where the clip came from
    sizes = [shipped(dataset.__getitems__([(0, clip, 0, clip) for clip in range(n)])) for n in (1, 2)]
    assert [tensors for tensors, _ in sizes] == [n * (kept * (patch + position) + row) for n in (1, 2)]
    assert len({rest for _, rest in sizes}) == 1
    assert sizes[0][1] < 1000
    assert sizes[0][0] == 354_064
    # Whole views would be 3 * 16 * (224 ** 2 + 10 * 96 ** 2) bytes.
    assert sizes[0][0] * 19 < 3 * 16 * (224**2 + 10 * 96**2)
    assert step_cost(config).bytes_shipped_per_clip == sizes[0][0] - row


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a JPEG is decoded and the table is read, in this process."""
    seen: Counter[str] = Counter()

    def watch(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            seen[name] += 1
            return whole(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    for name in dir(simplejpeg):
        if name.startswith("decode_jpeg") and name != "decode_jpeg_header":
            watch(simplejpeg, name)
    for name in ("take", "to_table", "to_batches", "scanner", "head", "sample"):
        watch(lance.LanceDataset, name)
    return seen


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "s.lance"
    write_store(path, episodes=8)
    return path


def clips_of(store: Path, *overrides: str) -> ClipDataset:
    config = load_config([*SMALL, f"data.train={store}", "augmentation.local_crops_number=3", *overrides])
    return build_train_dataset(config, [FrameStore.open(store)])


def test_each_frame_of_a_clip_is_decoded_once_for_all_its_views_and_a_batch_is_one_take(
    store: Path, calls: Counter[str]
) -> None:
    dataset = clips_of(store)
    dataset.__getitems__([(0, 0, 0, 0)])  # tells how large clips are
    calls.clear()
    dataset.__getitems__([(0, position, 0, position) for position in range(1, 8)])
    assert calls == {"take": 1, "decode_jpeg": 7 * 4}


def test_a_frame_that_a_short_episode_repeats_is_decoded_once(store: Path, calls: Counter[str]) -> None:
    dataset = clips_of(store, "model.num_frames=16", "data.pad_short=repeat")
    calls.clear()
    dataset.__getitems__([(0, 0, 0, 0)])
    assert calls == {"take": 1, "decode_jpeg": FRAMES}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where decoding processes, and this one, write down what they do."""
    path = tmp_path / "log"
    monkeypatch.setenv(watched_av.LOG, str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(ingest_module, "JOB", "tests.costs.watched_av:ingest_file")
    monkeypatch.setattr(guard_module, "JOB", "tests.costs.watched_av:read_frames")
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(av, "open", watched_av.opened)
    return path


@pytest.fixture(scope="module")
def reordered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 frames, some of them coded after frames that are shown later."""
    return make_video(tmp_path_factory.mktemp("video") / "a.mp4", frames=150, rate=25, b_frames=2)


def test_ingest_opens_each_file_once_and_decodes_it_front_to_back_whatever_the_rate(
    reordered: Path, tmp_path: Path, log: Path
) -> None:
    report = ingest([str(reordered)], tmp_path / "s.lance", rate=12.5, episode_length=50, workers=1)
    seen = read_log(log)
    assert seen.opened == [f"file:{reordered}"]
    assert seen.sought == []
    assert len(seen.decoded) == 150
    assert seen.decoded == sorted(set(seen.decoded))
    assert seen.encoded == report.frames == 75


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two videos of 60 frames with a key frame every twelve."""
    path = tmp_path_factory.mktemp("videos")
    for name in ("a.mp4", "b.mp4"):
        make_video(path / name, frames=60, rate=25, keys_every=12)
    return path


def test_clips_straight_from_video_open_each_file_once_and_decode_from_the_key_frame_before(
    folder: Path, log: Path
) -> None:
    source = VideoEpisodes.open(str(folder), rate=25.0, episode_length=60)

    def read(*clips: tuple[int, int]) -> Seen:
        """Clips of four frames, by file and first step."""
        log.unlink(missing_ok=True)
        source.read([FrameRequest(file, np.arange(first, first + 4)) for file, first in clips])
        seen = read_log(log)
        return seen._replace(decoded=[stamp // TICKS for stamp in seen.decoded])

    first = read((0, 30), (1, 5), (0, 32))
    assert first.opened == [f"file:{folder / name}" for name in ("a.mp4", "b.mp4")]
    assert first.decoded == [*range(24, 36), *range(9)]
    second = read((0, 34), (1, 20))
    assert second.opened == []
    assert second.decoded == [*range(24, 38), *range(12, 24)]
    third = read((0, 38), (1, 24), (1, 40))
    assert third.opened == []
    assert third.decoded == [*range(38, 42), *range(24, 28), *range(36, 44)]
