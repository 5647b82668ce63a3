from __future__ import annotations

import json
import re
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from marey import cli
from marey.core.errors import UserError
from marey.evaluation.causal_loading import load_causal
from marey.evaluation.films import moving_uri, side_by_side
from marey.evaluation.latent_sample import CodecChoice, LatentClip, Split, open_candidates
from marey.evaluation.rolling import COPY, PREDICTION, STILL, measure
from marey.evaluation.rollout import roll_out, rollout_text, write_rollouts
from marey.latents.codec_record import record_codec
from marey.latents.codecs import PatchCodec
from marey.latents.manifest import read_manifest
from marey.objectives.rollout import SamplerSettings, rollout

from .causal_cases import PATCH, Moving, causal_checkpoint, encoded, small_config, write_store


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return encoded(tmp_path / "latents")


@pytest.fixture
def checkpoint(tmp_path: Path, manifest: Path) -> Path:
    return causal_checkpoint(tmp_path / "last.ckpt", f"data.train={manifest}")


def a_clip(known: int = 3, horizon: int = 4, codec: PatchCodec | None = None) -> LatentClip:
    latents = PatchCodec(patch=PATCH).encode(Moving().frames(0)[: known + horizon])
    return LatentClip("c", latents, Split(known, horizon), None, 15.0, codec, True)


def test_errors_are_those_of_the_definitions():
    clip = a_clip(codec=PatchCodec(patch=PATCH))
    guess = clip.latents[:, 3:] + 0.25
    result = measure(clip, guess)
    x = clip.latents.double().numpy()
    assert result.errors[PREDICTION] == pytest.approx([0.0625] * 4, rel=1e-6)
    assert result.errors[STILL] == pytest.approx([((x[:, 2] - x[:, t]) ** 2).mean() for t in range(3, 7)])
    assert result.errors[COPY] == pytest.approx([((x[:, t - 1] - x[:, t]) ** 2).mean() for t in range(3, 7)])
    frames = Moving().frames(0)[:7].double().numpy() / 255
    assert result.pixel_errors is not None
    assert result.pixel_errors[STILL] == pytest.approx([((frames[2] - frames[t]) ** 2).mean() for t in range(3, 7)])
    assert result.pixel_errors[COPY] == pytest.approx([((frames[t - 1] - frames[t]) ** 2).mean() for t in range(3, 7)])
    assert result.known_pictures == 3


def test_the_patch_codec_shows_the_very_frames():
    clip = a_clip(codec=PatchCodec(patch=PATCH))
    result = measure(clip, clip.latents[:, 3:])
    assert torch.equal(result.target_pictures, Moving().frames(0)[:7])
    assert torch.equal(result.predicted_pictures, result.target_pictures)
    assert result.pixel_errors is not None
    assert result.pixel_errors[PREDICTION] == [0.0] * 4


class PairCodec(PatchCodec):
    """Every latent frame after the first stands for two frames, as a temporal autoencoder's does."""

    temporal = 2

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        once = super().decode(latents)
        return torch.cat((once[:1], once[1:].repeat_interleave(2, dim=0)))


def test_frames_that_a_latent_frame_stands_for_are_counted():
    clip = a_clip(codec=PairCodec(patch=PATCH))
    result = measure(clip, clip.latents[:, 3:])
    assert len(result.target_pictures) == 1 + 2 * 6
    assert result.known_pictures == 5
    assert result.pixel_errors is not None
    assert len(result.pixel_errors[STILL]) == 8


def test_latents_of_an_unnamed_codec_are_shown_as_colours_and_have_no_pixel_error():
    result = measure(a_clip(codec=None), a_clip().latents[:, 3:] + 1)
    assert result.pixel_errors is None
    assert "nothing names" in result.decoded_by
    assert torch.equal(result.target_pictures[:3], result.predicted_pictures[:3])
    assert not torch.equal(result.target_pictures[3:], result.predicted_pictures[3:])


