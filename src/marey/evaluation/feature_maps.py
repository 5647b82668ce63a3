"""Features as pictures: colours of patches, heat over frames, a patch marked.

Legend: n clips, T frames, G positions along time, h and w rows and columns of patches, S pixels of a side, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from marey.evaluation.colours import FeatureColours
from marey.evaluation.pictures import Pixels

Unit = NDArray[np.float32]
"""Values in 0..1."""
HEAT = np.array(
    [[20, 18, 16], [88, 24, 34], [178, 58, 18], [240, 150, 48], [255, 240, 190]], dtype=np.float32
)  # dark to light through the page's own red, so that it reads without colour too
MARK, AROUND = (255, 255, 255), (20, 18, 16)


class Place(NamedTuple):
    """A patch: position along time, row, column."""

    time: int
    row: int
    column: int


@dataclass(frozen=True)
class Coloured:
    """Clips whose patches have the colour of their features."""

    frames: Pixels
    """``[n, G, h, w, 3]``"""
    share: float
    """Share of the features' variance that the three colours carry, 0..1."""


def feature_colours(patches: Tensor) -> Coloured:
    """The three principal components of the patches of all clips ``[n, G, h, w, D]`` as red, green and blue.

    One basis and one range for all clips and frames, so that equal colours mean equal features.
    """
    n, g = patches.shape[:2]
    channels_first = patches.flatten(0, 1).permute(3, 0, 1, 2)  # [D, n*G, h, w]
    colours = FeatureColours.fit(channels_first, cell=1)
    rows = patches.flatten(0, 3) - colours.mean
    whole = float(rows.square().sum())
    share = float((rows @ colours.basis).square().sum()) / whole if whole > 0 else 0.0
    shown = colours.decode(channels_first).permute(0, 2, 3, 1).numpy()  # [n*G, h, w, 3]
    return Coloured(shown.reshape(n, g, *shown.shape[1:]), share)


def odd_patch(patches: Tensor) -> Place:
    """Of the first position along time of one clip ``[G, h, w, D]``, the patch that is least like the clip's mean.

    Least in cosine similarity; the first of equals.
    """
    mean = patches.flatten(0, 2).mean(dim=0)
    alike = torch.nn.functional.cosine_similarity(patches[0], mean, dim=-1)  # [h, w]
    row, column = divmod(int(alike.argmin()), alike.shape[1])
    return Place(0, row, column)


def similarity(patches: Tensor, place: Place) -> Unit:
    """Cosine similarity ``[G, h, w]`` of every patch of a clip ``[G, h, w, D]`` with the one at ``place``, 0..1.

    The clip's mean is taken off first: what all its patches share would make everything alike. Below 0 counts as 0.
    """
    centred = patches - patches.flatten(0, 2).mean(dim=0)
    alike = torch.nn.functional.cosine_similarity(centred, centred[place], dim=-1)
    return alike.clamp(0, 1).numpy()


def against_most(weights: Tensor) -> Unit:
    """Weights ``[G, h, w]`` as shares of the largest of them."""
    return (weights / weights.max().clamp_min(1e-12)).numpy()


def heat(values: Unit) -> Pixels:
    """0..1 ``[...]`` -> uint8 ``[..., 3]``, dark to light."""
    at = np.clip(values, 0, 1)[..., None] * (len(HEAT) - 1)
    below = np.minimum(at.astype(np.int64), len(HEAT) - 2)
    low, high = HEAT[below[..., 0]], HEAT[below[..., 0] + 1]
    colours: Pixels = np.rint(low + (high - low) * (at - below)).astype(np.uint8)
    return colours


def over_frames(frames: Pixels, colours: Pixels, *, share: float) -> Pixels:
    """``share`` of the patches' colours ``[G, h, w, 3]`` over the grey of frames ``[T, S, S, 3]``: ``[T, S, S, 3]``.

    Each position along time covers T / G frames, each patch its own pixels.
    """
    t, height, width, _ = frames.shape
    g, h, w, _ = colours.shape
    assert t % g == height % h == width % w == 0, (frames.shape, colours.shape)
    spread = colours.repeat(t // g, axis=0).repeat(height // h, axis=1).repeat(width // w, axis=2)
    grey = frames.mean(axis=-1, keepdims=True)
    blended: Pixels = np.rint(share * spread + (1 - share) * grey).astype(np.uint8)
    return blended


def marked(frames: Pixels, place: Place, grid: tuple[int, int, int]) -> Pixels:
    """Frames ``[T, S, S, 3]`` with the patch at ``place`` of the ``grid`` (G, h, w) framed, in the frames it covers.

    A white line inside the patch and a dark one around it: one of them is seen on any picture.
    """
    t, height, width, _ = frames.shape
    frames_each, tall, wide = t // grid[0], height // grid[1], width // grid[2]
    out = frames.copy()
    edge = max(1, height // 96)
    top, left = place.row * tall, place.column * wide
    for frame in out[place.time * frames_each : (place.time + 1) * frames_each]:
        inside = frame[top + edge : top + tall - edge, left + edge : left + wide - edge].copy()
        frame[max(0, top - edge) : top + tall + edge, max(0, left - edge) : left + wide + edge] = AROUND
        frame[top : top + tall, left : left + wide] = MARK
        frame[top + edge : top + tall - edge, left + edge : left + wide - edge] = inside
    return out


def for_show(frames: Pixels, *, side: int, most: int) -> Pixels:
    """At most ``most`` evenly spaced frames of ``[T, S, S, 3]``, brought to about ``side`` pixels.

    Small ones are enlarged by a whole number, each pixel a block; large ones are averaged down.
    """
    t, height, width, _ = frames.shape
    if t > most:
        frames = frames[np.linspace(0, t - 1, most).round().astype(np.int64)]
    if height < side:
        scale = -(-side // height)
        return frames.repeat(scale, axis=1).repeat(scale, axis=2)
    if height == side:
        return frames
    size = (round(width * side / height), side)
    return np.stack([np.asarray(Image.fromarray(f).resize(size, Image.Resampling.BOX)) for f in frames])
