"""`marey embed --stream`: a row per frame, from what was seen up to it."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from marey import cli
from marey.core.errors import UserError
from marey.evaluation import embed as room
from marey.evaluation.embed import embed
from marey.evaluation.loading import load_encoder
from marey.models.streaming import StreamingEncoder
from marey.pixels.episodes import FrameRequest
from marey.pixels.evalclips import short_side_centre_crop
from tests.evaluation.coloured_source import ColouredSource


@pytest.fixture
def source(monkeypatch):
    made = ColouredSource([0, 1, 2], length=11)
    monkeypatch.setattr(room, "open_clips", lambda _path, _preprocessing: made)
    return made


def changed(write, content, **model):
    """The checkpoint with other settings of the model, of the preprocessing and of time."""
    stride = model.pop("frame_stride", 1)
    config = json.loads(json.dumps(content["marey"]["config"]))
    config["model"].update(model)
    given = dict(content["marey"]["preprocessing"], frame_stride=stride)
    return write(marey=dict(content["marey"], config=config, preprocessing=given))


def frames(loaded, source, episode, steps):
    (read,) = source.read([FrameRequest(episode, np.asarray(steps))])
    cropped = short_side_centre_crop(read, loaded.preprocessing.img_size).movedim(1, 0).unsqueeze(0)
    mean, std = (torch.tensor(x).view(1, 3, 1, 1, 1) for x in (loaded.preprocessing.mean, loaded.preprocessing.std))
    return (cropped.float() / 255.0 - mean) / std


def test_a_row_per_frame_holds_the_cls_output_of_what_was_seen(write, content, source, tmp_path):
    checkpoint = changed(write, content, frame_stride=2)
    done = embed(checkpoint, "memory", tmp_path / "f.parquet", stream=True, say=lambda _: None)
    table = pq.read_table(done.path)
    assert str(done).endswith("18 rows, one per frame, 128 features each")
    assert table["episode"].to_pylist() == [0] * 6 + [1] * 6 + [2] * 6
    assert table["frame"].to_pylist() == [0, 1, 2, 3, 4, 5] * 3
    assert table["start_step"].to_pylist() == [0, 2, 4, 6, 8, 10] * 3
    assert table["start_s"].to_pylist()[:3] == pytest.approx([0, 2 / 15, 4 / 15])
    assert table["label"].to_pylist() == [0] * 6 + [1] * 6 + [2] * 6
    loaded = load_encoder(checkpoint)
    rows = np.array(table["embedding"].to_pylist(), np.float32)
    with torch.inference_mode():
        for seen in range(1, 5):  # a clip has four frames: up to there every row is a full forward pass
            full = loaded.encoder(frames(loaded, source, 1, np.arange(seen) * 2))
            assert np.allclose(rows[6 + seen - 1], full[0, 0].numpy(), atol=2e-5)
    stream = StreamingEncoder(loaded.encoder, positions=4, sliding=True)
    with torch.inference_mode():
        parts = [stream.push(frames(loaded, source, 1, steps)).summary[0] for steps in ([0, 2, 4, 6], [8, 10])]
    assert np.allclose(rows[6:12], torch.cat(parts).numpy(), atol=2e-5)


def test_the_first_frames_are_those_of_the_clip(write, content, source, tmp_path):
    checkpoint = write()
    embed(checkpoint, "memory", tmp_path / "s.safetensors", stream=True, per="frame", say=lambda _: None)
    embed(checkpoint, "memory", tmp_path / "c.parquet", per="frame", clips_per_video=8, say=lambda _: None)
    table = pq.read_table(tmp_path / "c.parquet")
    clip = table.filter((table["clip"].to_numpy() == 0).tolist())
    with safe_open(tmp_path / "s.safetensors", "pt") as file:
        streamed = file.get_tensor("embedding").view(3, 11, 128)[:, :4]
        about = json.loads(file.metadata()["marey"])
    assert np.allclose(streamed.reshape(12, 128).numpy(), np.array(clip["embedding"].to_pylist()), atol=2e-5)
    assert (about["per"], about["stream"]) == ("frame", {"of": "patches", "frames": 4})


def test_an_episode_that_cannot_be_read_is_named_and_the_others_are_there(checkpoint, source, tmp_path):
    source.unreadable = {1}
    notes: list[str] = []
    done = embed(checkpoint, "memory", tmp_path / "f.parquet", stream=True, say=notes.append)
    assert set(pq.read_table(done.path)["episode"].to_pylist()) == {0, 2}
    assert any("1 clip could not be read" in note and "001.mp4" in note for note in notes)


def test_frames_that_fill_no_token_have_no_row(write, content, source, tmp_path):
    kernel = "encoder.patch_embed.proj.weight"
    online = content["state_dict"] | {kernel: content["state_dict"][kernel].repeat(1, 1, 2, 1, 1)}
    config = json.loads(json.dumps(content["marey"]["config"]))
    config["model"]["tubelet_size"] = 2
    given = dict(content["marey"]["preprocessing"], tubelet_size=2)
    about = dict(content["marey"], config=config, preprocessing=given)
    checkpoint = write(state_dict=online, state_dict_ema=None, marey=about)
    source.lengths[2] = 1
    done = embed(checkpoint, "memory", tmp_path / "f.parquet", stream=True, say=lambda _: None)
    table = pq.read_table(done.path)
    assert table["start_step"].to_pylist() == [0, 2, 4, 6, 8] * 2
    assert set(table["episode"].to_pylist()) == {0, 1}
    source.lengths[:] = 1
    with pytest.raises(UserError, match="no episode of /data has 2 frames at stride 1"):
        embed(checkpoint, "memory", tmp_path / "g.parquet", stream=True, say=lambda _: None)


def test_without_rotary_positions_every_clip_starts_again(write, content, source, tmp_path):
    checkpoint = changed(write, content, use_rope=False)
    done = embed(checkpoint, "memory", tmp_path / "f.parquet", stream=True, say=lambda _: None)
    rows = np.array(pq.read_table(done.path)["embedding"].to_pylist(), np.float32)
    loaded = load_encoder(checkpoint)
    with torch.inference_mode():
        for first, row in ((0, 3), (4, 7), (8, 10)):
            full = loaded.encoder(frames(loaded, source, 0, np.arange(first, row + 1)))
            assert np.allclose(rows[row], full[0, 0].numpy(), atol=2e-5)


def test_what_cannot_be_streamed_is_refused(write, content, source, tmp_path, capsys):
    with pytest.raises(UserError, match=r"model\.attn_mode=full cannot be streamed"):
        embed(changed(write, content, attn_mode="full"), "memory", tmp_path / "f.parquet", stream=True)
    words = ["embed", str(write()), "memory", str(tmp_path / "f.parquet"), "--stream", "--clips-per-video", "2"]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "--clips-per-video 2 does not go with --stream" in capsys.readouterr().err
    assert not (tmp_path / "f.parquet").exists()
