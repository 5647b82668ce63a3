from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.latents.manifest import hold_out, read_manifest

HEADER = "clip_id,path,length_frames,height,width,physical_key,text,start,fps,sha256,augmentation\n"


def write(tmp_path: Path, body: str, header: str = HEADER) -> Path:
    path = tmp_path / "clips.csv"
    path.write_text(header + body, encoding="utf-8")
    return path


def minimal(tmp_path: Path, rows: int) -> Path:
    body = "".join(f"c{i},c{i}.npy,{8 + i % 5}\n" for i in range(rows))
    return write(tmp_path, body, "clip_id,path,length_frames\n")


def test_every_column_is_read_with_its_type(tmp_path: Path) -> None:
    digest = "a" * 64
    path = write(tmp_path, f'a,sub/a.pt,9,8,12,tape 1,"pick, then place",2,3.75,{digest.upper()},flip\n')
    manifest = read_manifest(path, check_files=False)
    clip = manifest.clip(0)
    assert clip.path == str(tmp_path / "sub/a.pt")
    assert (clip.clip_id, clip.length_frames, clip.height, clip.width) == ("a", 9, 8, 12)
    assert (clip.physical_key, clip.text, clip.sha256) == ("tape 1", "pick, then place", digest)
    assert manifest.start.tolist() == [2]
    assert manifest.fps is not None
    assert manifest.fps.tolist() == [3.75]
    assert manifest.texts("augmentation") == ["flip"]


def test_a_comma_a_quote_and_a_line_break_stay_in_a_quoted_text(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'a,a.pt,4,"one, ""two""\nthree, four"\nb,b.pt,5,plain\n', "clip_id,path,length_frames,text\n"
    )
    assert read_manifest(path, check_files=False).texts("text") == ['one, "two"\nthree, four', "plain"]


def test_optional_columns_may_be_absent_or_empty(tmp_path: Path) -> None:
    path = write(tmp_path, "a,a.npy,4,,\nb,b.npy,5,tape,words\n", "clip_id,path,length_frames,physical_key,text\n")
    manifest = read_manifest(path, check_files=False)
    assert [manifest.clip(i).physical_key for i in range(2)] == ["a", "tape"]
    assert manifest.texts("text") == [None, "words"]
    assert manifest.height is None
    assert manifest.start.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ("b,b.pt,one,8,8,k,t,0,4,,", "row 2, column length_frames: 'one' is not a whole number"),
        ("b,b.pt,1,8,8,k,t,0,4,,", "row 2, column length_frames: 1 is below 2"),
        ("b,b.pt,,8,8,k,t,0,4,,", "row 2, column length_frames: the value is missing"),
        ("b,b.pt,4.5,8,8,k,t,0,4,,", "row 2, column length_frames: '4.5' is not a whole number"),
        (",b.pt,4,8,8,k,t,0,4,,", "row 2, column clip_id: the value is missing"),
        ("b,,4,8,8,k,t,0,4,,", "row 2, column path: the value is missing"),
        ("b,b.mp4,4,8,8,k,t,0,4,,", "row 2, column path: 'b.mp4' does not end in one of .pt, .safetensors, .npy"),
        ("b,b.pt,4,0,8,k,t,0,4,,", "row 2, column height: 0 is below 1"),
        ("b,b.pt,4,8,-3,k,t,0,4,,", "row 2, column width: -3 is below 1"),
        ("b,b.pt,4,8,8,k,t,4,4,,", "row 2, column start: 4 is not below the clip's length_frames"),
        ("b,b.pt,4,8,8,k,t,0,0,,", "row 2, column fps: 0.0 is not a positive number"),
        ("b,b.pt,4,8,8,k,t,0,nan,,", "row 2, column fps: 'nan' is not a positive number"),
        ("b,b.pt,4,8,8,k,t,0,4,xyz,", "row 2, column sha256: 'xyz' is not 64 hexadecimal digits"),
        ("a,b.pt,4,8,8,k,t,0,4,,", "row 2, column clip_id: 'a' is also row 1, with the same start"),
        ("b,b.pt,4,8,8,k,unquoted, text,0,4,,", "row 2, column augmentation: the row has 12 fields"),
    ],
)
def test_an_error_names_file_row_and_column(tmp_path: Path, row: str, where: str) -> None:
    path = write(tmp_path, f"a,a.pt,4,8,8,k,t,0,4,,\n{row}\nc,c.pt,4,8,8,k,t,0,4,,\n")
    with pytest.raises(UserError) as error:
        read_manifest(path, check_files=False)
    assert str(error.value).startswith(f"{path}, {where}")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("clip_id,length_frames\n", "column path is missing"),
        ("clip_id,path,length_frames,path\n", "column path appears twice"),
        (
            "clip_id,path,length_frames,heigth,width\n",
            "column heigth is not one a manifest knows; did you mean height?",
        ),
        ("clip_id,path,length_frames,height\n", "a column height but none named width"),
    ],
)
def test_a_header_that_cannot_be_meant_is_refused(tmp_path: Path, header: str, message: str) -> None:
    values = ",".join(["a", "a.npy", "5", "8", "8"][: header.count(",") + 1])
    if header.startswith("clip_id,length"):
        values = "a,5"
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        read_manifest(write(tmp_path, values + "\n", header), check_files=False)


