from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import marey.pixels.committer as committer_module
from marey.core.errors import UserError
from marey.pixels.ingest import ingest
from marey.pixels.ingest_worker import CHUNK_FRAMES
from marey.pixels.report import report_path
from marey.pixels.store import FrameStore
from marey.pixels.storeformat import partial_path
from tests.pixels.conftest import make_video, real_clip
from tests.pixels.ingest_cases import Rows, rows_of


def test_episodes_follow_the_files_in_order(plain: Rows, clips: Path) -> None:
    names = list(dict.fromkeys(Path(row["source"]).name for row in plain))
    assert names == ["0.mp4", "1.mp4", "2.mp4", "3.mp4", "4.mp4", "5.mp4", "9 cut ü.mp4"]
    lengths: dict[int, int] = {}
    for row in plain:
        assert row["step_idx"] == lengths.setdefault(row["episode_idx"], 0)
        lengths[row["episode_idx"]] += 1
        assert row["source_step"] % 50 == row["step_idx"]
    assert list(lengths) == list(range(len(lengths)))
    assert list(lengths.values())[:11] == [40, *[50] * 6, 7, *[50] * 3]
    assert {row["label"] for row in plain} == {None}
    assert {row["true_rate"] for row in plain if not row["source"].endswith("4.mp4")} == {25.0}
    assert {row["true_rate"] for row in plain if row["source"].endswith("4.mp4")} == {None}


@pytest.mark.parametrize("commit_rows", [1, 4096])
def test_any_number_of_workers_gives_the_same_rows(
    clips: Path, plain: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit_rows: int
) -> None:
    monkeypatch.setattr(committer_module, "COMMIT_ROWS", commit_rows)
    ingest([str(clips)], tmp_path / "s.lance", rate=25.0, episode_length=50, workers=3)
    assert rows_of(tmp_path / "s.lance") == plain


