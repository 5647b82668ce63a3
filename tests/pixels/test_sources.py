from __future__ import annotations

import os
from pathlib import Path

import pytest

from marey.core.errors import UserError
from marey.pixels.listfile import read_list
from marey.pixels.sources import discover


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")


def names_of(root: Path, sources: list[str], **options: str) -> list[str]:
    return [
        os.path.relpath(file.path, root)
        for file in discover(sources, **options).files  # type: ignore[arg-type]
    ]


def test_a_folder_is_searched_in_natural_order_and_hidden_names_are_left_out(tmp_path: Path) -> None:
    touch(tmp_path, "clip10.mp4", "clip2.MP4", "b/clip1.mkv", "a b/ü.webm", "notes.txt", "._clip2.mp4", ".x/y.mp4")
    assert names_of(tmp_path, [str(tmp_path)]) == ["a b/ü.webm", "b/clip1.mkv", "clip2.MP4", "clip10.mp4"]
    assert "4 videos, no labels" in discover([str(tmp_path)]).readings[0]


def test_a_loop_of_links_is_walked_once(tmp_path: Path) -> None:
    touch(tmp_path, "a/x.mp4")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert names_of(tmp_path, [str(tmp_path)]) == ["a/x.mp4"]


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    touch(tmp_path, "notes.txt")
    with pytest.raises(UserError, match=r"holds no video.*\.mp4"):
        discover([str(tmp_path)])


def test_class_folders_become_labels_in_sorted_order(tmp_path: Path) -> None:
    touch(tmp_path, "run/1.mp4", "jump/deep/2.mp4", "jump/1.mp4")
    found = discover([str(tmp_path)])
    assert found.label_names == ["jump", "run"]
    assert [file.label for file in found.files] == [0, 0, 1]
    assert "2 classes" in found.readings[0]
    assert {file.label for file in discover([str(tmp_path)], labels="none").files} == {None}


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (["a/1.mp4", "b/1.mp4", "loose.mp4"], "a video beside the folders"),
        (["a/1.mp4"], "one folder alone"),
        (["a/1.mp4", "b/1.mp4", "c/notes.txt"], "a folder without videos"),
        (["train/1.mp4", "val/1.mp4"], "splits"),
    ],
)
def test_other_folders_are_not_taken_for_classes(tmp_path: Path, files: list[str], why: str) -> None:
    touch(tmp_path, *files)
    found = discover([str(tmp_path)])
    assert found.label_names is None, why
    assert {file.label for file in found.files} == {None}


def test_class_folders_can_be_insisted_on(tmp_path: Path) -> None:
    touch(tmp_path, "train/1.mp4", "val/1.mp4")
    assert discover([str(tmp_path)], labels="folders").label_names == ["train", "val"]
    touch(tmp_path, "loose.mp4")
    with pytest.raises(UserError, match="outside any subfolder"):
        discover([str(tmp_path)], labels="folders")
    with pytest.raises(UserError, match="not a folder"):
        discover([str(tmp_path / "loose.mp4")], labels="folders")


def test_labels_of_several_folders_share_one_numbering(tmp_path: Path) -> None:
    touch(tmp_path, "x/a/1.mp4", "x/c/1.mp4", "y/b/1.mp4", "y/c/1.mp4")
    found = discover([str(tmp_path / "x"), str(tmp_path / "y")])
    assert found.label_names == ["a", "b", "c"]
    assert [file.label for file in found.files] == [0, 2, 1, 2]