def test_foreign_columns_are_left_alone_and_named(tmp_path: Path) -> None:
    path = write(tmp_path, "a,a.npy,5,sunny\n", "clip_id,path,length_frames,weather\n")
    assert read_manifest(path, check_files=False).ignored_columns == ("weather",)


def test_an_empty_or_absent_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rows"):
        read_manifest(write(tmp_path, ""), check_files=False)
    with pytest.raises(UserError, match="no such manifest"):
        read_manifest(tmp_path / "nothing.csv")


def test_parquet_and_csv_say_the_same(tmp_path: Path) -> None:
    csv = write(tmp_path, 'a,a.pt,9,8,12,tape,"x, y",2,3.75,,\nb,b.pt,5,8,8,tape,z,0,4,,\n')
    columns = {
        "clip_id": ["a", "b"],
        "path": ["a.pt", "b.pt"],
        "length_frames": pa.array([9, 5], pa.int16()),
        "height": pa.array([8, 8], pa.uint64()),
        "width": [12, 8],
        "physical_key": pa.array(["tape", "tape"]).dictionary_encode(),
        "text": ["x, y", "z"],
        "start": [2, 0],
        "fps": pa.array([3.75, 4], pa.float32()),
    }
    parquet = tmp_path / "clips.parquet"
    pq.write_table(pa.table(columns), parquet)
    one, other = read_manifest(csv, check_files=False), read_manifest(parquet, check_files=False)
    assert [one.clip(i) for i in range(2)] == [other.clip(i) for i in range(2)]
    assert np.array_equal(one.clip_keys, other.clip_keys)
    assert one.fps is not None
    assert other.fps is not None
    assert one.fps.tolist() == other.fps.tolist()


def test_parquet_types_and_nulls_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "clips.parquet"
    good = {"clip_id": ["a", "b"], "path": ["a.pt", "b.pt"], "length_frames": [4, None]}
    pq.write_table(pa.table(good), path)
    with pytest.raises(UserError, match="row 2, column length_frames: the value is missing"):
        read_manifest(path, check_files=False)
    pq.write_table(pa.table({**good, "length_frames": [4.0, 5.0]}), path)
    with pytest.raises(UserError, match="column length_frames: holds double, not whole numbers"):
        read_manifest(path, check_files=False)
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserError, match="not a readable Parquet"):
        read_manifest(path)


