from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from marey.core.errors import UserError
from marey.evaluation import embed as room
from marey.evaluation.embed import embed
from marey.evaluation.features import clip_features, evaluation_clips, rate_remark, stream_features
from marey.evaluation.loading import load_encoder, random_twin
from tests.evaluation.coloured_source import ColouredSource


@pytest.fixture
def source(monkeypatch):
    made = ColouredSource([0, 1, 2, 0, 1])
    monkeypatch.setattr(room, "open_clips", lambda _path, _preprocessing: made)
    return made


def test_a_row_per_clip_holds_the_cls_output(checkpoint, source, tmp_path):
    done = embed(checkpoint, "memory", tmp_path / "f.parquet", clips_per_video=2, batch_size=3, say=lambda _: None)
    table = pq.read_table(done.path)
    assert table.column_names == ["source", "episode", "clip", "start_step", "start_s", "label", "embedding"]
    assert (done.rows, done.width, len(table)) == (10, 128, 10)
    assert table["clip"].to_pylist() == [0, 1] * 5
    assert table["start_step"].to_pylist() == [0, 4] * 5
    assert table["start_s"].to_pylist() == pytest.approx([0.0, 4 / 15] * 5)
    assert table["label"].to_pylist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]
    assert table["source"].to_pylist()[2] == "/data/001.mp4"
    loaded = load_encoder(checkpoint)
    clips = evaluation_clips(source, loaded.preprocessing, clips_per_episode=2)
    with torch.inference_mode():
        for row in (0, 5, 9):
            want = loaded.encoder(loaded.preprocessing.normalize(clips[row].video))[0, 0]
            assert table["embedding"][row].as_py() == pytest.approx(want.tolist(), abs=2e-5)


def test_an_episode_gives_no_clip_twice(checkpoint, source, tmp_path):
    notes = []
    done = embed(checkpoint, "memory", tmp_path / "f.parquet", clips_per_video=1_000_000, say=notes.append)
    table = pq.read_table(done.path)
    assert table["start_step"].to_pylist() == [0, 1, 2, 3, 4] * 5
    assert table["clip"].to_pylist() == [0, 1, 2, 3, 4] * 5
    assert any("have fewer than 1000000 distinct clips and give each of theirs once: 25 clips" in n for n in notes)


def test_a_row_per_frame_holds_the_mean_of_its_patches(checkpoint, source, tmp_path):
    embed(checkpoint, "memory", tmp_path / "f.parquet", per="frame", batch_size=2, say=lambda _: None)
    table = pq.read_table(tmp_path / "f.parquet")
    assert table["frame"].to_pylist() == [0, 1, 2, 3] * 5
    assert table["start_step"].to_pylist()[:4] == [2, 3, 4, 5]
    loaded = load_encoder(checkpoint)
    clips = evaluation_clips(source, loaded.preprocessing, clips_per_episode=1)
    with torch.inference_mode():
        tokens = loaded.encoder(loaded.preprocessing.normalize(clips[3].video))[0, 1:]
    per_frame = tokens.reshape(4, 4, -1).mean(dim=1)  # 2 x 2 patches a frame
    assert np.allclose(np.array(table["embedding"].to_pylist()[12:16]), per_frame.numpy(), atol=2e-5)


def test_both_formats_hold_the_same(checkpoint, source, tmp_path):
    source.rate = None
    for per in ("clip", "frame"):
        for suffix in ("parquet", "safetensors"):
            embed(checkpoint, "memory", tmp_path / f"{per}.{suffix}", per=per, batch_size=2, say=lambda _: None)
        table = pq.read_table(tmp_path / f"{per}.parquet")
        with safe_open(tmp_path / f"{per}.safetensors", "pt") as file:
            assert set(file.keys()) == set(table.column_names)
            assert np.array_equal(
                file.get_tensor("embedding").numpy(), np.array(table["embedding"].to_pylist(), np.float32)
            )
            assert file.get_tensor("start_step").tolist() == table["start_step"].to_pylist()
            assert file.get_tensor("start_s").isnan().all()
            files = json.loads(file.metadata()["sources"])
            assert [files[i] for i in file.get_tensor("source").tolist()] == table["source"].to_pylist()
            assert json.loads(file.metadata()["marey"])["weights"] == "ema"
        assert table["start_s"].to_pylist() == [None] * len(table)
        assert json.loads(table.schema.metadata[b"marey"])["per"] == per


