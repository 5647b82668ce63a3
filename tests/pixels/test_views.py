from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from marey.config.schema import AugmentationConfig
from marey.core.keys import rng
from marey.core.tokens import grid_positions, grid_shape, patchify
from marey.pixels.colour import BRIGHTNESS, CONTRAST, SATURATION, ColourDraw, turn_hue
from marey.pixels.resample import Crop, gather_patches
from marey.pixels.views import ViewDraw, draw_crop, draw_view, view_patches
from tests.pixels.memory_source import MemorySource

DEFAULTS: dict[str, Any] = {
    "local_size": 32,
    "local_crops_number": 4,
    "local_crops_scale": (0.02, 0.4),
    "global_crops_scale": (0.8, 1.0),
    "hflip": True,
    "color_jitter_prob": 0.8,
    "grayscale_prob": 0.2,
    "gaussian_blur_prob": 0.0,
    "color_jitter_hue": 0.1,
}


def augmentation(**changes: Any) -> AugmentationConfig:
    return AugmentationConfig(**{**DEFAULTS, **changes})


def clip(frames: int = 4, size: tuple[int, int] = (60, 80), episode: int = 0) -> torch.Tensor:
    source = MemorySource([frames], size=size)
    return torch.stack([source.frame(episode, step) for step in range(frames)])