def test_a_row_whose_file_is_missing_is_refused_unless_asked_otherwise(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.npy").write_bytes(b"")
    path = write(tmp_path, "a,sub/a.npy,4\nb,sub/b.npy,4\n", "clip_id,path,length_frames\n")
    with pytest.raises(UserError, match=r"row 2, column path: 'sub/b.npy' does not exist"):
        read_manifest(path)
    assert len(read_manifest(path, check_files=False)) == 2


def test_clips_of_one_recording_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    keys = [f"tape {i // 8}" for i in range(400)]
    path = write(
        tmp_path,
        "".join(f"c{i},c{i}.npy,9,{keys[i]}\n" for i in range(400)),
        "clip_id,path,length_frames,physical_key\n",
    )
    side = read_manifest(path, check_files=False).validation_rows(0.25)
    for tape in set(keys):
        assert len({bool(side[i]) for i in range(400) if keys[i] == tape}) == 1
    assert 0.1 < side.mean() < 0.4


@settings(max_examples=20, deadline=None)
@given(st.integers(60, 200), st.integers(1, 100), st.sampled_from([0.1, 0.3, 0.5]))
def test_adding_clips_moves_none_to_the_other_side(
    tmp_path_factory: pytest.TempPathFactory, rows: int, more: int, fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("split")
    small = read_manifest(minimal(folder, rows), check_files=False).validation_rows(fraction)
    large = read_manifest(minimal(folder, rows + more), check_files=False).validation_rows(fraction)
    assert small.tolist() == large[:rows].tolist()


def test_the_split_is_fixed_for_ever(tmp_path: Path) -> None:
    side = read_manifest(minimal(tmp_path, 40), check_files=False).validation_rows(0.2)
    assert np.flatnonzero(side).tolist() == [2, 4, 5, 7, 9, 17, 22, 26, 36]


def test_an_empty_side_is_refused(tmp_path: Path) -> None:
    manifest = read_manifest(minimal(tmp_path, 1), check_files=False)
    with pytest.raises(UserError, match=r"holding out 0.001 of 2 clips .* leaves the validation side empty"):
        hold_out([manifest, manifest], 0.001)
    with pytest.raises(UserError, match="leaves the training side empty"):
        hold_out([manifest], 0.999)


def test_selected_rows_keep_every_column_aligned(tmp_path: Path) -> None:
    manifest = read_manifest(minimal(tmp_path, 30), check_files=False)
    kept = manifest.select(np.arange(30) % 3 == 0)
    assert [kept.clip(i) for i in range(10)] == [manifest.clip(3 * i) for i in range(10)]
    assert kept.clip_keys.tolist() == manifest.clip_keys[::3].tolist()


def test_a_hundred_thousand_rows_are_checked_within_two_seconds(tmp_path: Path) -> None:
    path = minimal(tmp_path, 100_000)
    start = time.process_time()
    manifest = read_manifest(path, check_files=False)
    assert time.process_time() - start < 2
    assert manifest.nbytes / len(manifest) < 100


def test_line_breaks_in_texts_survive_files_of_many_blocks(tmp_path: Path) -> None:
    text = "first line, then\nsecond line of a longer instruction"
    rows = 40_000
    body = "".join(f'c{i},c{i}.npy,{8 + i % 5},"{text} {i}"\n' for i in range(rows))
    manifest = read_manifest(write(tmp_path, body, "clip_id,path,length_frames,text\n"), check_files=False)
    assert manifest.texts("text") == [f"{text} {i}" for i in range(rows)]


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "clips.csv"
    path.write_bytes(b"\xef\xbb\xbfclip_id,path,length_frames\r\na,a.npy,5\r\nb,b.npy,6\r\n")
    manifest = read_manifest(path, check_files=False)
    assert [manifest.clip(i).clip_id for i in range(2)] == ["a", "b"]
    assert manifest.length_frames.tolist() == [5, 6]


TEXTS = b"clip_id,path,length_frames,text\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXTS + b'\na,a.npy,5,"x\ny"\n\nb,b.npy,5,caf\xe9\n', ", row 2, column text: the value is not UTF-8; save"),
        (TEXTS + b"a,a.npy,5,x\n\xe9,b.npy,5,y\n", ", row 2, column clip_id: the value is not UTF-8"),
        (TEXTS + b"a,a.npy,5,caf\xe9, cr\xe8me\n", ", row 1, column text: the value is not UTF-8"),
        (TEXTS + b"a,a.npy,5,cut \xc3", ", row 1, column text: the value is not UTF-8"),
        (b"clip_id,p\xe9th\n", ": its header is not UTF-8"),
        ("clip_id,path,length_frames\na,a.npy,5\n".encode("utf-16"), ": it is written in UTF-16; save it as UTF-8"),
        (b"PAR1\x15\x84\xff", ": it is a Parquet file; give it a name that ends in .parquet"),
        (b"", ": not a readable CSV manifest (Empty CSV file)"),
        (b"clip_id;path;length_frames\na;a.npy;5\n", ": column clip_id is missing among 'clip_id;path;length_frames'"),
        (b"clip_id, path, length_frames\na,a.npy,5\n", ": column path is missing among 'clip_id', ' path', ' length"),
        (b"clip_id,path,length_frames,,\na,a.npy,5,,\n", ": column '' appears twice"),
        (TEXTS + b'\na,a.npy,5,"x\ny"\n\nb,b.npy,5,t,u\n', ", row 2, column text: the row has 5 fields"),
        (TEXTS + b"a,a.npy,5,x\nb,b.npy\n", ", row 2, column path: the row has 2 fields where the header has 4"),
    ],
)
def test_another_encoding_or_separator_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "clips.csv"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_manifest(path, check_files=False)
    assert str(error.value).startswith(f"{path}{message}")
    assert str(error.value).isprintable()


