from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image

from marey.core.errors import UserError
from marey.pixels.episodes import EpisodeSource, FrameRequest
from marey.pixels.ingest import ingest
from marey.pixels.open import open_source
from marey.pixels.store import FrameStore
from marey.pixels.storeformat import FRAME_SCHEMA, REQUIRED
from marey.pixels.summary import summarize
from tests.pixels.conftest import make_video, number_of, numbered_frame


def png(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png")
    return buffer.getvalue()


def jpeg(image: NDArray[np.uint8]) -> bytes:
    return bytes(simplejpeg.encode_jpeg(image, quality=95))


def rows_of(
    episodes: dict[int, int], *, first_step: int = 0, encode: Any = jpeg, label: Any = 0
) -> list[dict[str, Any]]:
    return [
        {
            "episode_idx": episode,
            "step_idx": first_step + step,
            "frame": encode(numbered_frame(10 * episode + step)),
            "h": 48,
            "w": 64,
            "label": label,
        }
        for episode, length in episodes.items()
        for step in range(length)
    ]


def write(path: Path, rows: list[dict[str, Any]], *, kinds: dict[str, pa.DataType] | None = None) -> Path:
    """A store as another program would make it: the public columns alone."""
    kinds = {"frame": pa.binary()} | (kinds or {})
    schema = pa.schema([(name, kinds.get(name, pa.int64())) for name in rows[0]])
    lance.write_dataset(pa.Table.from_pylist(rows, schema=schema), str(path))
    return path


def request(episode: int, *steps: int) -> FrameRequest:
    return FrameRequest(episode, np.asarray(steps, np.int64))


def numbers(clip: torch.Tensor) -> list[int]:
    assert clip.dtype == torch.uint8
    assert clip.shape[1] == 3
    return [number_of(frame.permute(1, 2, 0).numpy()) for frame in clip]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.uint32(), pa.int64()])
@pytest.mark.parametrize("encode", [jpeg, png])
def test_a_store_made_elsewhere_is_read(tmp_path: Path, kind: pa.DataType, encode: Any) -> None:
    """Six columns, rows in any order, episode numbers with holes, any integer type, JPEG or PNG."""
    rows = rows_of({7: 4, 2: 6}, encode=encode)
    np.random.default_rng(0).shuffle(rows)
    whole = [name for name in REQUIRED if name != "frame"]
    store: EpisodeSource = FrameStore.open(write(tmp_path / "s.lance", rows, kinds=dict.fromkeys(whole, kind)))
    assert store.lengths.tolist() == [6, 4]
    assert store.files == ["episode 2", "episode 7"]
    assert store.rate is None
    assert store.labels is not None
    assert store.labels.tolist() == [0, 0]
    clips = store.read([request(1, 3, 0, 3), request(0, 5), request(1, 1, 2)])
    assert [numbers(clip) for clip in clips] == [[73, 70, 73], [25], [71, 72]]


def test_one_read_is_one_take_of_distinct_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FrameStore.open(write(tmp_path / "s.lance", rows_of({0: 5, 1: 5})))
    taken: list[list[int]] = []
    take = lance.LanceDataset.take

    def watched(self: Any, indices: Any, columns: Any = None) -> pa.Table:
        taken.append(list(indices))
        assert columns == ["frame"]
        return take(self, indices, columns=columns)

    monkeypatch.setattr(lance.LanceDataset, "take", watched)
    store.read([request(1, 4, 4, 0), request(0, 2), request(1, 4)])
    assert taken == [[2, 5, 9]]


@pytest.mark.parametrize(("label", "kind"), [(None, pa.int64()), (None, pa.null()), (-1, pa.int32())])
def test_a_store_without_labels_has_none(tmp_path: Path, label: Any, kind: pa.DataType) -> None:
    path = write(tmp_path / "s.lance", rows_of({0: 3}, label=label), kinds={"label": kind})
    assert FrameStore.open(path).labels is None


def test_an_unlabelled_episode_among_labelled_ones_is_minus_one(tmp_path: Path) -> None:
    path = write(tmp_path / "s.lance", rows_of({0: 3}, label=None) + rows_of({1: 3}, label=5))
    labels = FrameStore.open(path).labels
    assert labels is not None
    assert labels.tolist() == [-1, 5]


def test_steps_may_start_anywhere(tmp_path: Path) -> None:
    store = FrameStore.open(write(tmp_path / "s.lance", rows_of({3: 4}, first_step=100)))
    assert numbers(store.read([request(0, 0, 3)])[0]) == [30, 33]
    with pytest.raises(IndexError):
        store.read([request(0, 4)])


def _without(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != name} for row in rows]


def _changed(rows: list[dict[str, Any]], place: int, **values: Any) -> list[dict[str, Any]]:
    return [row | (values if index == place else {}) for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows + rows[2:3], "episode 4, step 2 appears twice"),
        (lambda rows: rows[:2] + rows[3:], "episode 4, step 1 is followed by a gap"),
        (lambda rows: _changed(rows, 3, h=50), "step 2 changes its height"),
        (lambda rows: _changed(rows, 3, label=1), "step 2 changes its label"),
        (lambda rows: _without(rows, "step_idx"), "has no column step_idx"),
        (lambda rows: _changed(rows, 1, w=None), "column w has 1 empty"),
    ],
)
def test_an_inconsistent_store_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    write(tmp_path / "s.lance", change(rows_of({4: 5})))
    with pytest.raises(UserError, match=message):
        FrameStore.open(tmp_path / "s.lance")


