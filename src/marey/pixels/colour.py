"""Colour changes of local views, on integer grey levels held in float32.

The steps and their rounding are torchvision's for uint8 images (brightness, contrast and saturation blend and
truncate; grey is ``.2989 R + .587 G + .114 B``; hue turns in HSV), and each step agrees within one grey level.
They are written out because only contrast looks beyond a pixel, at the mean grey of its frame: with that mean
known, everything can be done on the few patches that are kept. Hue is the costly one; here it is some thirty
elementwise operations on planes, without building an HSV image.

The mean is taken over ``SAMPLES`` pixels of the crop as stored, spread evenly, after the steps that come before
contrast. On camera footage it is off by a third of a grey level on average and by less than 3 at most, and contrast
moves a pixel by at most .4 of that. So one level in fifty comes out one lower or higher than with the mean of the whole
view. Steps that follow can stretch that: one level in a thousand is off by more than one, by 5 at the very most.

Images are float32 ``[3, ...]``: R, G and B planes of any shape, grey levels 0..255.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from marey.pixels.resample import Crop

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
SAMPLES, _TURN = 1597, 987
"""Neighbouring Fibonacci numbers: points ``(i / SAMPLES, i * _TURN / SAMPLES mod 1)`` fill a square evenly, no two of
them in one row or column (a Fibonacci lattice, Niederreiter & Sloan 1994), so that stripes do not bias a mean."""


class ColourDraw(NamedTuple):
    """One colour jitter. ``order`` is a permutation of the four steps; ``factors`` is indexed by step.

    Factors of brightness, contrast and saturation: 1 changes nothing. Hue: share of a full turn, 0 nothing.
    """

    order: tuple[int, ...]
    factors: tuple[float, float, float, float]


def grey(image: torch.Tensor) -> torch.Tensor:
    """float32 ``[3, ...]`` -> ``[...]``: whole grey levels."""
    red, green, blue = image.unbind(0)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def _blend(image: torch.Tensor, other: torch.Tensor, factor: float) -> torch.Tensor:
    return image.mul(factor).add_(other, alpha=1.0 - factor).clamp_(0, 255).floor_()


def _brightness(image: torch.Tensor, factor: float) -> torch.Tensor:
    return image.mul(factor).clamp_(0, 255).floor_()


def turn_hue(image: torch.Tensor, share: float) -> torch.Tensor:
    """Rotate the hue of every pixel by ``share`` of a full turn (HSV), ``[3, ...]`` -> ``[3, ...]``."""
    red, green, blue = image.unbind(0)
    top = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = top - low
    # Hue in sixths of a turn: red at 0, green at 2, blue at 4.
    sixths = torch.where(
        top == red,
        green - blue,
        torch.where(top == green, (blue - red).add_(chroma, alpha=2), (red - green).add_(chroma, alpha=4)),
    )
    sixths = sixths.div_(chroma.clamp(min=1)).add_(6 * share).remainder_(6)
    out = torch.empty_like(image)
    torch.sub(sixths, 3, out=out[0]).abs_().sub_(1)
    torch.sub(sixths, 2, out=out[1]).abs_().neg_().add_(2)
    torch.sub(sixths, 4, out=out[2]).abs_().neg_().add_(2)
    # 255.999 is the scale torchvision returns from [0, 1] to whole levels with.
    return out.clamp_(0, 1).mul_(chroma).add_(low).mul_(255.999 / 255).floor_()


def _step(image: torch.Tensor, step: int, factor: float, mean: torch.Tensor | None) -> torch.Tensor:
    if step == BRIGHTNESS:
        return _brightness(image, factor)
    if step == CONTRAST:
        assert mean is not None
        return _blend(image, mean, factor)
    if step == SATURATION:
        return _blend(image, grey(image), factor)
    return turn_hue(image, factor)


def sample_pixels(frames: torch.Tensor, crop: Crop) -> torch.Tensor:
    """uint8 ``[T, 3, H, W]`` -> float32 ``[3, T, n]``: n pixels spread evenly over ``crop``; all, if it has so few."""
    pixels = frames.permute(0, 2, 3, 1).contiguous().numpy()  # no copy: decoders give interleaved pixels
    rows, columns = _spread(crop)
    places = (crop.top + rows) * pixels.shape[2] + crop.left + columns
    # NumPy's take copies whole pixels, several times as fast as PyTorch.
    taken = np.take(pixels.reshape(len(pixels), -1, 3), places, axis=1)
    return torch.from_numpy(taken).permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)


def _spread(crop: Crop) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if crop.height * crop.width <= SAMPLES:
        rows, columns = np.divmod(np.arange(crop.height * crop.width), crop.width)
        return rows, columns
    point = np.arange(SAMPLES)
    rows, columns = (2 * point + 1) * crop.height, (2 * (point * _TURN % SAMPLES) + 1) * crop.width
    return rows // (2 * SAMPLES), columns // (2 * SAMPLES)


def contrast_mean(sample: torch.Tensor, colour: ColourDraw) -> torch.Tensor:
    """float32 ``[3, T, ...]`` -> ``[T]``: each frame's mean grey at the moment contrast is changed."""
    for step in colour.order[: colour.order.index(CONTRAST)]:
        sample = _step(sample, step, colour.factors[step], None)
    return grey(sample).flatten(1).mean(dim=1)


def jitter(image: torch.Tensor, colour: ColourDraw, mean: torch.Tensor) -> torch.Tensor:
    """All four steps in their order. ``mean`` (of each pixel's frame) broadcasts over a plane."""
    for step in colour.order:
        image = _step(image, step, colour.factors[step], mean)
    return image
