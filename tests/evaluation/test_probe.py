from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from marey.core.errors import UserError
from marey.evaluation import attentive_fit, measure
from marey.evaluation import probe as room
from marey.evaluation.features import video_names
from tests.evaluation.coloured_source import ColouredSource


@pytest.fixture
def data(monkeypatch, tmp_path: Path) -> dict[str, ColouredSource]:
    """Sources by name: where a test puts one, the probe finds it."""
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    found: dict[str, ColouredSource] = {}
    monkeypatch.setattr(room, "open_clips", lambda path, _preprocessing: found[path])
    return found


def silent(_: str) -> None:
    pass


def probe(*words, **options):
    """Without the attentive probe, which takes seconds; its own tests show what it does."""
    return room.probe(*words, **{"attentive": False, **options})


def test_a_probe_tells_classes_apart_that_pixels_tell_apart(checkpoint, data, monkeypatch):
    monkeypatch.setattr(attentive_fit, "MIN_STEPS", 30)
    monkeypatch.setattr(measure, "DRAWS", 2)
    data["x"] = ColouredSource([0, 1, 2] * 20)
    report = probe(checkpoint, "x", attentive=True, per_class=[2], say=silent)
    result = report.result
    assert (result.train_videos, result.test_videos) == (48, 12)
    assert result.classes == ["0", "1", "2"]
    assert result.encoders["pretrained"].linear.accuracy > 0.9
    assert list(result.encoders) == ["pretrained", "random weights", "raw pixels"]
    assert result.encoders["pretrained"].attentive.accuracy > 0.9
    assert result.chance.accuracy == pytest.approx(1 / 3)
    text = report.text()
    assert "pretrained" in text
    assert "majority class" in text
    assert "attentive, pretrained minus raw pixels" in text
    assert "2 labelled videos of each class (2 draws, mean ± standard deviation)" in text
    written = json.loads(json.dumps(report.as_dict()))
    assert written["encoders"]["pretrained"]["linear"]["videos"] == 12
    assert written["encoders"]["raw pixels"]["attentive_choice"]["setting"] in written["protocol"]["attentive"]["grid"]
    assert written["few_labels"][0]["videos"] == [6, 6]
    assert len(written["few_labels"][0]["encoders"]["pretrained"]["attentive"]["accuracies"]) == 2


def test_labels_that_say_nothing_score_chance(checkpoint, data, tmp_path: Path):
    data["x"], data["y"] = ColouredSource([0, 1, 2] * 30), ColouredSource([0, 1, 2] * 80, folder="/else")
    files = data["x"].files + data["y"].files
    draw = np.random.default_rng(0).integers(3, size=len(files))
    table = tmp_path / "labels.csv"
    table.write_text("path,kind\n" + "".join(f"{f},k{k}\n" for f, k in zip(files, draw, strict=True)))
    result = probe(checkpoint, "x", test="y", labels=table, label_column="kind", say=silent).result
    assert result.label == "kind"
    assert list(result.encoders) == ["pretrained", "random weights", "raw pixels"]
    for scores in result.encoders.values():
        for score in (scores.knn, scores.linear):
            assert score.low < 1 / 3 + 0.03
            assert score.high > 1 / 3 - 0.03


