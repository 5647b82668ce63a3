"""Clips as pictures for a page: film strips, plates, and what is left of a view after the token drop.

Legend: T frames, H and W pixels, K kept tokens, P = 3*tubelet*patch*patch.
"""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from marey.core.tokens import TokenGroup

Pixels = NDArray[np.uint8]


def frames_last(video: torch.Tensor) -> Pixels:
    """uint8 ``[3, T, H, W]`` (the encoder's layout) -> uint8 ``[T, H, W, 3]`` (the pictures')."""
    return np.ascontiguousarray(video.permute(1, 2, 3, 0).numpy())


def film(frames: Pixels) -> Pixels:
    """``[T, H, W, C]`` -> ``[H, T*W, C]``: the frames side by side, left to right."""
    t, h, w, c = frames.shape
    return np.ascontiguousarray(frames.transpose(1, 0, 2, 3).reshape(h, t * w, c))


def plate(frames: Pixels, *, every: int = 1) -> Pixels:
    """``[T, H, W, 3]`` -> ``[H, W, 3]``: many moments of one motion on a single plate, one frame in ``every``.

    Each pixel is taken from the frame in which it is brightest, as on a plate that is exposed again and again.
    """
    frames = frames[::every]
    chosen = frames.sum(axis=-1, dtype=np.int64).argmax(axis=0)
    rows, columns = np.indices(chosen.shape)
    return np.ascontiguousarray(frames[chosen, rows, columns])


def kept_patches(group: TokenGroup, index: int, *, frames: int, size: int, patch: int, tubelet: int) -> Pixels:
    """RGBA ``[T, size, size, 4]`` of one sequence of a token group: kept patches, the rest transparent.

    group: uint8 patches ``[N, K, P]`` and their grid positions ``[N, K, 3]``.
    """
    canvas = np.zeros((frames, size, size, 4), dtype=np.uint8)
    patches = group.patches[index].reshape(-1, 3, tubelet, patch, patch).permute(0, 2, 3, 4, 1).numpy()
    for pixels, (t, h, w) in zip(patches, group.positions[index].tolist(), strict=True):
        block = canvas[t * tubelet : (t + 1) * tubelet, h * patch : (h + 1) * patch, w * patch : (w + 1) * patch]
        block[..., :3], block[..., 3] = pixels, 255
    return canvas


def data_uri(pixels: Pixels, *, quality: int = 88) -> str:
    """A ``data:`` address: JPEG for ``[H, W, 3]``, PNG for ``[H, W, 4]``."""
    buffer = io.BytesIO()
    if pixels.shape[-1] == 4:
        Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
