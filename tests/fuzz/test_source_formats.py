"""Datasets in other people's formats, damaged: refused in words, their videos named, nothing read outside of them."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from marey.pixels.container import Container
from marey.pixels.decode import Reading
from marey.pixels.footage import Span, WholeFile
from marey.pixels.media import Unreadable
from marey.pixels.sources import discover
from tests.fuzz.mutations import FAST, damaged, replaced, said

VIDEO = bytes(range(256)) * 3


def a_tar() -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in (("a.mp4", VIDEO), ("a.cls", b"3"), ("é/b.webm", VIDEO), ("é/b.json", b'{"label": 4}')):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return held.getvalue()


def a_table(form: str) -> bytes:
    held = io.BytesIO()
    video = pa.array([{"bytes": VIDEO, "path": "a"}, {"bytes": None, "path": "b"}, None])
    table = pa.table({"video": video, "label": [1, None, 0], "text": ["x", None, ""]})
    if form == "parquet":
        pq.write_table(table, held)
    else:
        with pa.ipc.new_stream(held, table.schema) as writer:
            writer.write_table(table)
    return held.getvalue()


def a_webp() -> bytes:
    held = io.BytesIO()
    first, *others = [Image.new("RGB", (16, 12), (20 * n, 0, 90)) for n in range(4)]
    first.save(held, "WEBP", save_all=True, append_images=others, duration=50)
    return held.getvalue()


def check_sound(source: Path) -> None:
    """What holds of every source that is accepted: each video is refused in words, or lies inside the source."""
    found = discover([str(source)])
    assert found.files
    for video in found.files:
        if video.fault is not None:
            assert video.fault.strip()
            assert "\n" not in video.fault
            continue
        assert video.label is None or video.label >= 0
        footage = video.frames()
        json.dumps(footage.identity())
        assert footage.size() >= 0
        blob = getattr(footage, "blob", None)
        if isinstance(blob, Span):
            assert (blob.path, blob.start >= 0, blob.length >= 0) == (str(source), True, True)
        if blob is not None and not isinstance(blob, WholeFile):
            with contextlib.suppress(Unreadable), blob.opened() as file:
                assert len(file.read()) <= source.stat().st_size


@FAST
@given(data=damaged(a_tar()))
@example(data=b"")
@example(data=b"\0" * 1024)
@example(data=a_tar()[:512] * 3)
@example(data=a_tar().replace(b"000001400", b"777777777"))
@example(data=a_tar().replace(b"a.mp4", b"../.."))
def test_a_damaged_shard_is_refused_or_sound(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    said(lambda: check_sound(tmp_path / "x.tar"))


@FAST
@given(at=st.integers(0, 511), block=st.sampled_from([0, 3, 5, 6, 8]), value=st.binary(min_size=1, max_size=12))
def test_a_shard_with_a_forged_header_is_refused_or_sound(tmp_path: Path, at: int, block: int, value: bytes) -> None:
    data = bytearray(a_tar())
    start = min(512 * block, len(data) - 512)
    data[start + at : start + at + len(value)] = value
    header = data[start : start + 512]
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    data[start + 148 : start + 156] = f"{total:06o}\0 ".encode()  # or the change would be seen at once
    (tmp_path / "x.tar").write_bytes(data)
    said(lambda: check_sound(tmp_path / "x.tar"))


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_damaged_table_of_videos_is_refused_or_sound(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"t.{form}"

    @FAST
    @given(data=damaged(a_table(form)))
    @example(data=b"")
    @example(data=b"PAR1PAR1")
    @example(data=b"ARROW1\0\0")
    @example(data=b"\xff\xff\xff\xff\x10\0\0\0" + bytes(64))
    def hunt(data: bytes) -> None:
        path.write_bytes(data)
        said(lambda: check_sound(path))

    hunt()


INFO = {
    "codebase_version": "v2.1",
    "fps": 10,
    "chunks_size": 1000,
    "video_path": "videos/{video_key}/{episode_chunk:03d}-{episode_index:06d}.mp4",
    "features": {"cam": {"dtype": "video"}, "action": {"dtype": "float32"}},
}
LINES = b'{"episode_index": 0, "tasks": ["a"], "length": 3}\n{"episode_index": 1, "tasks": ["b"], "length": 4}\n'


@FAST
@given(info=replaced(INFO), lines=st.one_of(st.just(LINES), damaged(LINES)))
@example(info=INFO | {"video_path": "/{video_key}/../../x.mp4"}, lines=LINES)
@example(info=INFO | {"video_path": "{video_key:99999999d}"}, lines=LINES)
@example(info=INFO | {"fps": True, "chunks_size": 10**400}, lines=LINES)
@example(info=INFO, lines=b'{"episode_index": 1' + b"0" * 5000 + b"}")
@example(info=INFO, lines=b"[" * 100_000)
def test_a_damaged_robot_dataset_is_refused_or_sound(tmp_path: Path, info: Any, lines: bytes) -> None:
    root = tmp_path / "d"
    (root / "meta").mkdir(parents=True, exist_ok=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/episodes.jsonl").write_bytes(lines)

    def read() -> None:
        for video in discover([str(root)]).files:
            assert video.fault or isinstance(video.footage, Container)
            if video.footage is not None:
                assert Path(video.path).is_relative_to(root)
                assert ".." not in Path(video.path).parts
                with pytest.raises(Unreadable):
                    video.footage.identity()  # there is no video at all

    said(read)


WHERE = {"videos/cam/chunk_index": 0, "videos/cam/file_index": 0}
ROW = {
    "episode_index": 0,
    "tasks": ["a"],
    "length": 3,
    "videos/cam/from_timestamp": 0.0,
    "videos/cam/to_timestamp": 0.3,
}


@FAST
@given(row=replaced(ROW | WHERE))
@example(row=ROW | WHERE | {"videos/cam/to_timestamp": float("nan")})
@example(row=ROW | WHERE | {"videos/cam/to_timestamp": 5e-324})
@example(row=ROW | WHERE | {"videos/cam/file_index": "../../x"})
def test_a_wrong_row_of_episodes_is_refused_or_sound(tmp_path: Path, row: Any) -> None:
    root = tmp_path / "d"
    (root / "meta/episodes").mkdir(parents=True, exist_ok=True)
    video = "videos/{video_key}/{chunk_index:03d}-{file_index:03d}.mp4"
    (root / "meta/info.json").write_text(json.dumps(INFO | {"codebase_version": "v3.0", "video_path": video}))
    try:
        pq.write_table(pa.Table.from_pylist([row]), root / "meta/episodes/0.parquet")
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return  # no table can hold it
    said(lambda: check_robot(root))


def check_robot(root: Path) -> None:
    for video in discover([str(root)]).files:
        assert video.fault or isinstance(video.footage, Container)
        window = getattr(video.footage, "window", None)
        assert video.fault or (window is not None and 0 <= window.start_s < window.end_s and 0 <= window.share <= 1)


@FAST
@given(state=replaced({"_data_files": [{"filename": "data-0.arrow"}]}))
def test_a_damaged_list_of_data_files_is_refused_or_sound(tmp_path: Path, state: Any) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "data-0.arrow").write_bytes(a_table("arrow"))
    (tmp_path / "state.json").write_text(json.dumps(state))

    def read() -> None:
        for video in discover([str(tmp_path)]).files:
            assert Path(video.path).parent == tmp_path

    said(read)


@FAST
@given(data=damaged(a_webp()))
@example(data=b"RIFF\x10\0\0\0WEBPVP8X\x0a\0\0\0\x02")
def test_a_damaged_animation_gives_frames_or_a_reason(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.webp").write_bytes(data)
    reading = Reading(str(tmp_path / "a.webp"), rate=20.0)
    with contextlib.suppress(Unreadable):
        assert sum(shown.span for shown in reading) >= 1
        assert 1 <= reading.counts.decoded <= (reading.counts.promised or 0)