def test_a_column_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    rows = [row | {"frame": "text"} for row in rows_of({0: 2})]
    with pytest.raises(UserError, match="column frame holds string"):
        FrameStore.open(write(tmp_path / "s.lance", rows, kinds={"frame": pa.string()}))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (jpeg(numbered_frame(0, height=32)), "is 32x64 where its row says 48x64"),
        (png(numbered_frame(0, height=32)), "is 32x64 where its row says 48x64"),
        (jpeg(numbered_frame(0))[:200], "is not a whole JPEG"),
        (b"\xff\xd8", "is not a whole JPEG"),
        (b"", "is not a JPEG or PNG"),
        (None, "is not a JPEG or PNG"),
        (png(numbered_frame(0))[:60], "is not a whole image"),
        (b"text", "is not a JPEG or PNG"),
    ],
)
def test_a_faulty_frame_is_named(tmp_path: Path, frame: bytes | None, message: str) -> None:
    store = FrameStore.open(write(tmp_path / "s.lance", _changed(rows_of({4: 3}), 1, frame=frame)))
    assert numbers(store.read([request(0, 0, 2)])[0]) == [40, 42]
    with pytest.raises(UserError, match=f"episode 4, step 1 {message}"):
        store.read([request(0, 0, 1)])


def test_a_grey_jpeg_becomes_three_channels(tmp_path: Path) -> None:
    grey = bytes(simplejpeg.encode_jpeg(numbered_frame(9)[:, :, :1].copy(), colorspace="GRAY", quality=95))
    store = FrameStore.open(write(tmp_path / "s.lance", _changed(rows_of({0: 1}), 0, frame=grey)))
    assert numbers(store.read([request(0, 0)])[0]) == [9]


def test_what_is_no_store_says_how_to_build_one(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.lance", tmp_path):
        with pytest.raises(UserError, match=r"marey ingest FOLDER OUT\.lance.*data=demo"):
            FrameStore.open(path)
    (tmp_path / "half.lance.partial").mkdir()
    with pytest.raises(UserError, match=r"not finished.*same `marey ingest` command"):
        FrameStore.open(tmp_path / "half.lance")
    (tmp_path / "broken.lance" / "_versions").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be opened"):
        FrameStore.open(tmp_path / "broken.lance")


def test_the_version_changes_with_a_rebuild_of_the_same_size_and_not_with_a_move(tmp_path: Path) -> None:
    rows = rows_of({0: 3})
    first = FrameStore.open(write(tmp_path / "a.lance", rows)).version
    assert FrameStore.open(tmp_path / "a.lance").version == first
    (tmp_path / "a.lance").rename(tmp_path / "b.lance")
    assert FrameStore.open(tmp_path / "b.lance").version == first
    assert FrameStore.open(write(tmp_path / "a.lance", rows)).version != first


def test_a_store_stays_what_it_was_when_rows_are_added(tmp_path: Path) -> None:
    store = FrameStore.open(write(tmp_path / "a.lance", rows_of({0: 3})))
    lance.write_dataset(
        lance.dataset(str(tmp_path / "a.lance")).to_table().slice(0, 1), str(tmp_path / "a.lance"), mode="overwrite"
    )
    assert numbers(store.read([request(0, 0, 2)])[0]) == [0, 2]
    assert FrameStore.open(tmp_path / "a.lance").version != store.version


def test_a_pickled_store_holds_no_reader_and_reads_in_another_process(tmp_path: Path) -> None:
    store = FrameStore.open(write(tmp_path / "s.lance", rows_of({0: 3, 1: 3})))
    store.read([request(0, 0)])
    (tmp_path / "store.pickle").write_bytes(pickle.dumps(store))
    code = (
        "import pickle, sys, numpy as np\n"
        "from marey.pixels.episodes import FrameRequest\n"
        f"store = pickle.load(open({str(tmp_path / 'store.pickle')!r}, 'rb'))\n"
        "assert store._dataset is None\n"
        "print(store.read([FrameRequest(1, np.array([2]))])[0].shape)\n"
        "assert 'lightning' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "torch.Size([1, 3, 48, 64])", done.stderr


def test_an_ingested_store_says_what_it_holds(tmp_path: Path) -> None:
    for name, label in (("run/a.mp4", 0), ("walk/b.mp4", 1)):
        make_video(tmp_path / "clips" / name, frames=20 + 10 * label)
    ingest([str(tmp_path / "clips")], tmp_path / "s.lance", rate=25.0, episode_length=16, workers=1)
    store = open_source(str(tmp_path / "s.lance"), video_rate=1.0, video_episode_length=1)
    assert isinstance(store, FrameStore)
    assert store.dataset().schema.names == FRAME_SCHEMA.names
    assert tuple(store.dataset().schema.names[:6]) == REQUIRED
    assert store.lengths.tolist() == [16, 4, 16, 14]
    assert store.labels is not None
    assert store.labels.tolist() == [0, 0, 1, 1]
    assert [Path(file).name for file in store.files] == ["a.mp4", "a.mp4", "b.mp4", "b.mp4"]
    assert store.rate == 25.0
    facts = summarize(store)
    assert facts["frames"] == 50
    assert facts["episodes"] == 4
    assert facts["hours"] == pytest.approx(2 / 3600)
    assert facts["sizes"] == {"48x64": 50}
    assert facts["labels"] == {"run": 2, "walk": 2}
    assert facts["files"] == 2
    assert 0 < facts["bytes"] < 500_000


def test_a_summary_of_a_store_made_elsewhere_says_what_is_not_known(tmp_path: Path) -> None:
    facts = summarize(FrameStore.open(write(tmp_path / "s.lance", rows_of({0: 3}, label=None))))
    assert (facts["rate"], facts["hours"], facts["files"], facts["labels"]) == (None, None, None, None)
