"""Patches resampled alone are the patches of the resized picture, whatever the sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from marey.config.compose import load_config
from marey.core.keys import rng
from marey.core.tokens import grid_positions, keep_indices, patchify
from marey.pixels import resample
from marey.pixels.resample import Crop, resample_patches
from marey.pixels.views import draw_view


def noise(seed: int, frames: int, height: int, width: int, *, hard: bool) -> torch.Tensor:
    """uint8 ``[T, 3, H, W]``; ``hard``: black and white alone, where the cubic overshoots most."""
    values = rng(seed, "test").integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return torch.from_numpy((values > 127) * np.uint8(255) if hard else values).permute(0, 3, 1, 2)


def cut_from_the_whole(
    frames: torch.Tensor, crop: Crop, keep: torch.Tensor, *, size: int, patch: int, tubelet: int, mirror: bool
) -> torch.Tensor:
    """By torchvision alone: uint8 ``[K, P]``."""
    whole = functional.resized_crop(
        frames, *crop, [size, size], interpolation=InterpolationMode.BICUBIC, antialias=True
    )
    whole = functional.hflip(whole) if mirror else whole
    return patchify(whole.movedim(1, 0)[None], patch=patch, tubelet=tubelet)[0, keep]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, int, Crop]:
    height, width = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    tall, wide = draw(st.integers(1, height)), draw(st.integers(1, width))
    return height, width, Crop(draw(st.integers(0, height - tall)), draw(st.integers(0, width - wide)), tall, wide)


@given(
    box=boxes(),
    grid=st.sampled_from([(32, 8), (48, 16), (24, 4), (16, 16), (6, 2)]),
    tubelet=st.sampled_from([1, 2]),
    mirror=st.booleans(),
    hard=st.booleans(),
    interleaved=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_patches_resampled_alone_are_those_of_the_resized_picture(
    box: tuple[int, int, Crop],
    grid: tuple[int, int],
    tubelet: int,
    mirror: bool,
    hard: bool,
    interleaved: bool,
    seed: int,
) -> None:
    (height, width, crop), (size, patch) = box, grid
    frames = noise(seed, 2, height, width, hard=hard)
    frames = frames if interleaved else frames.contiguous()
    positions = grid_positions((2 // tubelet, size // patch, size // patch))
    keep = torch.from_numpy(np.sort(rng(seed, "keep").permutation(len(positions))[: 1 + len(positions) // 4]))
    shape = {"size": size, "patch": patch, "tubelet": tubelet, "mirror": mirror}
    want = cut_from_the_whole(frames, crop, keep, **shape)
    with pytest.MonkeyPatch.context() as patched:
        for dear in (0, 10**9):  # patch by patch however many there are, and never
            patched.setattr(resample, "DEAR", dear)
            got = resample_patches(frames, crop, positions[keep], **shape)
            assert got.dtype == torch.uint8
            assert got.shape == (len(keep), 3, tubelet, patch, patch)
            assert torch.equal(got.flatten(1), want)


@pytest.mark.parametrize(
    ("source", "size"),
    [(900, 96), (1300, 224), (2000, 32), (97, 96), (96, 96), (95, 96), (1, 32), (2, 224)],
)
def test_sums_are_exact_however_much_a_picture_shrinks(source: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resample, "DEAR", 0)
    for crop in (Crop(0, 0, source, 5), Crop(0, 0, 5, source)):
        frames = noise(source, 1, crop.height, crop.width, hard=True)
        positions = grid_positions((1, size // 16, size // 16))
        shape = {"size": size, "patch": 16, "tubelet": 1, "mirror": False}
        got = resample_patches(frames, crop, positions, **shape)
        want = cut_from_the_whole(frames, crop, torch.arange(len(positions)), **shape)
        assert torch.equal(got.flatten(1), want)


def test_at_the_published_drop_rate_no_picture_is_resized_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([])
    whole: list[Crop] = []
    original = resample.crop_and_resize

    def counted(frames: torch.Tensor, crop: Crop, size: int) -> torch.Tensor:
        whole.append(crop)
        return original(frames, crop, size)

    monkeypatch.setattr(resample, "crop_and_resize", counted)
    frames = noise(0, 16, 384, 682, hard=False)

    def resized(drop_rate: float) -> int:
        whole.clear()
        for view in range(config.augmentation.local_crops_number + 1):
            size = config.augmentation.local_size if view else config.model.img_size
            positions = grid_positions((16, size // 16, size // 16))
            keep = keep_indices(len(positions), drop_rate, seed=0, epoch=0, position=0, view=view)
            draw = draw_view(384, 682, config.augmentation, seed=0, epoch=0, position=0, view=view)
            resample_patches(frames, draw.crop, positions[keep], size=size, patch=16, tubelet=1, mirror=draw.hflip)
        return len(whole)

    assert resized(config.model.token_drop_rate) == 0
    assert resized(0.0) == 11  # patch by patch would cost more