def test_a_pattern_takes_videos_through_subfolders(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.mp4", "a/b/2.mp4", "a/b/2.txt")
    assert names_of(tmp_path, [f"{tmp_path}/a/**/*"]) == ["a/1.mp4", "a/b/2.mp4"]
    with pytest.raises(UserError, match="matches 1 files, none of them a video"):
        discover([f"{tmp_path}/a/b/*.txt"])


def test_a_file_whose_name_holds_pattern_signs_is_that_file(tmp_path: Path) -> None:
    touch(tmp_path, "clip[1].mp4", "clip1.mp4")
    assert names_of(tmp_path, [str(tmp_path / "clip[1].mp4")]) == ["clip[1].mp4"]


def test_a_csv_with_a_header_keeps_numbers_and_further_columns(tmp_path: Path) -> None:
    touch(tmp_path, "a, b.mp4", "c d.mp4")
    (tmp_path / "list.csv").write_text('\ufefflabel,path,note\n3,"a, b.mp4",first\n,c d.mp4,\n', encoding="utf-8")
    found = discover([str(tmp_path / "list.csv")])
    assert names_of(tmp_path, [str(tmp_path / "list.csv")]) == ["a, b.mp4", "c d.mp4"]
    assert [file.label for file in found.files] == [3, None]
    assert [file.extra for file in found.files] == [{"note": "first"}, {"note": ""}]
    assert found.label_names is None


def test_text_labels_are_numbered_by_sorted_name(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4", "c.mp4")
    (tmp_path / "list.csv").write_text("path,label\na.mp4,walk\nb.mp4,10\nc.mp4,run\n")
    found = discover([str(tmp_path / "list.csv")])
    assert found.label_names == ["10", "run", "walk"]
    assert [file.label for file in found.files] == [2, 0, 1]


def test_lines_of_path_and_label_are_parsed_from_the_right(tmp_path: Path) -> None:
    touch(tmp_path, "my clip 1.mp4", "b.mp4", "no label.mp4", "q.mp4")
    (tmp_path / "list.txt").write_text("my clip 1.mp4 7\n\nb.mp4\t0\nno label.mp4\n'q.mp4' 2\r\n")
    found = discover([str(tmp_path / "list.txt")])
    assert names_of(tmp_path, [str(tmp_path / "list.txt")]) == ["my clip 1.mp4", "b.mp4", "no label.mp4", "q.mp4"]
    assert [file.label for file in found.files] == [7, 0, None, 2]


def test_paths_are_looked_up_beside_the_list_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "lists/a.mp4", "work/a.mp4", "work/b.mp4")
    (tmp_path / "lists/list.csv").write_text("path,label\na.mp4,0\nb.mp4,1\n")
    monkeypatch.chdir(tmp_path / "work")
    assert names_of(tmp_path, ["../lists/list.csv"]) == ["lists/a.mp4", "work/b.mp4"]


@pytest.mark.parametrize(
    "text",
    ["path,label\na.mp4,0\ngone.mp4,1\nalso.mp4,1\n", "a.mp4 0\n\ngone.mp4 1\nalso.mp4 1\n"],
)
def test_a_missing_file_is_named_with_its_line(tmp_path: Path, text: str) -> None:
    touch(tmp_path, "a.mp4")
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(UserError, match=r"list\.csv, line 3: gone\.mp4 does not exist \(and 1 more\)"):
        discover([str(tmp_path / "list.csv")])


def test_a_line_number_counts_quoted_line_breaks(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4")
    (tmp_path / "list.csv").write_text('path,label,note\na.mp4,0,"two\nlines"\ngone.mp4,1,\n')
    with pytest.raises(UserError, match="line 4: gone"):
        discover([str(tmp_path / "list.csv")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\na.mp4,0\na.mp4,0\n", r"named twice \(.*line 2 and .*line 3\)"),
        ("path,label\na, b.mp4,0\n", "line 2: 3 fields where the header has 2"),
        ("path,label\na.mp4,-4\n", "line 2: label -4 is negative"),
        ("path,label\n", "lists no videos"),
        ("", "lists no videos"),
        ("a.mp4,0\n", "needs the header path,label"),
    ],
)
def test_a_faulty_list_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    touch(tmp_path, "a.mp4")
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        discover([str(tmp_path / "list.csv")])


def test_a_list_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes("path,label\nü.mp4,0\n".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        discover([str(tmp_path / "list.csv")])


def test_a_file_named_by_two_sources_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4")
    with pytest.raises(UserError, match="named twice"):
        discover([str(tmp_path), str(tmp_path / "a.mp4")])


def test_numbers_and_text_as_labels_do_not_mix(tmp_path: Path) -> None:
    touch(tmp_path, "x/a/1.mp4", "x/b/1.mp4", "c.mp4")
    (tmp_path / "list.csv").write_text("path,label\nc.mp4,0\n")
    with pytest.raises(UserError, match="some labels are text"):
        discover([str(tmp_path / "x"), str(tmp_path / "list.csv")])


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        discover([str(tmp_path / "nowhere")])
    for name in ("x" * 5000, "x" * 5000 + ":top", "a\0b", str(tmp_path / "gone") + ":top"):
        with pytest.raises(UserError, match="does not exist"):
            discover([name])
    with pytest.raises(UserError, match="no source"):
        discover([])


def listed(root: Path, text: str) -> list[tuple[str, str | int | None]]:
    """(name, label) of each entry of a list with this text."""
    (root / "list.txt").write_text(text)
    entries, _ = read_list(root / "list.txt")
    return [(os.path.relpath(entry.path, root), entry.label) for entry in entries]


def test_a_path_with_a_space_is_that_file_beside_a_folder_of_its_first_word(tmp_path: Path) -> None:
    touch(tmp_path, "my bikes.mp4", "my/other.mp4")
    assert listed(tmp_path, "my bikes.mp4\n") == [("my bikes.mp4", None)]
    (tmp_path / "my bikes.mp4").unlink()
    with pytest.raises(UserError, match=r"line 1: my bikes\.mp4 does not exist, and .*/my is no file"):
        listed(tmp_path, "my bikes.mp4\n")
    (tmp_path / "my bikes.mp4").symlink_to(tmp_path / "gone.mp4")
    assert listed(tmp_path, "my bikes.mp4\n") == [("my bikes.mp4", None)]


def test_a_line_that_can_be_read_in_two_ways_is_refused_and_quotes_decide(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "a.mp4 1", "b.mp4")
    with pytest.raises(UserError, match=r"line 2: both 'a\.mp4 1' and 'a\.mp4' are files"):
        listed(tmp_path, "b.mp4 0\na.mp4 1\n")
    assert listed(tmp_path, 'b.mp4 0\n"a.mp4 1"\n') == [("b.mp4", 0), ("a.mp4 1", None)]
    assert listed(tmp_path, 'b.mp4 0\n"a.mp4" 1\n') == [("b.mp4", 0), ("a.mp4", 1)]


def test_minus_one_is_unlabelled_beside_words_too(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4", "c.mp4")
    text = "path,label\na.mp4,run\nb.mp4,-1\nc.mp4,\n"
    assert listed(tmp_path, text) == [("a.mp4", "run"), ("b.mp4", None), ("c.mp4", None)]


def test_a_label_of_two_signs_is_text_and_one_too_large_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4", "b.mp4")
    assert listed(tmp_path, "a.mp4 +-3\nb.mp4 2\n") == [("a.mp4", "+-3"), ("b.mp4", "2")]
    assert listed(tmp_path, f"a.mp4 +3\nb.mp4 {2**63 - 1}\n") == [("a.mp4", 3), ("b.mp4", 2**63 - 1)]
    for large in (str(2**63), "9" * 20, "9" * 5000):
        with pytest.raises(UserError, match=r"line 2: label 9.* is too large"):
            listed(tmp_path, f"a.mp4 3\nb.mp4 {large}\n")


def test_a_tab_separates_before_a_space_does(tmp_path: Path) -> None:
    touch(tmp_path, "my clips/a b.mp4", "c.mp4")
    assert listed(tmp_path, "my clips/a b.mp4\t3\nc.mp4\t4\n") == [("my clips/a b.mp4", 3), ("c.mp4", 4)]
    assert listed(tmp_path, "my clips/a b.mp4\tjumping jack\n") == [("my clips/a b.mp4", "jumping jack")]


def test_a_header_of_two_words_is_a_header(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4")
    assert listed(tmp_path, "Path  Label\na.mp4 3\n") == [("a.mp4", 3)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('b.mp4 1\n"a.mp4 3\n', 2),
        ('path,label,note\na.mp4,0,"two\nb.mp4,1,\n', 2),
        ('path,label\nb.mp4,1\n"a.mp4,0\n', 3),
        ('path,label\n"a.mp4,0\n"b.mp4",1\n', 2),
    ],
)
def test_a_quote_left_open_is_said_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    touch(tmp_path, "a.mp4", "b.mp4")
    with pytest.raises(UserError, match=rf"line {line}: .*never closed"):
        listed(tmp_path, text)
