from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from marey.core.errors import UserError
from marey.evaluation.labels import check_classes, labels_from_csv, labels_of_source, read_label_csv


def test_names_stand_for_numbers_where_a_source_has_them():
    got = labels_of_source(np.array([1, 0, -1]), ["cat", "dog"], where="x.lance")
    assert got.values == ["dog", "cat", None]
    assert labels_of_source(np.array([7, -1]), None, where="x.lance").values == ["7", None]


@pytest.mark.parametrize("labels", [None, np.array([-1, -1])])
def test_a_source_without_labels_says_how_to_give_them(labels):
    with pytest.raises(UserError, match=r"x\.lance has no labels.*--labels FILE\.csv --label-column"):
        labels_of_source(labels, None, where="x.lance")


def test_labels_join_by_absolute_path_and_by_path_from_the_csv_folder(tmp_path: Path):
    (tmp_path / "clips").mkdir()
    table = tmp_path / "labels.csv"
    table.write_text(f'path,label,motion\n"clips/a, b.mp4",3,left\n{tmp_path}/clips/c.mp4,4,right\nclips/d.mp4,5,\n')
    files = [str(tmp_path / "clips" / name) for name in ("a, b.mp4", "c.mp4", "c.mp4", "d.mp4", "e.mp4")]
    got = labels_from_csv(files, table, "motion", where="x")
    assert got.name == "motion"
    assert got.values == ["left", "right", "right", None, None]


def test_a_csv_that_cannot_label_says_why(tmp_path: Path):
    table = tmp_path / "labels.csv"
    cases = {
        "path,motoin\na.mp4,left\n": "no column 'motion'; did you mean 'motoin'",
        "file,motion\na.mp4,left\n": "no column 'path'",
        "path,motion\n": "no row with both",
        "path,motion\na.mp4,left\n./a.mp4,right\n": "line 3 gives",
        "": "no column",
    }
    for text, reason in cases.items():
        table.write_text(text)
        with pytest.raises(UserError, match=reason):
            read_label_csv(table, "motion")
    table.write_bytes(b"path,motion\n\xff\xfe\x00,left\n")
    with pytest.raises(UserError, match="UTF-8"):
        read_label_csv(table, "motion")
    with pytest.raises(UserError, match="not a file"):
        read_label_csv(tmp_path / "absent.csv", "motion")


def test_a_csv_of_other_videos_shows_one_path_of_each(tmp_path: Path):
    table = tmp_path / "labels.csv"
    table.write_text("path,label\na.mp4,1\n")
    with pytest.raises(UserError, match=r"none of the 1 videos.*/else/b\.mp4.*a\.mp4"):
        labels_from_csv(["/else/b.mp4"], table, "label", where="x.lance")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a", "b"] * 4, "has 8 labelled videos and a probe needs at least 10"),
        (["a"] * 12, "has the label 'a'; a probe needs two classes"),
        (["a"] * 11 + ["b"], "class 'b' of x has 1 video and a probe needs 3"),
        (["a"] * 11 + ["b", "c"], r"class 'b' of x has 1 video \(and 1 more classes\)"),
    ],
)
def test_what_a_probe_cannot_measure_is_refused(names, reason):
    files = [f"{i}.mp4" for i in range(len(names))]
    with pytest.raises(UserError, match=reason):
        check_classes(names, files, where="x", videos=10, per_class=3)


def test_clips_of_one_video_do_not_make_a_class_common():
    names, files = ["a"] * 10 + ["b"] * 9, [f"{i}" for i in range(10)] + ["b.mp4"] * 9
    with pytest.raises(UserError, match="class 'b' of x has 1 video"):
        check_classes(names, files, where="x", videos=10, per_class=3)