def test_a_rollout_is_of_a_held_out_clip_and_what_the_sampler_gives(checkpoint: Path, manifest: Path):
    loaded, (item,) = roll_out(checkpoint, steps=3, seed=5, device="cpu")
    rows = read_manifest(manifest)
    held = {f"latents/{rows.clip(row).clip_id}" for row in np.flatnonzero(rows.validation_rows(0.3))}
    assert item.clip.name in held
    assert item.clip.held_out
    assert item.clip.split == Split(2, 4)
    direct = rollout(
        loaded.program,
        item.clip.latents[:, :2],
        horizon=4,
        geometries=loaded.config.data.buckets,
        settings=SamplerSettings(steps=3, seed=5),
    )
    assert torch.equal(item.predicted, direct)
    _, (again,) = roll_out(checkpoint, steps=3, seed=5, device="cpu")
    assert torch.equal(again.predicted, item.predicted)
    assert item.pixel_errors is not None  # the run's own codec made these latents


def test_a_horizon_beyond_training_is_reached_by_feeding_back(checkpoint: Path):
    _, (item,) = roll_out(checkpoint, prefix=3, horizon=9, steps=2, device="cpu")
    assert item.predicted.shape[1] == 9
    assert len(item.errors[PREDICTION]) == 9


def test_a_clip_can_be_named_and_says_when_training_saw_it(checkpoint: Path, manifest: Path):
    rows = read_manifest(manifest)
    seen = rows.clip(int(np.flatnonzero(~rows.validation_rows(0.3))[0])).clip_id
    _, (item,) = roll_out(checkpoint, clip=seen, steps=1, device="cpu")
    assert not item.clip.held_out
    _, (item,) = roll_out(checkpoint, data=str(manifest.parent), clip=seen, steps=1, device="cpu")
    assert item.clip.name.endswith(seen)


def test_files_are_pictures_that_play_and_the_numbers_behind_them(checkpoint: Path, tmp_path: Path):
    loaded, rollouts = roll_out(checkpoint, clips=2, steps=1, device="cpu")
    files = write_rollouts(tmp_path / "out", loaded, rollouts)
    assert len(files) == len(set(files)) == 7
    with av.open(str(tmp_path / "out" / "rollout-001.mp4")) as video:
        pictures = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(pictures) == 6
    with Image.open(tmp_path / "out" / "rollout-001.gif") as gif:
        assert gif.n_frames == 6
        assert gif.size == pictures[0].shape[1::-1]
        assert gif.info["loop"] == 0
    stored = load_file(tmp_path / "out" / "rollout-001.safetensors")
    assert torch.equal(stored["prediction"], rollouts[0].predicted)
    report = json.loads((tmp_path / "out" / "rollout.json").read_text())
    assert report["rollouts"][0]["latent_mse"][STILL]["frames"] == rollouts[0].errors[STILL]
    text = rollout_text(loaded, rollouts, files)
    assert "of the still image's" in text
    assert len(text.splitlines()) < 12


def test_target_and_prediction_stand_side_by_side_at_the_same_moment():
    videos = torch.zeros(2, 3, 3, 8, 8, dtype=torch.uint8)
    videos[0, 1], videos[1, 1] = 200, 100
    frames = side_by_side([("a", videos[0]), ("b", videos[1])], known=1)
    assert frames.shape[1] % 2 == frames.shape[2] % 2 == 0
    middle = frames.shape[1] // 2
    assert (frames[1, middle, 10] == 200).all()
    assert (frames[1, middle, -10] == 100).all()
    assert not (frames[0, middle, [10, -10]]).any()
    assert moving_uri(frames, fps=8).startswith("data:image/gif;base64,")


