"""What goes wrong while clips are read: one clip's damage is that clip's, and a store that is gone is the end."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
import torch

from marey.config.compose import load_config
from marey.core.errors import UserError
from marey.pixels.dataset import ClipDataset, build_train_dataset
from marey.pixels.episodes import FrameRequest, SourceGoneError
from marey.pixels.reading import Refusal, read_clips
from marey.pixels.store import FrameStore
from marey.pixels.storeformat import METADATA_KEY

SIDE = 40


def jpeg(side: int = SIDE) -> bytes:
    y, x = np.mgrid[0:side, 0:side]
    picture = np.stack([x * 5, y * 5, x + y], axis=-1).astype(np.uint8)
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(picture)))


def rows_of(episodes: int = 3, frames: int = 12) -> list[dict[str, Any]]:
    return [
        {"episode_idx": e, "step_idx": t, "frame": jpeg(), "h": SIDE, "w": SIDE, "label": 0}
        for e in range(episodes)
        for t in range(frames)
    ]


def write(path: Path, rows: list[dict[str, Any]], metadata: bytes | None = None) -> Path:
    table = pa.Table.from_pylist(rows)
    if metadata is not None:
        table = table.replace_schema_metadata({METADATA_KEY: metadata})
    lance.write_dataset(table, str(path))
    return path


def dataset_over(path: Path) -> ClipDataset:
    options = ["model.img_size=32", "model.num_frames=4", "augmentation.local_size=16"]
    small = ["recipe=smoke", "data=custom", f"data.train={path}", "augmentation.local_crops_number=1", *options]
    return build_train_dataset(load_config(small), [FrameStore.open(path)])


def tensors(chunk: Any) -> list[torch.Tensor]:
    return [*chunk.views_global, *chunk.views_local, chunk.clips, chunk.replaced]


def test_what_stands_in_for_a_clip_does_not_depend_on_what_was_read_before(tmp_path: Path) -> None:
    """A frame in the middle of an episode is broken: some of its windows can be read and some cannot."""
    rows = rows_of()
    rows[6]["frame"] = b"\xff\xd8 broken"
    path = write(tmp_path / "s.lance", rows)
    draws = [(0, position, 0, position % 3) for position in range(24)]
    whole = dataset_over(path).__getitems__(draws)
    assert 0 < len(whole.replaced) < 8
    for order in (draws, draws[::-1], draws[12:] + draws[:12]):
        one_after_another = dataset_over(path)
        alone = {draw: one_after_another[draw] for draw in order}
        for row, draw in enumerate(draws):
            assert torch.equal(alone[draw].clips[0], whole.clips[row])
            assert torch.equal(alone[draw].views_global.patches[0], whole.views_global.patches[row])
        assert sum(len(chunk.replaced) for chunk in alone.values()) == len(whole.replaced)


def read_all(store: FrameStore) -> list[torch.Tensor | Refusal]:
    return read_clips(store, [FrameRequest(e, np.arange(n)) for e, n in enumerate(store.lengths.tolist())])


def lose_the_data(path: Path) -> None:
    for file in (path / "data").iterdir():
        file.unlink()


def rebuild(path: Path) -> None:
    shutil.rmtree(path)
    write(path, rows_of())


@pytest.mark.parametrize(
    ("change", "reopened", "said"),
    [
        (shutil.rmtree, True, "changed or went away while it was in use"),
        (rebuild, True, "another store lies there now"),
        (rebuild, False, "is missing"),
        (lose_the_data, True, "is missing"),
        (lose_the_data, False, "is missing"),
    ],
)
def test_a_store_that_changes_while_it_is_in_use_is_not_taken_for_damaged_clips(
    tmp_path: Path, change: Callable[[Path], None], reopened: bool, said: str
) -> None:
    """``reopened``: in a worker that starts after the change."""
    path = write(tmp_path / "s.lance", rows_of())
    store = FrameStore.open(path)
    if not reopened:
        store.dataset()
    change(path)
    with pytest.raises(SourceGoneError, match=said):
        read_all(store)


def test_more_rows_appended_by_another_program_do_not_disturb_a_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "s.lance", rows_of())
    store = FrameStore.open(path)
    lance.write_dataset(pa.Table.from_pylist(rows_of()), str(path), mode="append")
    assert all(isinstance(clip, torch.Tensor) for clip in read_all(store))


@pytest.mark.parametrize(("h", "w"), [(2**31 - 1, 2**31 - 1), (40, 2**30), (0, 40), (40, -1)])
def test_a_row_that_claims_a_size_no_frame_has_is_refused_when_the_store_is_opened(
    tmp_path: Path, h: int, w: int
) -> None:
    rows = [row | {"h": h, "w": w} for row in rows_of(1)]
    with pytest.raises(UserError, match="in episode 0, step 0 has a size that no video frame has"):
        FrameStore.open(write(tmp_path / "s.lance", rows))


def test_no_memory_is_taken_for_a_size_that_the_picture_does_not_have(tmp_path: Path) -> None:
    rows = [row | {"h": 8000, "w": 8000} for row in rows_of(1)]
    store = FrameStore.open(write(tmp_path / "s.lance", rows))
    store.dataset()
    tracemalloc.start()
    try:
        (refusal,) = read_all(store)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**24  # the row's claim would be 2.3 GB
    assert isinstance(refusal, Refusal)
    assert "is 40x40 where its row says 8000x8000" in refusal.reason


@pytest.mark.parametrize(
    "metadata",
    [
        b"no json",
        b"[1]",
        b'{"format": "new"}',
        b'{"rate": "fast"}',
        b'{"rate": NaN}',
        b'{"label_names": 3}',
        b"[" * 100_000,
    ],
)
def test_metadata_that_an_ingest_does_not_write_is_one_sentence(tmp_path: Path, metadata: bytes) -> None:
    with pytest.raises(UserError, match="'marey' entry is not what `marey ingest` writes"):
        FrameStore.open(write(tmp_path / "s.lance", rows_of(1), metadata))


def test_a_label_without_a_name_is_one_sentence(tmp_path: Path) -> None:
    rows = [row | {"label": 2} for row in rows_of(1)]
    with pytest.raises(UserError, match="has label 2 and names for 2"):
        FrameStore.open(write(tmp_path / "s.lance", rows, b'{"label_names": ["a", "b"]}'))