def parquet(tmp_path: Path, **columns: object) -> Path:
    path = tmp_path / "clips.parquet"
    good = {"clip_id": ["a", "b"], "path": ["a.pt", "b.pt"], "length_frames": [4, 5]}
    pq.write_table(pa.table({**good, **columns}), path)
    return path


@pytest.mark.parametrize(
    "columns",
    [
        {"length_frames": pa.array([4, 5], pa.int32())},
        {"length_frames": pa.array([4, 5], pa.uint8())},
        {"length_frames": pa.array([4, 5]).dictionary_encode()},
        {"clip_id": pa.array(["a", "b"], pa.large_string())},
        {"clip_id": pa.array(["a", "b"], pa.string_view())},
        {"text": pa.nulls(2), "physical_key": pa.nulls(2), "sha256": pa.nulls(2)},
    ],
)
def test_parquet_s_kinds_of_integers_and_strings_are_read(tmp_path: Path, columns: dict[str, object]) -> None:
    manifest = read_manifest(parquet(tmp_path, **columns), check_files=False)
    assert [tuple(manifest.clip(i))[:3] for i in range(2)] == [
        ("a", str(tmp_path / "a.pt"), 4),
        ("b", str(tmp_path / "b.pt"), 5),
    ]
    assert manifest.clip(1).physical_key == "b"
    assert manifest.clip(1).text is None


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"length_frames": pa.array([4, 5], pa.timestamp("s"))}, "column length_frames: holds timestamp"),
        ({"length_frames": [True, True]}, "column length_frames: holds bool, not whole numbers"),
        ({"length_frames": [[4], [5]]}, "column length_frames: holds list"),
        ({"length_frames": pa.array([4, 2**63 + 5], pa.uint64())}, "row 2, column length_frames: .* is too large"),
        ({"length_frames": [4, -5]}, "row 2, column length_frames: -5 is below 2"),
        ({"clip_id": [1, 2]}, "column clip_id: holds int64, not text"),
        ({"clip_id": ["a", None]}, "row 2, column clip_id: the value is missing"),
        ({"text": pa.array([1, 2], pa.timestamp("s"))}, "column text: holds timestamp.* not text"),
        ({"start": [0, None]}, "row 2, column start: the value is missing"),
        ({"fps": [4.0, float("nan")]}, "row 2, column fps: nan is not a positive number"),
        ({"height": [4, None], "width": [4, 4]}, "row 2, column height: the value is missing"),
    ],
)
def test_parquet_s_other_kinds_and_gaps_are_refused_by_column(
    tmp_path: Path, columns: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_manifest(parquet(tmp_path, **columns), check_files=False)
