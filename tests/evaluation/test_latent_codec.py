from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from marey.config.causal import CausalConfig
from marey.config.compose import load_run
from marey.core.errors import UserError
from marey.evaluation.colours import FeatureColours
from marey.evaluation.encoding import encode_store, parse_options
from marey.evaluation.inspect import inspect_text
from marey.evaluation.latent_codec import EncoderCodec
from marey.evaluation.loading import load_encoder
from marey.latents.codecs import build_codec
from marey.latents.manifest import read_manifest
from marey.latents.sidecar import read_shape
from marey.training.latent_store import encoded

from .causal_cases import Moving, write_store


def test_a_latent_frame_is_what_the_encoder_makes_of_that_frame_alone(checkpoint: Path):
    codec = build_codec("encoder", {"path": str(checkpoint), "device": "cpu", "frames_per_pass": 2})
    assert isinstance(codec, EncoderCodec)
    loaded = load_encoder(checkpoint)
    video = Moving().frames(0)[:5]
    latents = codec.encode(video)
    p = loaded.encoder.patch_size
    assert latents.shape == (codec.channels, 5, 16 // p, 16 // p)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1, 1) for v in (loaded.preprocessing.mean, loaded.preprocessing.std))
    with torch.no_grad():
        for t in range(5):
            tokens = loaded.encoder((video[None, t : t + 1].transpose(1, 2) / 255 - mean) / std)[0, 1:]
            torch.testing.assert_close(latents[:, t].flatten(1).T, tokens)
    changed = video.clone()
    changed[3:] = 255 - changed[3:]
    assert torch.equal(codec.encode(changed)[:, :3], latents[:, :3])
    assert not torch.equal(codec.encode(changed)[:, 3:], latents[:, 3:])


def test_an_encoder_of_tubelets_gives_whole_latent_frames(write, content):
    from marey.config.compose import load_config
    from marey.config.schema import describe
    from marey.objectives.registry import build

    from .conftest import SMALL

    config = load_config([*SMALL, "model.tubelet_size=2"])
    about = {**content["marey"], "config": describe(config)}
    about["preprocessing"] = {**about["preprocessing"], "tubelet_size": 2}
    path = write("tubelet.ckpt", state_dict=build(config).state_dict(), state_dict_ema=None, marey=about)
    codec = EncoderCodec(path=str(path), device="cpu")
    assert codec.temporal == 2
    video = Moving().frames(0)[:7]
    latents = codec.encode(video)
    assert latents.shape[1] == 4
    changed = video.clone()
    changed[1:] = 0
    assert torch.equal(codec.encode(changed)[:, :1], latents[:, :1])


def test_the_weights_decide_the_fingerprint(checkpoint: Path):
    slow, online = (EncoderCodec(path=str(checkpoint), weights=name, device="cpu") for name in ("ema", "online"))
    assert slow.fingerprint != online.fingerprint
    assert slow.fingerprint == EncoderCodec(path=str(checkpoint), device="cpu").fingerprint


def test_what_the_codec_cannot_do_is_refused(checkpoint: Path, tmp_path: Path):
    codec = EncoderCodec(path=str(checkpoint), device="cpu")
    with pytest.raises(UserError, match="do not divide into patches"):
        codec.encode(torch.zeros(1, 3, 15, 16, dtype=torch.uint8))
    with pytest.raises(UserError, match="weights=best"):
        build_codec("encoder", {"path": str(checkpoint), "weights": "best"})
    with pytest.raises(UserError, match="does not exist"):
        build_codec("encoder", {"path": str(tmp_path / "none.ckpt")})
    with pytest.raises(UserError, match="cannot be made"):
        build_codec("encoder", {})


def test_one_map_colours_every_video_alike():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(7, 3, 4, 5, generator=g) for _ in range(2))
    colours = FeatureColours.fit(a, cell=2)
    both = colours.decode(torch.cat((a, b), dim=1))
    assert both.shape == (6, 3, 8, 10)
    assert torch.equal(both[:3], colours.decode(a))
    assert torch.equal(both[3:], colours.decode(b))
    assert colours.decode(a).float().std() > 30
    assert (colours.decode(torch.randn(2, 3, 4, 5, generator=g)[:1].expand(7, -1, -1, -1)) >= 0).all()


