"""Colour changes of local views, on integer grey levels held in float32.

The steps and their rounding are torchvision's for uint8 images (brightness, contrast and saturation blend and
truncate; grey is ``.2989 R + .587 G + .114 B``; hue turns in HSV), and results agree within one grey level.
They are written out because only contrast looks beyond a pixel, at the mean grey of its frame: with that mean
known, everything can be done on the few patches that are kept. Hue is the costly one; here it is some thirty
elementwise operations on planes, without building an HSV image.

Images are float32 ``[3, ...]``: R, G and B planes of any shape, grey levels 0..255.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


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


def contrast_mean(view: torch.Tensor, colour: ColourDraw) -> torch.Tensor:
    """float32 ``[3, T, H, W]`` -> ``[T]``: each frame's mean grey at the moment contrast is changed."""
    for step in colour.order[: colour.order.index(CONTRAST)]:
        view = _step(view, step, colour.factors[step], None)
    return grey(view).mean(dim=(-2, -1))


def jitter(image: torch.Tensor, colour: ColourDraw, mean: torch.Tensor) -> torch.Tensor:
    """All four steps in their order. ``mean`` (of each pixel's frame) broadcasts over a plane."""
    for step in colour.order:
        image = _step(image, step, colour.factors[step], mean)
    return image