def test_the_split_is_by_video_and_by_seed(checkpoint, data):
    source = ColouredSource([0, 1] * 20)
    source.files = [source.files[i // 2 * 2 % 20 + i % 2] for i in range(40)]  # each file gives two episodes
    data["x"] = source
    first, again, other = (probe(checkpoint, "x", seed=s, say=silent).result for s in (0, 0, 1))
    assert first.as_dict() == again.as_dict()
    assert (first.train_videos, first.test_videos) == (16, 4)
    assert (first.train_clips, first.test_clips) == (32, 8)
    assert first.encoders["pretrained"].linear.videos == 4
    assert other.test_videos == 4


def test_test_data_of_ones_own_is_used_whole(checkpoint, data):
    data["x"], data["y"] = ColouredSource([0, 1] * 6), ColouredSource([0, 1] * 4, folder="/else")
    result = probe(checkpoint, "x", test="y", say=silent).result
    assert (result.train_videos, result.test_videos) == (12, 8)


def test_a_video_on_both_sides_is_refused_by_name(checkpoint, data):
    data["x"], data["y"] = ColouredSource([0, 1] * 6), ColouredSource([0, 1] * 4, folder="/else")
    data["y"].files[3] = data["x"].files[5]
    with pytest.raises(UserError, match=r"/data/005\.mp4 is in both /data and /else"):
        probe(checkpoint, "x", test="y", say=silent)


def test_unnamed_episodes_of_two_stores_are_not_the_same_video(checkpoint, data):
    data["x"], data["y"] = ColouredSource([0, 1] * 6), ColouredSource([0, 1] * 4, folder="/else")
    for source in data.values():
        source.files = [f"episode {i}" for i in range(len(source.files))]
    assert video_names(data["x"])[0] == "/data#episode 0"
    assert probe(checkpoint, "x", test="y", say=silent).result.test_videos == 8


def test_sources_agree_on_labels_by_name_and_not_by_number(checkpoint, data):
    data["x"], data["y"] = ColouredSource([0, 1] * 10), ColouredSource([0, 1] * 5, folder="/else")
    data["x"].label_names, data["y"].label_names = ["red", "green"], ["green", "red"]
    result = probe(checkpoint, "x", test="y", say=silent).result
    # Pixels follow the number and names are swapped, so what was learnt answers wrongly every time.
    assert result.encoders["pretrained"].linear.right == 0
    data["y"].label_names = ["green", "blue"]
    with pytest.raises(UserError, match="class 'blue' is in /else and not in /data"):
        probe(checkpoint, "x", test="y", say=silent)


def test_refusals_come_before_the_encoder_runs(checkpoint, data, monkeypatch):
    monkeypatch.setattr(room, "frozen_features", lambda *_a, **_k: pytest.fail("the encoder ran"))
    cases = {
        "no labels to probe": [-1] * 20,
        "needs two classes": [0] * 20,
        "needs at least 10": [0, 1] * 4,
        "needs 3 of each": [0] * 15 + [1] * 2,
    }
    for reason, labels in cases.items():
        data["x"] = ColouredSource(labels)
        with pytest.raises(UserError, match=reason):
            probe(checkpoint, "x", say=silent)
    data["x"] = ColouredSource([0, 1] * 10)
    with pytest.raises(UserError, match="--label-column kind needs --labels"):
        probe(checkpoint, "x", label_column="kind", say=silent)


def test_unlabelled_and_unreadable_videos_take_no_part(checkpoint, data):
    data["x"] = ColouredSource([0, 1] * 10 + [2] * 5)
    data["x"].labels[20:] = -1
    data["x"].unreadable = {0}
    said: list[str] = []
    result = probe(checkpoint, "x", say=said.append).result
    assert result.train_videos + result.test_videos == 19
    assert any("1 clip could not be read" in line for line in said)


def test_a_video_reached_through_a_link_is_the_same_video(checkpoint, data, tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    data["x"] = ColouredSource([0, 1] * 6, folder=str(tmp_path / "real"))
    data["y"] = ColouredSource([0, 1] * 4, folder=str(tmp_path / "link"))
    with pytest.raises(UserError, match=r"real/000\.mp4 and 7 more are in both"):
        probe(checkpoint, "x", test="y", say=silent)
    # One video under two names stays on one side of the automatic split.
    data["x"].files[6:] = [str(tmp_path / "link" / Path(file).name) for file in data["x"].files[:6]]
    with pytest.raises(UserError, match="has 6 labelled videos"):
        probe(checkpoint, "x", say=silent)
    assert len(set(video_names(data["x"]))) == 6


def test_a_class_of_which_nothing_can_be_read_is_a_refusal(checkpoint, data):
    data["x"], data["y"] = ColouredSource([0, 1] * 6 + [2] * 3), ColouredSource([0, 1, 2] * 3, folder="/else")
    data["x"].unreadable = {12, 13, 14}
    for test in ("y", None):
        with pytest.raises(UserError, match="no video of the class '2' in /data could be read"):
            probe(checkpoint, "x", test=test, say=silent)
    data["x"].unreadable = {12}
    with pytest.raises(UserError, match="class '2' of what can be read of /data has 2 videos"):
        probe(checkpoint, "x", test="y", say=silent)


def test_test_data_of_which_nothing_labelled_can_be_read_is_a_refusal(checkpoint, data):
    data["x"], data["y"] = ColouredSource([0, 1] * 6), ColouredSource([0, 1, -1], folder="/else")
    data["y"].unreadable = {0, 1}
    with pytest.raises(UserError, match="no labelled video of /else could be read"):
        probe(checkpoint, "x", test="y", say=silent)


def test_several_clips_and_views_of_a_video_are_one_answer(checkpoint, data):
    data["x"] = ColouredSource([0, 1] * 10, length=12)
    said: list[str] = []
    result = probe(checkpoint, "x", clips_per_video=2, views=3, say=said.append).result
    assert (result.train_videos, result.test_videos) == (16, 4)
    assert (result.train_clips, result.test_clips) == (16 * 6, 4 * 6)
    assert result.encoders["pretrained"].linear.videos == 4
    assert not any("square" in line for line in said)


def test_a_second_probe_takes_its_features_from_the_cache(checkpoint, data, monkeypatch):
    data["x"] = ColouredSource([0, 1] * 10)
    first = probe(checkpoint, "x", say=silent)
    monkeypatch.setattr(ColouredSource, "read", lambda *_: pytest.fail("a frame was read"))
    said: list[str] = []
    again = probe(checkpoint, "x", say=said.append)
    assert again.as_dict() == first.as_dict()
    assert any("features of pretrained, random weights, raw pixels on memory come from the cache" in s for s in said)


def test_without_the_cache_nothing_is_written_and_the_numbers_are_the_same(checkpoint, data, tmp_path: Path):
    data["x"] = ColouredSource([0, 1] * 10)
    assert probe(checkpoint, "x", cached=False, say=silent).as_dict() == probe(checkpoint, "x", say=silent).as_dict()
    assert (tmp_path / "cache" / "features").is_dir()
    written = sorted((tmp_path / "cache").rglob("*"))
    probe(checkpoint, "x", cached=False, seed=1, say=silent)
    assert sorted((tmp_path / "cache").rglob("*")) == written


def test_views_of_square_frames_are_told_to_be_one_picture(checkpoint, data):
    class Square(ColouredSource):
        def read(self, requests):
            return [frames[..., :20] for frames in super().read(requests)]

    data["x"] = Square([0, 1] * 6)
    said: list[str] = []
    probe(checkpoint, "x", views=2, say=said.append)
    assert any("frames of memory are square, so 2 views are one picture: --views 1 is enough" in line for line in said)