def reference_view(frames: torch.Tensor, draw: ViewDraw, size: int) -> torch.Tensor:
    """The whole view, by torchvision alone: uint8 ``[T, 3, S, S]``."""
    crop = draw.crop
    x = functional.resized_crop(
        frames.contiguous(),
        crop.top,
        crop.left,
        crop.height,
        crop.width,
        [size, size],
        interpolation=InterpolationMode.BICUBIC,
        antialias=True,
    )
    if draw.hflip:
        x = functional.hflip(x)
    if draw.colour is not None:
        for step in draw.colour.order:
            factor = draw.colour.factors[step]
            if step == BRIGHTNESS:
                x = functional.adjust_brightness(x, factor)
            elif step == CONTRAST:
                x = functional.adjust_contrast(x, factor)
            elif step == SATURATION:
                x = functional.adjust_saturation(x, factor)
            else:
                x = functional.adjust_hue(x, factor)
    if draw.grayscale:
        x = functional.rgb_to_grayscale(x, num_output_channels=3)
    if draw.blur_sigma is not None:
        kernel = 2 * (size // 20) + 1
        x = functional.gaussian_blur(x, [kernel, kernel], [draw.blur_sigma, draw.blur_sigma])
    return x


def reference_patches(
    frames: torch.Tensor, draw: ViewDraw, keep: torch.Tensor, *, size: int, patch: int, tubelet: int
) -> torch.Tensor:
    whole = reference_view(frames, draw, size).movedim(1, 0)[None]
    return patchify(whole, patch=patch, tubelet=tubelet)[0, keep]


@pytest.mark.parametrize("tubelet", [1, 2])
@pytest.mark.parametrize("blur", [0.0, 1.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_not_sparse_are_the_patches_of_the_whole_view_made_by_torchvision(
    tubelet: int, blur: float, interleaved: bool
) -> None:
    config = augmentation(gaussian_blur_prob=blur)
    frames = clip()
    if interleaved:
        frames = frames.contiguous(memory_format=torch.channels_last)
    shape = {"size": 32, "patch": 8, "tubelet": tubelet}
    positions = grid_positions(grid_shape(4, 32, 32, patch=8, tubelet=tubelet))
    for position in range(30):
        draw = draw_view(60, 80, config, seed=0, epoch=0, position=position, view=1 + position % 4)
        keep = torch.from_numpy(np.sort(rng(0, "test", position).permutation(len(positions))[:9]))
        want = reference_patches(frames, draw, keep, **shape)
        got = view_patches(frames, draw, positions[keep], **shape, sparse=False)
        assert got.dtype == torch.uint8
        assert got.shape == want.shape == (9, 3 * tubelet * 64)
        assert torch.equal(got, want)
        # With a blur, which mixes pixels of all patches, sparse or not is the same.
        assert not blur or torch.equal(view_patches(frames, draw, positions[keep], **shape, sparse=True), want)


def test_the_global_view_is_the_crop_alone() -> None:
    config = augmentation(color_jitter_prob=1.0, grayscale_prob=1.0, gaussian_blur_prob=1.0)
    for position in range(50):
        draw = draw_view(60, 80, config, seed=0, epoch=0, position=position, view=0)
        assert draw[1:] == (False, None, False, None)


@pytest.mark.parametrize("share", [-0.5, -0.1, 0.0, 0.03, 0.1, 0.5])
def test_hue_turns_as_torchvision_turns_it(share: float) -> None:
    image = torch.from_numpy(rng(0, "test").integers(0, 256, (2, 3, 64, 64), dtype=np.uint8))
    image[0, :, :8] = image[0, :1, :8]  # greys have no hue
    image[0, 0, 8:12] = image[0, 1, 8:12]  # ties between channels
    image[1, 2, :8] = 255
    got = turn_hue(image.movedim(1, 0).float(), share).movedim(0, 1)
    want = functional.adjust_hue(image, share).float()
    assert (got - want).abs().max() <= 1
    assert torch.equal(got[0, :, :8], image[0, :, :8].float())


def test_all_frames_of_a_still_clip_get_the_same_view() -> None:
    still = clip(1).expand(6, -1, -1, -1)
    positions = grid_positions((6, 4, 4))
    for view in range(5):
        draw = draw_view(60, 80, augmentation(), seed=0, epoch=0, position=3, view=view)
        patches = view_patches(still, draw, positions, size=32, patch=8, tubelet=1).unflatten(0, (6, 16))
        assert torch.equal(patches, patches[:1].expand_as(patches))


def test_a_draw_depends_on_its_address_alone() -> None:
    def draw(**key: int) -> ViewDraw:
        return draw_view(60, 80, augmentation(), **{"seed": 0, "epoch": 0, "position": 0, "view": 1, **key})

    assert draw() == draw()
    different = [draw(**{key: value}) for key in ("seed", "epoch", "position", "view") for value in (2, 3)]
    assert len({draw(), *different}) == 9


def test_another_probability_changes_no_other_number() -> None:
    full = augmentation(color_jitter_prob=1.0, grayscale_prob=1.0, gaussian_blur_prob=1.0)
    none = augmentation(color_jitter_prob=0.0, grayscale_prob=0.0, gaussian_blur_prob=0.0, hflip=False)
    mixed = augmentation()
    for position in range(100):
        a, b, c = (
            draw_view(60, 80, config, seed=0, epoch=0, position=position, view=2) for config in (full, none, mixed)
        )
        assert a.crop == b.crop == c.crop
        assert c.colour in (None, a.colour)
        assert b == ViewDraw(b.crop, False, None, False, None)


def test_shares_of_flip_colour_grey_and_blur_follow_their_probabilities() -> None:
    config = augmentation(gaussian_blur_prob=0.3)
    n = 4000
    draws = [draw_view(60, 80, config, seed=0, epoch=1, position=p, view=1) for p in range(n)]
    for got, probability in (
        (sum(d.hflip for d in draws), 0.5),
        (sum(d.colour is not None for d in draws), 0.8),
        (sum(d.grayscale for d in draws), 0.2),
        (sum(d.blur_sigma is not None for d in draws), 0.3),
    ):
        assert abs(got - n * probability) < 4 * math.sqrt(n * probability * (1 - probability))
    colours = [d.colour for d in draws if d.colour is not None]
    orders = Counter(c.order for c in colours)
    assert len(orders) == 24
    assert max(orders.values()) < 2 * min(orders.values())
    factors = np.array([c.factors for c in colours])
    low, high = np.array([0.6, 0.6, 0.8, -0.1]), np.array([1.4, 1.4, 1.2, 0.1])
    assert (factors >= low).all()
    assert (factors <= high).all()
    np.testing.assert_allclose(factors.mean(0), (low + high) / 2, atol=0.02)
    np.testing.assert_allclose(factors.std(0), (high - low) / math.sqrt(12), rtol=0.05)
    sigmas = [d.blur_sigma for d in draws if d.blur_sigma is not None]
    assert 0.1 <= min(sigmas) < 0.15
    assert 1.95 < max(sigmas) <= 2.0


def test_crops_have_the_area_and_aspect_asked_for() -> None:
    crops = [draw_crop(1000, 1000, (0.02, 0.4), rng(0, "test", i)) for i in range(3000)]
    area = np.array([c.height * c.width for c in crops]) / 1e6
    aspect = np.log([c.width / c.height for c in crops])
    assert area.min() >= 0.0195
    assert area.max() <= 0.405
    np.testing.assert_allclose(area.mean(), 0.21, atol=0.01)
    np.testing.assert_allclose(area.std(), 0.38 / math.sqrt(12), rtol=0.05)
    assert abs(aspect).max() <= math.log(4 / 3) + 0.01
    np.testing.assert_allclose(aspect.mean(), 0, atol=0.02)
    np.testing.assert_allclose(aspect.std(), 2 * math.log(4 / 3) / math.sqrt(12), rtol=0.05)
    lefts = np.array([c.left / (1000 - c.width) for c in crops])
    np.testing.assert_allclose(lefts.mean(), 0.5, atol=0.03)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (100, 400, Crop(0, 133, 100, 133)),  # too wide: full height, aspect 4/3, centred
        (400, 100, Crop(133, 0, 133, 100)),
        (384, 682, Crop(0, 85, 384, 512)),  # 16:9 cannot hold 80% of its area at 4/3
    ],
)
def test_a_frame_that_cannot_hold_the_crop_gives_its_largest_centred_box(
    height: int, width: int, expected: Crop
) -> None:
    for i in range(20):
        assert draw_crop(height, width, (0.8, 1.0), rng(0, "test", i)) == expected


@pytest.mark.parametrize("size", [(1, 1), (3, 17), (8, 200), (33, 32)])
def test_crops_lie_in_frames_of_any_size(size: tuple[int, int]) -> None:
    for i in range(200):
        top, left, height, width = draw_crop(*size, (0.02, 1.0), rng(0, "test", i))
        assert top >= 0
        assert left >= 0
        assert height >= 1
        assert width >= 1
        assert top + height <= size[0]
        assert left + width <= size[1]


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("tubelet", [1, 3])
def test_gathered_patches_are_in_the_order_of_the_patch_embedding(tubelet: int, mirror: bool) -> None:
    video = torch.arange(6 * 3 * 8 * 12).reshape(6, 3, 8, 12)
    for layout in (video, video.movedim(1, -1).contiguous().movedim(-1, 1)):
        positions = grid_positions(grid_shape(6, 8, 12, patch=4, tubelet=tubelet))
        got = gather_patches(layout, positions, patch=4, tubelet=tubelet, mirror=mirror).flatten(1)
        seen = video.flip(-1) if mirror else video
        assert torch.equal(got, patchify(seen.movedim(1, 0)[None], patch=4, tubelet=tubelet)[0])


def test_a_colour_draw_of_ones_changes_nothing() -> None:
    frames = clip()
    draw = ViewDraw(Crop(0, 0, 60, 80), False, ColourDraw((3, 1, 0, 2), (1.0, 1.0, 1.0, 0.0)), False, None)
    positions = grid_positions((4, 4, 4))
    got = view_patches(frames, draw, positions, size=32, patch=8, tubelet=1)
    plain = view_patches(frames, draw._replace(colour=None), positions, size=32, patch=8, tubelet=1)
    assert torch.equal(got, plain)