def test_every_file_that_is_not_wholly_read_is_in_the_report(clips: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.lance"
    report = ingest([str(clips)], out, rate=50.0, workers=2)
    assert {Path(item["path"]).name: item["reason"] for item in report.refused} == {
        "0b empty.mp4": "is empty (0 bytes)",
        "2b text.mp4": "moov atom not found (Invalid data found when processing input)",
        "5b fifo.mp4": "is a FIFO, not a regular file",
    }
    (partial,) = report.partial
    assert Path(partial["path"]).name == "9 cut ü.mp4"
    assert partial["promised"] == 100 > partial["decoded"] > 10
    assert (report.sources, report.used) == (10, 7)
    assert report.repeats == sum(item["repeats"] for item in report.slow) > 300
    written = json.loads(report_path(out).read_text(encoding="utf-8"))
    assert written["refused"] == report.refused
    assert written["frames"] == report.frames == len(rows_of(out))
    assert "refused   " in report.text()
    assert "0b empty.mp4: is empty (0 bytes)" in report.text()
    assert not partial_path(out).exists()


def test_the_same_command_again_has_nothing_to_do_and_another_is_refused(clips: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.lance"
    first = ingest([str(clips / "0.mp4")], out, workers=1)
    version = FrameStore.open(out).version
    again = ingest([str(clips / "0.mp4")], out, workers=2)
    assert again.already_complete
    assert not first.already_complete
    assert "already complete" in again.text()
    assert FrameStore.open(out).version == version
    report_path(out).unlink()
    without = ingest([str(clips / "0.mp4")], out)
    assert (without.already_complete, without.frames, without.hours) == (True, first.frames, first.hours)
    with pytest.raises(UserError, match=r"quality=90.*quality=80"):
        ingest([str(clips / "0.mp4")], out, quality=80)
    with pytest.raises(UserError, match="other files"):
        ingest([str(clips / "1.mp4")], out)


def test_what_stands_in_the_way_is_not_touched(clips: Path, tmp_path: Path) -> None:
    for name in ("folder.lance", "file.lance"):
        (tmp_path / name).mkdir() if name.startswith("folder") else (tmp_path / name).write_text("mine")
        with pytest.raises(UserError, match="exists and is not a store made by this command"):
            ingest([str(clips)], tmp_path / name)
    lance.write_dataset(pa.table({"x": [1]}), str(tmp_path / "table.lance"))
    with pytest.raises(UserError, match="exists and is not a store"):
        ingest([str(clips)], tmp_path / "table.lance")
    partial_path(tmp_path / "s.lance").mkdir()
    (partial_path(tmp_path / "s.lance") / "mine.txt").touch()
    with pytest.raises(UserError, match="no unfinished ingest"):
        ingest([str(clips)], tmp_path / "s.lance")
    assert (partial_path(tmp_path / "s.lance") / "mine.txt").exists()


def test_no_usable_file_leaves_no_store_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mp4").touch()
    with pytest.raises(UserError, match=r"none of the 1 videos is usable.*a\.mp4: is empty \(0 bytes\)"):
        ingest([str(tmp_path / "clips")], tmp_path / "s.lance")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["clips", "s.report.json"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rate", 0.0),
        ("short_edge", 1),
        ("quality", 101),
        ("episode_length", 0),
        ("workers", 0),
        ("stall_s", 0.0),
        ("min_frames", 0),
        ("labels", "yes"),
    ],
)
def test_an_impossible_option_is_refused_by_name(clips: Path, tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{option}={value if value else 0}"):
        ingest([str(clips)], tmp_path / "s.lance", **{option: value})


def test_a_file_with_too_few_frames_is_refused(clips: Path, tmp_path: Path) -> None:
    report = ingest([str(clips / "2.mp4"), str(clips / "0.mp4")], tmp_path / "s.lance", rate=25.0, min_frames=8)
    assert [item["reason"] for item in report.refused] == ["gives 7 frames at 25 frames/s, fewer than min_frames=8"]
    assert {row["source_idx"] for row in rows_of(tmp_path / "s.lance")} == {1}


def test_labels_and_further_columns_of_a_list_are_stored(clips: Path, tmp_path: Path) -> None:
    (clips / "list.csv").write_text("path,label,camera\n2.mp4,walk,left\n0.mp4,run,\n4.mp4,,right\n")
    report = ingest([str(clips / "list.csv")], tmp_path / "s.lance", workers=1)
    assert report.label_names == ["run", "walk"]
    rows = rows_of(tmp_path / "s.lance")
    seen = {Path(row["source"]).name: (row["label"], json.loads(row["extra"])) for row in rows}
    assert seen == {
        "2.mp4": (1, {"camera": "left"}),
        "0.mp4": (0, {"camera": ""}),
        "4.mp4": (None, {"camera": "right"}),
    }
    assert FrameStore.open(tmp_path / "s.lance").label_names == ["run", "walk"]


def test_a_name_that_is_no_text_is_refused_and_the_others_go_on(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    folder = os.fsencode(tmp_path / "clips")
    shutil.copy(os.fsencode(clips / "2.mp4"), folder + b"/a\xff.mp4")
    shutil.copy(os.fsencode(clips / "2.mp4"), folder + b"/b.mp4")
    report = ingest([str(tmp_path / "clips")], tmp_path / "s.lance", workers=1)
    assert report.used == 1
    assert "\\xff" in report.refused[0]["path"] or "\\udcff" in report.refused[0]["path"]
    assert "UTF-8" in report.refused[0]["reason"]


def test_an_unwritable_place_is_one_sentence(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        ingest([str(clips / "0.mp4")], tmp_path / "file" / "s.lance")


def test_a_long_file_is_committed_in_pieces_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = lance.write_dataset

    def watched(table: pa.Table, *args: Any, **kwargs: Any) -> Any:
        sizes.append(table.num_rows)
        return write(table, *args, **kwargs)

    monkeypatch.setattr(lance, "write_dataset", watched)
    monkeypatch.setattr(committer_module, "COMMIT_ROWS", 2 * CHUNK_FRAMES)
    make_video(tmp_path / "a.mp4", frames=700)
    ingest([str(tmp_path / "a.mp4")], tmp_path / "s.lance", rate=25.0, workers=1)
    assert sizes == [256, 256, 188]


def test_camera_clips_become_a_store(tmp_path: Path) -> None:
    names = ("bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4")
    report = ingest([str(real_clip(name)) for name in names], tmp_path / "s.lance", workers=2)
    assert (report.used, report.episodes, report.frames) == (3, 4, 150 + 80 + 61)
    assert (report.refused, report.partial, report.repeats) == ([], [], 0)
    store = FrameStore.open(tmp_path / "s.lance")
    assert sorted(set(zip(store.heights.tolist(), store.widths.tolist(), strict=True))) == [
        (144, 176),
        (272, 640),
        (384, 683),
    ]