def test_features_do_not_depend_on_batch_mates(checkpoint, source):
    loaded = load_encoder(checkpoint)
    clips = evaluation_clips(source, loaded.preprocessing, clips_per_episode=2)
    encoders = {"a": loaded.encoder, "b": random_twin(loaded)}
    alone, together = (clip_features(encoders, loaded.preprocessing, clips, batch_size=size) for size in (1, 10))
    for name in encoders:
        assert np.allclose(alone.values[name], together.values[name], atol=2e-5)
    assert not np.allclose(alone.values["a"], alone.values["b"], atol=1e-2)


def test_a_clip_that_cannot_be_read_has_no_row_and_is_told(checkpoint, source, tmp_path):
    source.unreadable = {1}
    said: list[str] = []
    done = embed(checkpoint, "memory", tmp_path / "f.parquet", batch_size=1, say=said.append)
    assert done.rows == 4
    assert any("1 clip could not be read" in line and "001.mp4" in line for line in said)
    source.unreadable = {0, 1, 2, 3, 4}
    with pytest.raises(UserError, match="no clip of /data could be read"):
        embed(checkpoint, "memory", tmp_path / "g.parquet", say=lambda _: None)
    assert not (tmp_path / "g.parquet").exists()


def test_an_episode_shorter_than_a_clip_is_kept_and_told(checkpoint, source, tmp_path):
    source.lengths[2] = 2
    said: list[str] = []
    embed(checkpoint, "memory", tmp_path / "f.parquet", per="frame", say=said.append)
    assert any("1 of 5 episodes of memory are shorter than a clip" in line for line in said)
    steps = pq.read_table(tmp_path / "f.parquet")["start_step"].to_pylist()
    assert steps[8:12] == [0, 1, 1, 1]


def test_another_frame_rate_than_in_training_is_told(checkpoint):
    preprocessing = load_encoder(checkpoint).preprocessing
    assert "15" in (rate_remark(ColouredSource([0], rate=30.0), preprocessing) or "")
    assert rate_remark(ColouredSource([0], rate=15.0), preprocessing) is None
    assert rate_remark(ColouredSource([0], rate=None), preprocessing) is None


def test_features_that_are_not_finite_are_refused(checkpoint, source):
    loaded = load_encoder(checkpoint)
    loaded.encoder.norm.weight.data[:] = torch.nan
    clips = evaluation_clips(source, loaded.preprocessing, clips_per_episode=1)
    with pytest.raises(UserError, match="not finite"):
        list(stream_features({"encoder": loaded.encoder}, loaded.preprocessing, clips))


def test_an_existing_file_is_replaced_only_when_asked(checkpoint, source, tmp_path):
    out = tmp_path / "f.parquet"
    out.write_text("mine")
    with pytest.raises(UserError, match="exists already; give --overwrite"):
        embed(checkpoint, "memory", out, say=lambda _: None)
    assert out.read_text() == "mine"
    embed(checkpoint, "memory", out, overwrite=True, say=lambda _: None)
    assert len(pq.read_table(out)) == 5
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


@pytest.mark.parametrize(
    ("out", "options", "reason"),
    [
        ("f.csv", {}, "must end in .parquet or .safetensors"),
        ("", {}, "must end in"),
        ("f.parquet", {"per": "video"}, "--per video"),
        ("f.parquet", {"clips_per_video": 0}, "--clips-per-video 0"),
        ("f.parquet", {"device": "abacus"}, "--device abacus"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(checkpoint, source, tmp_path, out, options, reason):
    with pytest.raises(UserError, match=reason):
        embed(checkpoint, "memory", tmp_path / out, say=lambda _: None, **options)
