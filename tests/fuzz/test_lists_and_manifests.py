"""Manifests of latents and lists of videos, damaged: refused in words, or read for what they say."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from marey.latents.manifest import Manifest, read_manifest
from marey.pixels.sources import discover
from tests.fuzz.mutations import FAST, damaged, said

COLUMNS = ("clip_id", "path", "length_frames", "height", "width", "physical_key", "text", "start", "fps", "sha256")
ROWS: list[dict[str, Any]] = [
    {
        "clip_id": f"clip {i}",
        "path": f"{'abc'[i]}.npy",
        "length_frames": 5 + i,
        "height": 4,
        "width": 6,
        "physical_key": f"tape {i // 2}",
        "text": 'a cup, a "hand"\nand a table',
        "start": i,
        "fps": 3.75,
        "sha256": f"{i:064x}",
    }
    for i in range(3)
]


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("manifests")
    for name in ("a.npy", "b.npy", "c.npy", "a.mp4", "b c.mp4", "d.mp4"):
        (root / name).touch()
    (root / "folder.mp4").mkdir()
    return root


def check_sound(manifest: Manifest) -> None:
    """What holds of every manifest that is accepted, whatever its bytes were."""
    assert len(manifest) > 0
    assert (manifest.length_frames >= 2).all()
    assert ((manifest.start >= 0) & (manifest.start < manifest.length_frames)).all()
    for sizes in (manifest.height, manifest.width):
        assert sizes is None or (sizes >= 1).all()
    assert manifest.fps is None or (np.isfinite(manifest.fps) & (manifest.fps > 0)).all()
    for row in range(len(manifest)):
        clip = manifest.clip(row)
        assert clip.clip_id.strip()
        assert Path(clip.path).name in ("a.npy", "b.npy", "c.npy")
        assert clip.sha256 is None or len(clip.sha256) == 64
    assert len({(manifest.clip(row).clip_id, int(manifest.start[row])) for row in range(len(manifest))}) == len(
        manifest
    )


def read_and_check(path: Path, data: bytes) -> str | None:
    path.write_bytes(data)
    return said(lambda: check_sound(read_manifest(path)))


@FAST
@given(data=damaged(as_csv(ROWS)))
@example(data=b"")
@example(data=b"\xef\xbb\xbf")
@example(data=b'"' * 1000)
@example(data=as_csv(ROWS).replace(b"\n", b"\r"))
@example(data=as_csv(ROWS).replace(b",", b"\x00"))
@example(data=as_csv([ROWS[0] | {"text": "x" * 2_000_000}, ROWS[1]]))
def test_a_damaged_csv_manifest_is_refused_or_sound(folder: Path, data: bytes) -> None:
    read_and_check(folder / "m.csv", data)


@FAST
@given(data=damaged(as_parquet(ROWS)))
@example(data=b"PAR1")
@example(data=b"PAR1\xff\xff\xff\x7fPAR1")
def test_a_damaged_parquet_manifest_is_refused_or_sound(folder: Path, data: bytes) -> None:
    read_and_check(folder / "m.parquet", data)


WRONG = {
    "clip_id": ["", "  ", "clip 0"],
    "path": ["", "nowhere.npy", "a.txt", "a.npy/", "../a.npy", "/a.npy"],
    "length_frames": ["", "1", "-5", "5.5", "five", "1e3", "nan", "99999999999999999999", "0x10", "\u0665"],
    "height": ["", "0", "-1", "4.0", "tall"],
    "width": ["", "0", "-1", "inf"],
    "start": ["", "-1", "7", "99", "0.5"],
    "fps": ["", "0", "-3", "nan", "inf", "1e999", "fast"],
    "sha256": ["abc", "g" * 64, "0" * 63, "0" * 65],
}


@pytest.mark.parametrize(("column", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_row_with_an_invalid_value_is_never_accepted_and_is_named(folder: Path, column: str, value: str) -> None:
    start = {"start": 0} if column == "clip_id" else {}
    rows = [ROWS[0], ROWS[1], ROWS[2] | start | {column: value}]
    text = read_and_check(folder / "m.csv", as_csv(rows))
    assert text is not None
    assert "m.csv, row 3, column " in text
    assert f"column {column}" in text


@FAST
@given(
    column=st.sampled_from(sorted(set(COLUMNS) - {"text", "physical_key"})),
    value=st.text(max_size=12),
    row=st.integers(0, 2),
)
def test_a_row_is_accepted_exactly_when_its_values_are_valid(folder: Path, column: str, value: str, row: int) -> None:
    assume("\x00" not in value and value.isprintable())
    assume(column != "path")
    rows = [one | ({column: value} if i == row else {}) for i, one in enumerate(ROWS)]
    word = value.strip()
    whole = word.removeprefix("+")
    number = int(whole) if whole.isascii() and whole.isdigit() and len(whole) <= 18 else None
    if column == "clip_id":
        good = bool(word)
    elif column == "sha256":
        good = word == "" or (len(word) == 64 and set(word.lower()) <= set("0123456789abcdef"))
    elif column == "fps":
        good = _positive(word)
    else:
        least = {"length_frames": row + 1 if row else 2, "start": 0}.get(column, 1)
        most = 4 + row if column == "start" else 10**18
        good = number is not None and least <= number <= most
    assert (read_and_check(folder / "m.csv", as_csv(rows)) is None) == good


def _positive(word: str) -> bool:
    try:
        return word.isascii() and "_" not in word and 0 < float(word) < float("inf")
    except ValueError:
        return False


LIST = b'path,label,camera\na.mp4,walk,left\n"b c.mp4",run,\nd.mp4,,"right, ""far"""\n'
LINES = b"a.mp4 0\nb c.mp4 1\nd.mp4 2\n"


@FAST
@given(
    data=st.sampled_from([LIST, LINES, LINES.replace(b" ", b"\t")]).flatmap(damaged),
    suffix=st.sampled_from([".csv", ".txt"]),
)
@example(data=b"path,path\na.mp4,a.mp4\n", suffix=".csv")
@example(data=b"path,label\n" + b"a.mp4," + b"x" * 200_000 + b"\n", suffix=".csv")
@example(data=b"a.mp4 " + b"9" * 5000, suffix=".txt")
@example(data=b"\xff\xfea\x00", suffix=".txt")
@example(data=b"a\x00.mp4 1\n", suffix=".txt")
@example(data=b"path\n\x00\n", suffix=".csv")
@example(data=("x" * 5000 + ".mp4 1\n").encode(), suffix=".txt")
@example(data=b"~nobody-of-that-name/a.mp4 1\n", suffix=".txt")
def test_a_damaged_list_is_refused_or_names_only_what_is_there(folder: Path, data: bytes, suffix: str) -> None:
    path = folder / f"list{suffix}"
    path.write_bytes(data)

    def read() -> None:
        found = discover([str(path)])
        assert found.files
        paths = [video.path for video in found.files]
        assert len(set(paths)) == len(paths)
        for video in found.files:
            assert Path(video.path).exists()
            assert video.label is None or video.label >= 0
            if found.label_names is not None and video.label is not None:
                assert found.label_names[video.label]

    said(read)


@FAST
@given(name=st.text(max_size=30), label=st.text(max_size=6))
def test_a_source_of_any_name_is_refused_or_is_there(folder: Path, name: str, label: str) -> None:
    said(lambda: discover([name]))
    path = folder / "named.txt"
    path.write_text(f"{name} {label}\n", encoding="utf-8", errors="surrogatepass")
    said(lambda: discover([str(path)]))
