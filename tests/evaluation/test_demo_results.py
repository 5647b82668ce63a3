from __future__ import annotations

import json
from pathlib import Path

import pytest

from marey.config.schema import EncoderConfig
from marey.core.errors import UserError
from marey.core.tokens import kept_count
from marey.evaluation import demo_results as room
from marey.evaluation.demo_results import LabelTable, evaluate, page, summary
from marey.evaluation.run_folder import read_metrics, read_receipt
from marey.evaluation.seen import what_the_encoder_sees
from tests.evaluation.coloured_source import ColouredSource


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = ["step,wall_seconds,clips_seen,train/loss,train/invariance,train/sigreg,train/embedding_rank"]
    rows += ["1,2.0,8,0.9,0.2,20,4", "40,75.0,320,0.5,0.1,9,6.5"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    receipt = {"recipe": {}, "status": "finished", "how_it_ended": "finished after 40 optimizer steps"}
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))
    return tmp_path


def labelled(tmp_path: Path, name: str, source: ColouredSource) -> Path:
    lines = ["path,label,motion"]
    lines += [
        f"{file},{label},{'left' if i % 2 else 'right'}"
        for i, (file, label) in enumerate(zip(source.files, source.labels, strict=True))
    ]
    path = tmp_path / f"{name}.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_finished_run_becomes_its_story(run, checkpoint, monkeypatch):
    sources = {"a": ColouredSource([0, 1, 2] * 8), "b": ColouredSource([0, 1, 2] * 4, folder="/else")}
    monkeypatch.setattr(room, "open_clips", lambda path, _preprocessing: sources[path])
    csvs = [labelled(run, name, source) for name, source in sources.items()]
    results = evaluate(
        run=run,
        checkpoint=checkpoint,
        train="a",
        held_out="b",
        labels=[LabelTable("digit", "label", *csvs), LabelTable("motion", "motion", *csvs)],
        commands=[("look", "marey inspect x")],
        shown=4,
        seed=0,
        say=lambda _: None,
    )
    assert [result.label for result in results.probes] == ["digit", "motion"]
    assert results.probes[0].encoders["pretrained"].linear.videos == 12
    story = results.story
    assert len(story.clips) == 4
    assert {clip.label for clip in story.clips} == {"0", "1", "2"}
    assert story.clips[0].caption.split(", ")[1] in ("left", "right")
    assert "320 clips drawn from 24 videos in 40 steps, 1m15s" in story.lede
    assert story.receipt["how it ended"] == "finished after 40 optimizer steps"
    assert [set(item.found) for item in story.neighbours] == [{"pretrained", "random weights"}] * 3
    shown = page(results)
    assert "What it learned" in shown
    assert all(part in shown for part in ("What its patches mean", "One patch, followed", "Where the summary looks"))
    assert shown.count('class="study"') == 9  # three clips in three kinds of picture
    lines = summary(results, report=run / "report.html", run=run, checkpoint=checkpoint)
    assert len(lines) <= 11
    assert any(line.startswith("  digit") for line in lines)


def test_pictures_tell_what_unlabelled_clips_show(run, checkpoint, monkeypatch):
    """Most training clips carry no label to learn from; that a neighbour shows the same digit is known."""
    sources = {"a": ColouredSource([0, 1, 2] * 8), "b": ColouredSource([0, 1, 2] * 4, folder="/else")}
    monkeypatch.setattr(room, "open_clips", lambda path, _preprocessing: sources[path])
    csvs = [run / "a.csv", run / "b.csv"]
    for csv, source in zip(csvs, sources.values(), strict=True):
        known = zip(source.files, source.labels, strict=True)
        rows = [f"{file},{label if i < 9 else ''},{label}" for i, (file, label) in enumerate(known)]
        csv.write_text("\n".join(["path,label,digit", *rows]) + "\n")
    story = evaluate(
        run=run,
        checkpoint=checkpoint,
        train="a",
        held_out="b",
        labels=[LabelTable("digit", "label", *csvs)],
        commands=[],
        shown=4,
        seed=0,
        say=lambda _: None,
    ).story
    found = [picture for item in story.neighbours for pictures in item.found.values() for picture in pictures]
    assert {picture.label for picture in found} <= {"0", "1", "2"}
    assert all(clip.caption for clip in story.clips)
    assert (story.probes[0].train_videos, story.probes[0].test_videos) == (9, 9)  # a probe learns from labels alone


def test_what_is_shown_of_a_view_is_what_the_loader_ships(content):
    config = EncoderConfig.model_validate(content["marey"]["config"])
    seen = what_the_encoder_sees(config, [ColouredSource([0, 1])])
    tokens = config.model.num_frames * (config.model.img_size // config.model.patch_size) ** 2
    assert (seen.tokens, seen.kept_tokens) == (tokens, kept_count(tokens, config.model.token_drop_rate))
    kept, whole = seen.kept[..., 3] == 255, seen.whole[..., 3] == 255
    assert whole.all()
    assert kept.sum() == seen.kept_tokens * config.model.patch_size**2
    assert (seen.kept[kept] == seen.whole[kept]).all()
    assert len(seen.locals_) == 2


def test_a_run_that_logged_nothing_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        read_metrics(tmp_path / "metrics.csv")
    (tmp_path / "metrics.csv").write_text("step,train/loss\n")
    with pytest.raises(UserError, match="holds no row"):
        read_metrics(tmp_path / "metrics.csv")
    with pytest.raises(UserError, match=r"holds no receipt\.json"):
        read_receipt(tmp_path)
