"""Views of a clip: one crop (for local views also flip and colour) for all frames, of which some patches are kept.

Every parameter is drawn from the key (seed, "view", epoch, position, view), view 0 being the global one, so a
view depends on nothing but its own address. Numbers are drawn in a fixed layout: another probability or range
changes what it names and nothing else.

``augmentation.sparse`` says how the kept patches are made. False: the whole view, as published, and then its patches.
True: the patches alone. The resampled pixels are the same bit by bit. Colours differ by what ``pixels.colour`` says.

Legend: T frames, H, W pixels of the stored frame, S side of the view, K kept tokens, P values of a patch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torchvision.transforms.v2 import functional

from marey.config.schema import AugmentationConfig
from marey.core.keys import rng
from marey.pixels.colour import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    ColourDraw,
    contrast_mean,
    grey,
    jitter,
    sample_pixels,
)
from marey.pixels.resample import Crop, crop_and_resize, gather_patches, resample_patches

RATIO = (3 / 4, 4 / 3)
BRIGHTNESS_RANGE, CONTRAST_RANGE, SATURATION_RANGE = 0.4, 0.4, 0.2
BLUR_SIGMA = (0.1, 2.0)
CROP_TRIES = 10
COLOUR_STEPS = {
    BRIGHTNESS: functional.adjust_brightness,
    CONTRAST: functional.adjust_contrast,
    SATURATION: functional.adjust_saturation,
    HUE: functional.adjust_hue,
}


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


def view_patches(
    frames: torch.Tensor,
    draw: ViewDraw,
    tokens: torch.Tensor,
    *,
    size: int,
    patch: int,
    tubelet: int,
    sparse: bool = True,
) -> torch.Tensor:
    """uint8 ``[T, 3, H, W]`` -> uint8 ``[K, P]``: the patches of this view at grid positions ``tokens``."""
    if sparse and draw.blur_sigma is None:
        kept = _patches_alone(frames, draw, tokens, size=size, patch=patch, tubelet=tubelet)
    else:  # a blur mixes pixels across patches
        kept = gather_patches(whole_view(frames, draw, size), tokens, patch=patch, tubelet=tubelet)
    return kept.reshape(len(tokens), -1)


def whole_view(frames: torch.Tensor, draw: ViewDraw, size: int) -> torch.Tensor:
    """uint8 ``[T, 3, H, W]`` -> uint8 ``[T, 3, S, S]``: the whole view by torchvision, in the published order."""
    view = crop_and_resize(frames, draw.crop, size)
    if draw.hflip:
        view = functional.hflip(view)
    if draw.colour is not None:
        for step in draw.colour.order:
            view = COLOUR_STEPS[step](view, draw.colour.factors[step])
    if draw.grayscale:
        view = functional.rgb_to_grayscale(view, num_output_channels=3)
    if draw.blur_sigma is not None:
        kernel = 2 * (size // 20) + 1
        view = functional.gaussian_blur(view, [kernel, kernel], [draw.blur_sigma] * 2)
    return view


def _patches_alone(
    frames: torch.Tensor, draw: ViewDraw, tokens: torch.Tensor, *, size: int, patch: int, tubelet: int
) -> torch.Tensor:
    """uint8 ``[K, 3, tubelet, patch, patch]``. Whatever patch is asked for, its values do not depend on the others."""
    kept = resample_patches(frames, draw.crop, tokens, size=size, patch=patch, tubelet=tubelet, mirror=draw.hflip)
    if draw.colour is None and not draw.grayscale:
        return kept
    image = kept.movedim(1, 0).to(torch.float32, memory_format=torch.contiguous_format)  # [3, K, tubelet, patch, patch]
    if draw.colour is not None:
        mean = contrast_mean(sample_pixels(frames, draw.crop), draw.colour)  # [T]
        image = jitter(image, draw.colour, mean.view(-1, tubelet, 1, 1)[tokens[:, 0]])
    if draw.grayscale:
        image = grey(image).expand_as(image)
    return image.to(torch.uint8).movedim(0, 1)
