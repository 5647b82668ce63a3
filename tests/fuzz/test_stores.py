"""Frame stores and the index cache of videos, damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.pixels.episodes import FrameRequest
from marey.pixels.reading import Refusal, read_clips
from marey.pixels.store import FrameStore
from marey.pixels.storeformat import METADATA_KEY
from marey.pixels.summary import summarize
from marey.pixels.videos import VideoEpisodes
from tests.fuzz.mutations import FAST, damaged, said
from tests.pixels.conftest import make_video

SIDE, EPISODES, FRAMES = 24, 3, 4


def picture(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    return np.stack([x * 9, y * 9, (x + y + 20 * number) % 256], axis=-1).astype(np.uint8)


JPEG = bytes(simplejpeg.encode_jpeg(picture(0)))
ROWS = [
    {"episode_idx": e, "step_idx": t, "frame": JPEG, "h": SIDE, "w": SIDE, "label": e} | {"source": f"/clips/{e}.mp4"}
    for e in range(EPISODES)
    for t in range(FRAMES)
]


def read_everything(store: FrameStore) -> list[torch.Tensor | Refusal]:
    """All episodes; what comes back is a whole clip of the size the store says, or a reason that names the store."""
    asked = [FrameRequest(episode, np.arange(length)) for episode, length in enumerate(store.lengths.tolist())]
    got = read_clips(store, asked)
    for episode, clip in enumerate(got):
        if isinstance(clip, Refusal):
            assert store.path in clip.reason
            continue
        sizes = (int(store.lengths[episode]), 3, int(store.heights[episode]), int(store.widths[episode]))
        assert tuple(clip.shape) == sizes
        assert clip.dtype == torch.uint8
    return got


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "sound.lance"
    lance.write_dataset(pa.Table.from_pylist(ROWS), str(path))
    return path


@FAST
@given(data=damaged(JPEG), place=st.integers(0, len(ROWS) - 1))
@example(data=b"", place=0)
@example(data=b"\xff\xd8", place=0)
@example(data=b"\x89PNG\r\n\x1a\n" + b"\x00" * 30, place=5)
@example(data=JPEG[:160] + b"\xff\xff" + JPEG[162:], place=11)
def test_a_frame_that_is_no_picture_costs_its_clip_and_no_other(tmp_path: Path, data: bytes, place: int) -> None:
    path = tmp_path / "s.lance"
    shutil.rmtree(path, ignore_errors=True)
    rows = [row | ({"frame": data} if i == place else {}) for i, row in enumerate(ROWS)]
    lance.write_dataset(pa.Table.from_pylist(rows), str(path))
    got = read_everything(FrameStore.open(path))
    assert all(isinstance(clip, torch.Tensor) for episode, clip in enumerate(got) if episode != place // FRAMES)


COLUMN_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "episode_idx": st.none() | st.integers(-(2**63), 2**63 - 1),
    "step_idx": st.none() | st.integers(-(2**63), 2**63 - 1),
    "h": st.none() | st.integers(-(2**63), 2**63 - 1) | st.just(SIDE + 1),
    "w": st.none() | st.integers(-(2**63), 2**63 - 1) | st.just(SIDE - 1),
    "label": st.none() | st.integers(-(2**63), 2**63 - 1),
    "source": st.none() | st.text(max_size=5),
    "frame": st.none(),
}


@FAST
@given(data=st.data())
def test_rows_with_other_numbers_are_refused_or_read_for_what_they_say(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "s.lance"
    shutil.rmtree(path, ignore_errors=True)
    rows = [dict(row) for row in ROWS]
    for _ in range(data.draw(st.integers(1, 3))):
        column = data.draw(st.sampled_from(sorted(COLUMN_VALUES)))
        rows[data.draw(st.integers(0, len(rows) - 1))][column] = data.draw(COLUMN_VALUES[column])
    lance.write_dataset(pa.Table.from_pylist(rows), str(path))

    def read() -> None:
        store = FrameStore.open(path)
        summarize(store)
        assert store.lengths.sum() == len(rows)
        read_everything(store)

    said(read)


@FAST
@given(data=st.data())
def test_a_damaged_table_is_refused_or_read(tmp_path: Path, sound: Path, data: st.DataObject) -> None:
    path = tmp_path / "s.lance"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(sound, path)
    files = sorted(file for folder in ("data", "_versions") for file in (path / folder).iterdir())
    file = data.draw(st.sampled_from(files))
    file.write_bytes(data.draw(damaged(file.read_bytes())))
    said(lambda: read_everything(FrameStore.open(path)))


@FAST
@given(metadata=damaged(b'{"format": 1, "rate": 15.0, "label_names": ["a", "b", "c"], "settings": {"rate": 15.0}}'))
def test_damaged_metadata_of_a_store_is_refused_or_read(tmp_path: Path, metadata: bytes) -> None:
    path = tmp_path / "s.lance"
    shutil.rmtree(path, ignore_errors=True)
    try:
        metadata.decode()
    except UnicodeDecodeError:
        return  # a schema holds text
    table = pa.Table.from_pylist(ROWS).replace_schema_metadata({METADATA_KEY: metadata})
    lance.write_dataset(table, str(path))

    def read() -> None:
        summarize(FrameStore.open(path))

    said(read)


def test_a_damaged_index_in_the_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    video = make_video(tmp_path / "a.mp4", frames=9, rate=15)
    lengths = VideoEpisodes.open(str(video), rate=15.0, episode_length=8).lengths.tolist()
    (cached,) = tmp_path.glob("cache/video-index/*/*.npz")
    whole = cached.read_bytes()
    cut = [whole[: len(whole) // 2], b"", b"PK\x03\x04", whole[:200] + b"\xff" * 40 + whole[240:]]
    for number, data in enumerate(cut):
        cached.write_bytes(data)
        assert VideoEpisodes.open(str(video), rate=15.0, episode_length=8).lengths.tolist() == lengths, number
        assert cached.read_bytes()[:4] == whole[:4]


def test_a_store_that_is_no_folder_of_tables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.lance" / "_versions").mkdir(parents=True)
    with pytest.raises(UserError):
        FrameStore.open(tmp_path / "s.lance")
