from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.latents.codecs import PatchCodec, build_codec, latent_frames, register


def frames(t: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (t, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_patches_invert_exactly_even_through_half_precision(p: int, t: int, rows: int, columns: int, seed: int) -> None:
    video = frames(t, rows * p, columns * p, seed)
    codec = PatchCodec(patch=p)
    latents = codec.encode(video)
    assert latents.shape == (3 * p * p, t, rows, columns)
    assert torch.equal(codec.decode(latents), video)
    assert torch.equal(codec.decode(latents.to(torch.float16)), video)


def test_a_patch_channel_is_one_pixel_of_the_block() -> None:
    video = frames(2, 4, 6)
    latents = PatchCodec(patch=2).encode(video)
    for colour in range(3):
        for row in range(2):
            for column in range(2):
                pixels = video[:, colour, row::2, column::2].float() / 127.5 - 1
                torch.testing.assert_close(latents[colour * 4 + row * 2 + column], pixels, rtol=0, atol=1e-6)


def test_decoding_clamps_what_a_pixel_cannot_hold() -> None:
    assert PatchCodec(patch=1).decode(torch.tensor([-9.0, 0.0, 9.0]).reshape(3, 1, 1, 1)).flatten().tolist() == [
        0,
        128,
        255,
    ]


def test_a_canvas_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="9x8 pixels do not divide into cells of 4"):
        PatchCodec(patch=4).encode(frames(2, 9, 8))


def test_unknown_codecs_and_options_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean patch"):
        build_codec("pach")
    with pytest.raises(UserError, match="codec patch cannot be made"):
        build_codec("patch", {"size": 3})
    with pytest.raises(UserError, match="patch=0"):
        build_codec("patch", {"patch": 0})
    with pytest.raises(UserError, match=r"holds no config.json"):
        build_codec("wan", {"path": "/nowhere"})


def test_patches_scaled_by_their_own_pixels_have_unit_variance_and_still_invert() -> None:
    video = frames(4, 16, 24) // 3
    mean, std = float(video.float().mean()) / 255, float(video.float().std()) / 255
    codec = build_codec("patch", {"patch": 8, "mean": mean, "std": std})
    latents = codec.encode(video)
    assert latents.mean().abs() < 1e-5
    assert latents.std() == pytest.approx(1, abs=1e-5)
    assert torch.equal(codec.decode(latents.half()), video)
    assert codec.fingerprint != build_codec("patch", {"patch": 8}).fingerprint
    with pytest.raises(UserError, match=r"mean=2 and std=0\.5 are of pixels"):
        build_codec("patch", {"mean": 2})


def test_a_codec_of_an_installed_package_is_found_by_its_entry_point() -> None:
    with pytest.raises(UserError, match=r"encoder cannot be made from \{\}: .*path"):
        build_codec("encoder")
    with pytest.raises(UserError, match="did you mean encoder"):
        build_codec("encodr")


def test_a_codec_can_be_added_without_touching_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marey.latents.codecs._FACTORIES", {})
    register("mine", lambda **options: PatchCodec(patch=options["size"]))
    assert build_codec("mine", {"size": 3}).channels == 27


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    diffusers: Any = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.5, -1.0, 0.0, 2.0],
        latents_std=[1.0, 2.0, 0.5, 4.0],
    )
    folder = tmp_path_factory.mktemp("wan")
    model.save_pretrained(folder)
    return folder


def test_wan_latents_are_the_normalised_mode_of_a_causal_autoencoder(wan_folder: Path) -> None:
    codec = build_codec("wan", {"path": str(wan_folder)})
    assert (codec.channels, codec.spatial, codec.temporal) == (4, 8, 4)
    video = frames(9, 16, 24)
    latents = codec.encode(video)
    assert latents.shape == (4, 3, 2, 3)
    assert latent_frames(9, codec) == 3
    assert torch.equal(latents, codec.encode(video))

    diffusers: Any = importlib.import_module("diffusers")
    model = diffusers.AutoencoderKLWan.from_pretrained(str(wan_folder), low_cpu_mem_usage=False).eval()
    with torch.no_grad():
        mode = model.encode(video.permute(1, 0, 2, 3)[None] / 127.5 - 1).latent_dist.mode()[0]
    mean, std = torch.tensor([0.5, -1.0, 0.0, 2.0]), torch.tensor([1.0, 2.0, 0.5, 4.0])
    torch.testing.assert_close(latents, (mode - mean.view(-1, 1, 1, 1)) / std.view(-1, 1, 1, 1))
    changed = video.clone()
    changed[5:] = 255 - changed[5:]
    torch.testing.assert_close(codec.encode(changed)[:, :2], latents[:, :2])


def test_wan_decodes_to_the_frames_it_was_given(wan_folder: Path) -> None:
    codec = build_codec("wan", {"path": str(wan_folder)})
    decoded = codec.decode(torch.zeros(4, 3, 2, 3))
    assert decoded.shape == (9, 3, 16, 24)
    assert decoded.dtype == torch.uint8
    assert codec.fingerprint == build_codec("wan", {"path": str(wan_folder)}).fingerprint


def test_a_damaged_wan_folder_is_refused(wan_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((wan_folder / "config.json").read_bytes())
    with pytest.raises(UserError, match="not a readable AutoencoderKLWan"):
        build_codec("wan", {"path": str(tmp_path)})
    with pytest.raises(UserError, match="dtype=int8"):
        build_codec("wan", {"path": str(wan_folder), "dtype": "int8"})