def test_colours_are_the_strongest_directions():
    g = torch.Generator().manual_seed(1)
    strong, weak = torch.randn(1, 4, 6, 6, generator=g), torch.randn(4, 4, 6, 6, generator=g) * 0.01
    latents = torch.cat((weak[:2], strong * 10, weak[2:]))
    basis = FeatureColours.fit(latents, cell=1).basis
    assert basis[2, 0] == pytest.approx(1, abs=1e-3)
    assert FeatureColours.fit(torch.zeros(2, 2, 1, 1), cell=1).decode(torch.zeros(2, 2, 1, 1)).shape == (2, 3, 1, 1)


def test_a_store_becomes_latents_that_say_what_they_are(tmp_path: Path, checkpoint: Path):
    write_store(tmp_path / "s.lance", Moving(3))
    text = encode_store(str(tmp_path / "s.lance"), tmp_path / "out", options={"patch": 8})
    assert "3 clips" in text
    assert "patch-1 patch=8" in text
    assert "3 of them from an earlier call" in encode_store(
        str(tmp_path / "s.lance"), tmp_path / "out", options={"patch": 8}
    )
    said = inspect_text(tmp_path / "out")
    for words in ("3 of 3 recordings", "36 latent frames, 12 a clip", "2 x 2 (3)", 'patch {"patch": 8}', "held out"):
        assert words in said
    assert inspect_text(tmp_path / "out" / "manifest.csv").splitlines()[1:] == said.splitlines()[1:]
    encode_store(
        str(tmp_path / "s.lance"), tmp_path / "enc", codec="encoder", options={"path": str(checkpoint), "device": "cpu"}
    )
    clip = read_manifest(tmp_path / "enc" / "manifest.csv").clip(0)
    assert read_shape(clip.path, clip="c")[0] == load_encoder(checkpoint).encoder.embed_dim


def test_a_run_can_ask_for_the_latents_of_a_pretrained_encoder(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    write_store(tmp_path / "s.lance", Moving(3))
    asked = load_run(
        [
            f"data.train={tmp_path / 's.lance'}",
            "data.codec.name=encoder",
            f"data.codec.options={{path: {checkpoint}, device: cpu}}",
        ],
        config_name="causal_video",
    )
    assert isinstance(asked, CausalConfig)
    clip = read_manifest(encoded(str(tmp_path / "s.lance"), asked.data)).clip(0)
    assert read_shape(clip.path, clip="c")[0] == load_encoder(checkpoint).encoder.embed_dim


def test_texts_are_joined_by_video_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marey.evaluation.encoding.open_source", lambda path, **_: Moving(2))
    (tmp_path / "t.csv").write_text(f'path,words\n{Path.cwd() / "video 1.mp4"},"up, then down"\n')
    encode_store("moving", tmp_path / "out", options={"patch": 4}, texts=tmp_path / "t.csv", text_column="words")
    assert read_manifest(tmp_path / "out" / "manifest.csv").texts("text") == [None, "up, then down"]


def test_options_are_words_and_numbers():
    assert parse_options(["patch=8", "path=a=b", "n=-2", "std=.25"]) == {
        "patch": 8,
        "path": "a=b",
        "n": -2,
        "std": 0.25,
    }
    with pytest.raises(UserError, match="KEY=VALUE"):
        parse_options(["patch"])


def test_clips_that_were_left_out_are_named_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Spoilt(Moving):
        def read(self, requests: Sequence[Any]) -> list[torch.Tensor]:
            if requests[0][0] in (1, 2):
                raise UserError(f"the frame at episode {requests[0][0]} is not a whole JPEG")
            return super().read(requests)

    monkeypatch.setattr("marey.evaluation.encoding.open_source", lambda *_, **__: Spoilt(4))
    lines = encode_store("moving", tmp_path / "out", options={"patch": 4}).splitlines()
    at = next(i for i, line in enumerate(lines) if "left out" in line)
    assert "2 clips" in lines[at]
    assert "moving-000001: the frame at episode 1 is not a whole JPEG" in lines[at + 1]
    assert "moving-000002: the frame at episode 2 is not a whole JPEG" in lines[at + 2]
