"""``augmentation.sparse`` true against false, on camera footage: the same crops, colours within what is stated."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from marey.config.compose import load_config
from marey.config.schema import EncoderConfig, describe, with_later_keys
from marey.core.keys import rng
from marey.core.tokens import grid_positions, keep_indices
from marey.pixels.colour import BRIGHTNESS, CONTRAST, HUE, SATURATION, ColourDraw, contrast_mean, sample_pixels
from marey.pixels.dataset import ClipDataset, build_train_dataset
from marey.pixels.resample import Crop, crop_and_resize
from marey.pixels.views import ViewDraw, draw_view, view_patches
from tests.pixels.conftest import real_clip
from tests.pixels.memory_source import MemorySource

FRAMES = 3
LOCAL: dict[str, Any] = {"size": 96, "patch": 16, "tubelet": 1}
POSITIONS = grid_positions((FRAMES, 6, 6))


@cache
def footage(name: str) -> torch.Tensor:
    """uint8 ``[T, 3, H, W]``, interleaved, short edge 384 at most."""
    with av.open(str(real_clip(name))) as container:
        frames = []
        for number, frame in enumerate(container.decode(video=0)):
            if number % 10 == 0:
                shrink = min(1.0, 384 / min(frame.width, frame.height))
                size = {"width": round(frame.width * shrink), "height": round(frame.height * shrink)}
                frames.append(frame.to_ndarray(format="rgb24", interpolation="AREA", **size))
            if len(frames) == FRAMES:
                break
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)


def clips() -> list[torch.Tensor]:
    return [footage(name) for name in ("bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4")]


def both(frames: torch.Tensor, draw: ViewDraw, tokens: torch.Tensor, **shape: int) -> torch.Tensor:
    """|sparse - whole|, int32 ``[K, P]``."""
    sparse, whole = (view_patches(frames, draw, tokens, **shape, sparse=way).int() for way in (True, False))
    return (sparse - whole).abs()


def local_draws(frames: torch.Tensor, count: int, *, epoch: int = 0, **changes: Any) -> list[ViewDraw]:
    config = load_config([]).augmentation.model_copy(update=changes)
    height, width = frames.shape[-2:]
    return [
        draw_view(height, width, config, seed=3, epoch=epoch, position=number, view=1 + number % 10)
        for number in range(count)
    ]


def test_without_colour_sparse_views_are_the_whole_ones_bit_by_bit() -> None:
    config = load_config([])
    for frames in clips():
        for draw in local_draws(frames, 12, color_jitter_prob=0.0, grayscale_prob=0.0):
            keep = keep_indices(len(POSITIONS), 0.9, seed=0, epoch=0, position=0, view=1)
            assert both(frames, draw, POSITIONS[keep], **LOCAL).max() == 0
        positions = grid_positions((FRAMES, 14, 14))
        keep = keep_indices(len(positions), 0.95, seed=0, epoch=0, position=0, view=0)
        draw = draw_view(*frames.shape[-2:], config.augmentation, seed=3, epoch=0, position=0, view=0)
        assert both(frames, draw, positions[keep], size=224, patch=16, tubelet=1).max() == 0


def test_all_operations_stay_within_what_is_stated() -> None:
    counts, seen = np.zeros(256, np.int64), set()
    for epoch, frames in enumerate(clips()):
        for number, draw in enumerate(local_draws(frames, 40, epoch=epoch)):
            keep = keep_indices(len(POSITIONS), 0.8, seed=0, epoch=0, position=number, view=1)
            counts += np.bincount(both(frames, draw, POSITIONS[keep], **LOCAL).flatten().numpy(), minlength=256)
            seen.add((draw.hflip, draw.colour is not None, draw.grayscale))
    assert len(seen) == 8
    assert counts[6:].sum() == 0
    assert counts[2:].sum() < 5e-3 * counts.sum()
    assert counts[1:].sum() < 5e-2 * counts.sum()


@pytest.mark.parametrize(
    "order",
    [
        (CONTRAST, BRIGHTNESS, SATURATION, HUE),
        (BRIGHTNESS, CONTRAST, SATURATION, HUE),
        (HUE, SATURATION, BRIGHTNESS, CONTRAST),
    ],
)
def test_contrast_alone_moves_a_level_by_one_at_most(order: tuple[int, ...]) -> None:
    """Before it, whatever comes; after it, steps that change nothing but may round."""
    at = order.index(CONTRAST)
    for frames in clips():
        for number, draw in enumerate(local_draws(frames, 6)):
            low, high = rng(number, "test").uniform(0.7, 1.3, 2)
            factors = [1.0, (0.6, 1.4)[number % 2], 1.0, 0.0]
            for step, factor in zip(order[:at], (low, high, 0.05), strict=False):
                factors[step] = 0.05 if step == HUE else factor
            colour = ColourDraw(order, (factors[0], factors[1], factors[2], factors[3]))
            keep = keep_indices(len(POSITIONS), 0.8, seed=0, epoch=0, position=number, view=1)
            plain = draw._replace(colour=colour, grayscale=False)
            difference = both(frames, plain, POSITIONS[keep], **LOCAL)
            assert difference.max() <= 1 + (HUE in order[:at])
            assert (difference > 1).float().mean() < 1e-3


def exact_mean(frames: torch.Tensor, crop: Crop, colour: ColourDraw) -> torch.Tensor:
    whole = crop_and_resize(frames, crop, 96).movedim(1, 0)
    return contrast_mean(whole.to(torch.float32, memory_format=torch.contiguous_format), colour)


def test_the_mean_of_a_sample_is_close_to_the_mean_of_the_view() -> None:
    errors = [
        (contrast_mean(sample_pixels(frames, draw.crop), draw.colour) - exact_mean(frames, draw.crop, draw.colour))
        for frames in clips()
        for draw in local_draws(frames, 40, color_jitter_prob=1.0)
        if draw.colour is not None
    ]
    error = torch.cat(errors).abs()
    assert error.mean() < 0.4
    assert error.max() < 2.5


@pytest.mark.parametrize("period", [2, 3, 4, 5, 8, 16, 50])
@pytest.mark.parametrize("axis", [2, 3])
def test_stripes_do_not_bias_the_mean(period: int, axis: int) -> None:
    shape = [1, 1, 1, 1]
    shape[axis] = 300
    stripes = (torch.arange(300) % period < period / 2).view(shape).expand(1, 3, 300, 300)
    frames = (stripes * 200).to(torch.uint8)
    colour = ColourDraw((CONTRAST, BRIGHTNESS, SATURATION, HUE), (1.0, 0.6, 1.0, 0.0))
    crop = Crop(11, 17, 203, 251)
    exact = frames[:, 0, 11:214, 17:268].float().mean()
    assert abs(contrast_mean(sample_pixels(frames, crop), colour) - exact) < 2


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (39, 40), (40, 41), (300, 500), (30, 500)])
def test_a_sample_is_spread_over_its_crop_and_lies_in_it(size: tuple[int, int]) -> None:
    rows, columns = torch.meshgrid(torch.arange(310), torch.arange(510), indexing="ij")
    frames = torch.stack([rows // 2, columns // 2, 2 * (rows % 2) + columns % 2])[None].to(torch.uint8)
    crop = Crop(5, 3, *size)
    sample = sample_pixels(frames, crop).long()[:, 0]  # [3, n]
    row, column = 2 * sample[0] + sample[2] // 2 - 5, 2 * sample[1] + sample[2] % 2 - 3
    assert sample.shape == (3, min(1597, size[0] * size[1]))
    for places, room in ((row, size[0]), (column, size[1])):
        assert places.min() >= 0
        assert places.max() < room
        shares = places.bincount(minlength=room) / len(places)
        assert (shares - 1 / room).abs().max() <= 1 / len(places)
    if size[0] * size[1] <= 1597:
        assert len((row * size[1] + column).unique()) == size[0] * size[1]


def test_a_patch_does_not_depend_on_which_others_are_kept() -> None:
    frames = footage("bikes.mp4")
    for number, draw in enumerate(local_draws(frames, 4, color_jitter_prob=1.0)):
        every = view_patches(frames, draw, POSITIONS, **LOCAL, sparse=True)
        few = torch.from_numpy(np.sort(rng(number, "test").permutation(len(POSITIONS))[:4]))
        assert torch.equal(view_patches(frames, draw, POSITIONS[few], **LOCAL, sparse=True), every[few])


def dataset(config: EncoderConfig) -> ClipDataset:
    return build_train_dataset(config, [MemorySource([12, 9, 10], size=(60, 80))])


def test_the_key_decides_how_a_dataset_makes_its_patches(tmp_path: Path) -> None:
    sparse, whole = (
        dataset(load_config(["recipe=smoke", f"data.train={tmp_path}", f"augmentation.sparse={way}"]))
        for way in ("true", "false")
    )
    draws = [(0, position, 0, position) for position in range(3)]
    a, b = sparse.__getitems__(draws), whole.__getitems__(draws)
    assert torch.equal(a.clips, b.clips)
    for group, other in ((a.views_global, b.views_global), (a.views_local, b.views_local)):
        assert torch.equal(group.positions, other.positions)
    assert torch.equal(a.views_global.patches, b.views_global.patches)  # cropped and resized alone
    difference = (a.views_local.patches.int() - b.views_local.patches.int()).abs()
    assert 0 < difference.max() <= 4
    for row, (epoch, position) in enumerate((0, p) for p in range(3)):
        frames = sparse.sources[0].read([sparse.request(0, position, epoch, position)])[0]
        draw = draw_view(60, 80, whole.augmentation, seed=0, epoch=0, position=position, view=1)
        tokens = a.views_local.positions[2 * row]
        want = view_patches(frames, draw, tokens, size=32, patch=8, tubelet=1, sparse=False)
        assert torch.equal(b.views_local.patches[2 * row], want)


def test_a_configuration_older_than_the_key_does_not_read_as_sparse() -> None:
    old = describe(load_config(["recipe=smoke"]))
    assert old["augmentation"].pop("sparse") is True
    assert with_later_keys(old, EncoderConfig)["augmentation"]["sparse"] is False
