"""Bicubic resampling with antialiasing of uint8 pictures: whole, by torchvision, or only the patches that are kept.

torchvision (PyTorch's kernel for uint8) resizes in two passes, columns and then rows. Each output pixel is a weighted
sum of the source pixels around it, with weights in whole multiples of a power of two, and each pass rounds to whole
grey levels. ``resample_patches`` computes the same sums for the pixels of a few patches, as two matrix products per
patch, and equals cutting the patches out of the resized picture bit by bit: floating point holds every partial sum
exactly, so neither their order nor the machine matters.

Legend: T frames, H, W pixels of the stored frame, S side of the view, G = S / patch, K kept tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from marey.core.tokens import grid_shape

SUPPORT = 2.0
"""Reach of the cubic in source pixels, either way; times the scale where a picture shrinks."""
SHARPNESS = -0.5
"""The cubic's free parameter as antialiased resizing has it (Keys, 1981)."""
MOST_BITS = 22
EXACT_IN_FLOAT32 = 1 << 24
DEAR = 4
"""What a source pixel costs patch by patch, over what it costs torchvision in a whole picture (measured)."""


class Crop(NamedTuple):
    """A box in pixels of the stored frame."""

    top: int
    left: int
    height: int
    width: int


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


def resample_patches(
    frames: torch.Tensor, crop: Crop, tokens: torch.Tensor, *, size: int, patch: int, tubelet: int, mirror: bool
) -> torch.Tensor:
    """uint8 ``[T, 3, H, W]`` -> uint8 ``[K, 3, tubelet, patch, patch]``: what ``gather_patches`` cuts out of the crop
    resized to ``size``, with the rest of it not computed where that is cheaper.
    """
    rows, columns = _filters(crop.height, size, patch), _filters(crop.width, size, patch)
    needed = len(tokens) * tubelet * rows.box * columns.box
    if DEAR * needed > len(frames) * crop.height * crop.width:
        return gather_patches(crop_and_resize(frames, crop, size), tokens, patch=patch, tubelet=tubelet, mirror=mirror)
    t, h, w = tokens.unbind(1)
    if mirror:
        w = size // patch - 1 - w
    tops, lefts = rows.starts[h] + crop.top, columns.starts[w] + crop.left
    boxes = _boxes(frames, t, tops, lefts, (tubelet, rows.box, columns.box))
    # Levels centred on 0 keep the sums small.
    centred = (boxes ^ 128).view(torch.int8)
    planes = centred.permute(0, 1, 4, 2, 3).to(columns.dtype, memory_format=torch.contiguous_format)
    count = len(tokens)
    narrow = columns.apply(planes.view(count, -1, columns.box), w)  # [K, tubelet * 3 * box rows, patch]
    across = narrow.view(count, -1, rows.box, patch).mT.reshape(count, -1, rows.box).to(rows.dtype)
    small = rows.apply(across, h)  # [K, tubelet * 3 * patch columns, patch rows]
    levels = small.add_(128).to(torch.uint8).view(count, tubelet, 3, patch, patch).permute(0, 2, 1, 4, 3)
    return levels.flip(-1) if mirror else levels


def _boxes(
    frames: torch.Tensor, t: torch.Tensor, top: torch.Tensor, left: torch.Tensor, box: tuple[int, int, int]
) -> torch.Tensor:
    """uint8 ``[K, tubelet, rows, columns, 3]``: a box of source pixels for each patch."""
    tubelet, rows, columns = box
    pixels = frames.permute(0, 2, 3, 1).contiguous().numpy()  # no copy: decoders give interleaved pixels
    count, height, width, _ = pixels.shape
    frame, row, pixel, value = pixels.strides
    # NumPy copies boxes several times as fast as PyTorch, whole rows at a time.
    windows = np.lib.stride_tricks.as_strided(
        pixels,
        (count // tubelet, height - rows + 1, width - columns + 1, tubelet, rows, columns * 3),
        (frame * tubelet, row, pixel, frame, row, value),
        writeable=False,
    )
    boxes = windows[t.numpy(), top.numpy(), left.numpy()]
    return torch.from_numpy(boxes.reshape(-1, tubelet, rows, columns, 3))


class _Filters(NamedTuple):
    """The resampling of one axis, cut into patches; source pixels count from the crop's edge."""

    starts: torch.Tensor
    """int64 ``[G]``: first source pixel of each patch's box."""
    taps: torch.Tensor
    """int16 ``[G, box, patch]``."""
    offsets: torch.Tensor
    """``[G, 1, patch]``: what makes of sums of centred levels, rounded, centred levels again."""
    bits: int
    """Taps are multiples of ``2 ** -bits``."""
    dtype: torch.dtype
    """Holds all sums exactly."""

    @property
    def box(self) -> int:
        """Source pixels that a patch needs."""
        return self.taps.shape[1]

    def apply(self, levels: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """``[K, n, box]`` centred levels -> ``[K, n, patch]``, for patches number ``at`` of the axis."""
        with torch.autocast("cpu", enabled=False):  # products of fewer bits would not be exact
            sums = torch.bmm(levels, self.taps[at].to(self.dtype)).add_(self.offsets[at])
        return sums.mul_(2.0**-self.bits).floor_().clamp_(-128, 127)


@lru_cache(maxsize=2048)
def _filters(source: int, target: int, patch: int) -> _Filters:
    """Antialiased bicubic filters from ``source`` to ``target`` pixels, in PyTorch's arithmetic for uint8."""
    scale = source / target
    stretch = max(scale, 1.0)
    centres = scale * (np.arange(target) + 0.5)
    low = np.maximum((centres - SUPPORT * stretch + 0.5).astype(np.int64), 0)
    high = np.minimum((centres + SUPPORT * stretch + 0.5).astype(np.int64), source)
    pixels = low[:, None] + np.arange((high - low).max())
    weights = np.where(pixels < high[:, None], _cubic((pixels - centres[:, None] + 0.5) * (1 / stretch)), 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    bits = 0
    while bits < MOST_BITS and int(0.5 + weights.max() * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    whole = np.trunc(weights * (1 << bits) + np.copysign(0.5, weights)).astype(np.int64)
    # One box for each patch, all of a size, shifted inwards at the far edge.
    first = low[::patch]
    box = int((high[patch - 1 :: patch] - first).max())
    starts = np.minimum(first, source - box)
    taps = np.zeros((target // patch, box, patch), np.int16)
    number = np.broadcast_to(np.arange(target)[:, None], pixels.shape)
    used = pixels < high[:, None]
    taps[number[used] // patch, pixels[used] - starts[number[used] // patch], number[used] % patch] = whole[used]
    sums, reach = whole.sum(axis=1), np.abs(whole).sum(axis=1).max()
    # (sum over centred levels + 128 * sum of taps + half) >> bits, less 128
    offsets = (128 * sums + (1 << bits >> 1) - (128 << bits)).reshape(-1, 1, patch)
    dtype = torch.float32 if 128 * reach + np.abs(offsets).max() < EXACT_IN_FLOAT32 else torch.float64
    return _Filters(torch.from_numpy(starts), torch.from_numpy(taps), torch.from_numpy(offsets).to(dtype), bits, dtype)


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x, a = np.abs(x), SHARPNESS
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
