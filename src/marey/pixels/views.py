"""Views of a clip: one crop (for local views also flip and colour) for all frames, then the kept patches.

Every parameter is drawn from the key (seed, "view", epoch, position, view), view 0 being the global one, so a
view depends on nothing but its own address. Numbers are drawn in a fixed layout: another probability or range
changes what it names and nothing else.

Legend: T frames, H, W pixels of the stored frame, S side of the view, K kept tokens, P values of a patch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from marey.config.schema import AugmentationConfig
from marey.core.keys import rng
from marey.core.tokens import grid_shape
from marey.pixels.colour import ColourDraw, contrast_mean, grey, jitter

RATIO = (3 / 4, 4 / 3)
BRIGHTNESS_RANGE, CONTRAST_RANGE, SATURATION_RANGE = 0.4, 0.4, 0.2
BLUR_SIGMA = (0.1, 2.0)
CROP_TRIES = 10


class Crop(NamedTuple):
    """A box in pixels of the stored frame."""

    top: int
    left: int
    height: int
    width: int


class ViewDraw(NamedTuple):
    """Everything random about one view, the same for all its frames."""

    crop: Crop
    hflip: bool
    colour: ColourDraw | None
    grayscale: bool
    blur_sigma: float | None


def draw_crop(height: int, width: int, scale: tuple[float, float], generator: np.random.Generator) -> Crop:
    """A random resized crop's box: area share uniform in ``scale``, aspect log-uniform in 3/4..4/3.

    After ten tries that do not fit in the frame, the largest centred box whose aspect is allowed.
    """
    tries = generator.random((CROP_TRIES, 4))
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for share, aspect, down, right in tries.tolist():
        area = height * width * (scale[0] + share * (scale[1] - scale[0]))
        ratio = math.exp(low + aspect * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Crop(int(down * (height - h + 1)), int(right * (width - w + 1)), h, w)
    w, h = width, height
    if width / height < RATIO[0]:
        h = max(1, round(width / RATIO[0]))
    elif width / height > RATIO[1]:
        w = max(1, round(height * RATIO[1]))
    return Crop((height - h) // 2, (width - w) // 2, h, w)


def draw_view(
    height: int,
    width: int,
    augmentation: AugmentationConfig,
    *,
    seed: int,
    epoch: int,
    position: int,
    view: int,
) -> ViewDraw:
    """The parameters of ``view`` (0: global, crop only; 1..V: local) of the clip at (epoch, position)."""
    generator = rng(seed, "view", epoch, position, view)
    if view == 0:
        crop = draw_crop(height, width, augmentation.global_crops_scale, generator)
        return ViewDraw(crop, hflip=False, colour=None, grayscale=False, blur_sigma=None)
    crop = draw_crop(height, width, augmentation.local_crops_scale, generator)
    flip, colour, gray, blur, brightness, contrast, saturation, hue, sigma = generator.random(9).tolist()
    order = tuple(generator.permutation(4).tolist())
    factors = (
        1 + BRIGHTNESS_RANGE * (2 * brightness - 1),
        1 + CONTRAST_RANGE * (2 * contrast - 1),
        1 + SATURATION_RANGE * (2 * saturation - 1),
        augmentation.color_jitter_hue * (2 * hue - 1),
    )
    return ViewDraw(
        crop,
        hflip=augmentation.hflip and flip < 0.5,
        colour=ColourDraw(order, factors) if colour < augmentation.color_jitter_prob else None,
        grayscale=gray < augmentation.grayscale_prob,
        blur_sigma=BLUR_SIGMA[0] + sigma * (BLUR_SIGMA[1] - BLUR_SIGMA[0])
        if blur < augmentation.gaussian_blur_prob
        else None,
    )


def crop_and_resize(frames: torch.Tensor, crop: Crop, size: int) -> torch.Tensor:
    """uint8 ``[T, 3, H, W]`` -> uint8 ``[T, 3, S, S]``, bicubic with antialiasing."""
    box = frames[:, :, crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    return resize(box, [size, size])


def resize(frames: torch.Tensor, size: list[int]) -> torch.Tensor:
    """uint8 ``[T, 3, H, W]``, bicubic with antialiasing, to ``[height, width]`` or, one number, the short side."""
    # Interleaved memory is what torchvision resizes fastest: a third of the time of planes.
    interleaved = frames.contiguous(memory_format=torch.channels_last)
    resized: torch.Tensor = functional.resize(
        interleaved, size, interpolation=InterpolationMode.BICUBIC, antialias=True
    )
    return resized


def gather_patches(
    video: torch.Tensor, tokens: torch.Tensor, *, patch: int, tubelet: int, mirror: bool = False
) -> torch.Tensor:
    """``[T, 3, S, S]`` and int64 ``[K, 3]`` grid positions (t, h, w) -> ``[K, 3, tubelet, patch, patch]``.

    Copies the named patches and nothing else. ``mirror`` reads them as from the video flipped left to right.
    """
    frames, _, height, width = video.shape
    gt, gh, gw = grid_shape(frames, height, width, patch=patch, tubelet=tubelet)
    blocks = video.view(gt, tubelet, 3, gh, patch, gw, patch)  # splitting axes copies nothing, whatever strides
    t, h, w = tokens.unbind(1)
    # as (gt, gh, gw, 3, tubelet, patch, patch), still without a copy; indexing copies the kept
    kept: torch.Tensor = blocks.permute(0, 3, 5, 2, 1, 4, 6)[t, h, gw - 1 - w if mirror else w]
    return kept.flip(-1) if mirror else kept


def view_patches(
    frames: torch.Tensor, draw: ViewDraw, tokens: torch.Tensor, *, size: int, patch: int, tubelet: int
) -> torch.Tensor:
    """uint8 ``[T, 3, H, W]`` -> uint8 ``[K, P]``: the patches of this view at grid positions ``tokens``.

    Colour is changed on the kept patches alone; only contrast reads the whole view, for its mean.
    """
    view = crop_and_resize(frames, draw.crop, size)
    if draw.blur_sigma is not None:
        # A blur mixes pixels across patches: everything before it is done on the whole view.
        whole = _recolour(view, view.movedim(1, 0), draw, tubelet=1, frame=torch.arange(len(view)))
        kernel = 2 * (size // 20) + 1
        view = functional.gaussian_blur(whole.movedim(0, 1), [kernel, kernel], [draw.blur_sigma] * 2)
        draw = draw._replace(colour=None, grayscale=False)
    kept = gather_patches(view, tokens, patch=patch, tubelet=tubelet, mirror=draw.hflip)
    if draw.colour is not None or draw.grayscale:
        planes = kept.movedim(1, 0).flatten(3)  # [3, K, tubelet, patch * patch]
        kept = _recolour(view, planes, draw, tubelet=tubelet, frame=tokens[:, 0]).movedim(0, 1)
    return kept.reshape(len(tokens), -1)


def _recolour(
    view: torch.Tensor, planes: torch.Tensor, draw: ViewDraw, *, tubelet: int, frame: torch.Tensor
) -> torch.Tensor:
    """uint8 ``[3, n, ...]`` planes of ``view``; row i is of frames ``frame[i] * tubelet + 0..tubelet-1``."""
    image = planes.to(torch.float32, memory_format=torch.contiguous_format)
    if draw.colour is not None:
        whole = view.movedim(1, 0).to(torch.float32, memory_format=torch.contiguous_format)
        mean = contrast_mean(whole, draw.colour)  # [T]
        mean = mean.reshape(-1, tubelet)[frame]
        image = jitter(image, draw.colour, mean.reshape(mean.shape + (1,) * (image.ndim - 3)))
    if draw.grayscale:
        image = grey(image).expand_as(image)
    return image.to(torch.uint8)