def test_a_store_is_encoded_as_training_encoded_it(tmp_path: Path):
    write_store(tmp_path / "s.lance", Moving())
    path = causal_checkpoint(tmp_path / "a.ckpt", f"data.train={tmp_path / 's.lance'}")
    loaded, (item,) = roll_out(path, steps=1, device="cpu")
    (candidates,) = open_candidates(loaded.config, data=None, lead=0, chosen=None)
    assert len(candidates.rows) < len(candidates.ids)
    episode = int(item.clip.name.rsplit("-", 1)[-1])
    assert episode in candidates.rows
    assert (item.target_pictures.float() - Moving().frames(episode)[:6].float()).abs().mean() < 4  # JPEG


def test_a_chunked_program_starts_from_one_frame(tmp_path: Path, manifest: Path):
    words = ["program.name=chunked_conditioned", "data.batching.mode=strict", "program.chunk_size=[1,2]"]
    path = causal_checkpoint(tmp_path / "c.ckpt", f"data.train={manifest}", *words)
    _, (item,) = roll_out(path, steps=1, device="cpu")
    assert item.clip.split == Split(1, 6)
    with pytest.raises(UserError, match="one condition frame"):
        roll_out(path, prefix=2, device="cpu")


def test_text_is_the_clips_own_or_the_one_given(tmp_path: Path):
    manifest = encoded(tmp_path / "t", texts=True)
    words = ["data.text_conditioning=task_prompt", "data.text.width=6", "program.text_dropout=0.1"]
    path = causal_checkpoint(tmp_path / "t.ckpt", f"data.train={manifest}", *words, text_channels=6)
    _, (own,) = roll_out(path, steps=2, device="cpu")
    _, (same,) = roll_out(path, steps=2, text=own.clip.text, device="cpu")
    _, (other,) = roll_out(path, steps=2, text="something else entirely", device="cpu")
    _, (guided,) = roll_out(path, steps=2, guidance=3.0, device="cpu")
    assert torch.equal(own.predicted, same.predicted)
    assert not torch.equal(own.predicted, other.predicted)
    assert not torch.equal(own.predicted, guided.predicted)
    silent = encoded(tmp_path / "silent")
    with pytest.raises(UserError, match="give --text"):
        roll_out(path, data=str(silent), device="cpu")


def test_the_slow_average_is_taken_where_there_is_one(tmp_path: Path, manifest: Path):
    online = causal_checkpoint(tmp_path / "o.ckpt", f"data.train={manifest}")
    state = torch.load(online, weights_only=True)["state_dict"]
    slow = {key: value * 2 for key, value in state.items() if key.startswith("model.")}
    path = causal_checkpoint(tmp_path / "e.ckpt", f"data.train={manifest}", state_dict_ema=slow)
    name = "final.proj.weight"
    assert torch.equal(load_causal(path).program.model.state_dict()[name], slow[f"model.{name}"])
    assert torch.equal(load_causal(path, weights="online").program.model.state_dict()[name], state[f"model.{name}"])
    with pytest.raises(UserError, match="--weights online"):
        load_causal(online, weights="ema")
    about = torch.load(path, weights_only=True)["marey"]
    about["keys"] = {"state_dict": "online", "slow": "a slow copy"}  # as ema.save_key=slow writes it
    path = causal_checkpoint(tmp_path / "s.ckpt", f"data.train={manifest}", slow=slow, marey=about)
    assert torch.equal(load_causal(path).program.model.state_dict()[name], slow[f"model.{name}"])


def test_the_codec_is_the_recorded_one_the_runs_own_or_the_one_named(tmp_path: Path, manifest: Path):
    foreign = small_config(f"data.train={manifest}", "data.codec.options={patch: 2}")
    (candidates,) = open_candidates(foreign, data=None, lead=0, chosen=None)
    row, split = int(candidates.rows[0]), Split(1, 3)
    assert candidates.read.load(row, split).codec is None
    record_codec(manifest.parent, "patch", {"patch": PATCH})
    codec = candidates.read.load(row, split).codec
    assert codec is not None
    assert codec.fingerprint == PatchCodec(patch=PATCH).fingerprint
    (candidates,) = open_candidates(foreign, data=None, lead=0, chosen=CodecChoice("patch", {"patch": 1}))
    codec = candidates.read.load(row, split).codec
    assert codec is not None
    assert codec.spatial == 1


def test_what_cannot_be_rolled_out_is_refused(tmp_path: Path, checkpoint: Path, manifest: Path):
    with pytest.raises(UserError, match=r"is not a clip of latents"):
        roll_out(checkpoint, clip="nobody", device="cpu")
    with pytest.raises(UserError, match=r"needs \(the longest has 12\)"):
        roll_out(checkpoint, horizon=40, device="cpu")
    with pytest.raises(UserError, match="text_conditioning=disabled"):
        roll_out(checkpoint, text="hello", device="cpu")
    with pytest.raises(UserError, match="guidance 2"):
        roll_out(checkpoint, guidance=2, device="cpu")
    with pytest.raises(UserError, match=r"none.csv"):
        roll_out(checkpoint, data=str(tmp_path / "none.csv"), device="cpu")
    content = torch.load(checkpoint, weights_only=True)
    torch.save({**content, "marey": {**content["marey"], "kind": "encoder"}}, tmp_path / "enc.ckpt")
    with pytest.raises(UserError, match="kind 'encoder', which predicts no video"):
        roll_out(tmp_path / "enc.ckpt", device="cpu")
    broken = {key: value for key, value in content["state_dict"].items() if "final.proj" not in key}
    torch.save({**content, "state_dict": broken}, tmp_path / "part.ckpt")
    with pytest.raises(UserError, match="do not fit the model"):
        roll_out(tmp_path / "part.ckpt", device="cpu")
    other = tmp_path / "other"
    from marey.latents.encode import encode

    encode(Moving(), other, PatchCodec(patch=2))
    with pytest.raises(UserError, match=r"12 latent channels and .* was trained on 48"):
        roll_out(checkpoint, data=str(other / "manifest.csv"), device="cpu")
    spoilt = {key: value * float("nan") for key, value in content["state_dict"].items()}
    torch.save({**content, "state_dict": spoilt}, tmp_path / "nan.ckpt")
    with pytest.raises(UserError, match="not finite"):
        roll_out(tmp_path / "nan.ckpt", steps=1, device="cpu")
    (tmp_path / "file").write_text("")
    loaded, rollouts = roll_out(checkpoint, steps=1, device="cpu")
    with pytest.raises(UserError, match="is a file"):
        write_rollouts(tmp_path / "file", loaded, rollouts)


@pytest.mark.parametrize(("out", "why"), [("file", "is a file; name a folder"), ("/proc/nope", "cannot be written")])
def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, why: str
):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        cli.main(["rollout", str(tmp_path / "no checkpoint"), "--out", str(tmp_path / out)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert why in said


def test_fewer_clips_than_asked_for_are_said_to_be_fewer(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cli.main(["rollout", str(checkpoint), "--clips", "50", "--steps", "1", "--out", str(tmp_path / "out")])
    assert re.search(r"note +\d of 50 clips asked for", capsys.readouterr().out)
    cli.main(["rollout", str(checkpoint), "--clips", "1", "--steps", "1", "--out", str(tmp_path / "out")])
    assert "asked for" not in capsys.readouterr().out


def test_a_split_that_left_nothing_to_train_on_held_nothing_out(tmp_path: Path):
    path = encoded(tmp_path / "few", count=2)
    content = causal_checkpoint(tmp_path / "few.ckpt", f"data.train={path}", "data.val_fraction=0.99")
    with pytest.raises(UserError, match="holds out no clip of"):
        roll_out(content, device="cpu")
    _, (named,) = roll_out(content, device="cpu", clip="moving-000000", steps=1)
    assert not named.clip.held_out
