"""The channel statistics pixels are normalised with, and the one function that does it.

Workers ship uint8 and the device normalises, or workers normalise themselves; both call this function, whose
operations are elementwise and separate, so that the numbers are the same either way.
"""

from __future__ import annotations

import torch

IMAGENET_MEAN: tuple[float, float, float] = (0.485, 0.456, 0.406)
"""Mean of ImageNet's training pixels per channel (R, G, B), on a scale of 0 to 1."""
IMAGENET_STD: tuple[float, float, float] = (0.229, 0.224, 0.225)
"""Standard deviation of the same."""


def _normalize(x: torch.Tensor, channel_axis: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    assert channels in (1, 3), channels
    # Half precision cannot hold 1/255 steps around the mean: normalise in float32 and round once.
    compute = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    shape = [1] * x.ndim
    shape[channel_axis] = channels
    mean = torch.tensor(IMAGENET_MEAN[:channels], dtype=compute, device=x.device).reshape(shape)
    std = torch.tensor(IMAGENET_STD[:channels], dtype=compute, device=x.device).reshape(shape)
    # By a tensor of the device: CUDA divides by a Python number as a product with its reciprocal, which gives 126 of
    # the 256 bytes another last bit.
    scaled = x.to(compute) / torch.full((), 255, dtype=compute, device=x.device)
    return ((scaled - mean) / std).to(dtype)


def normalize_patches(patches: torch.Tensor, *, channels: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 ``[..., P]`` (0..255, flattened channel first) -> ``[..., P]``: ``(x / 255 - mean) / std``.

    float32 and float64 are computed as such; half precisions are computed in float32 and rounded.
    """
    p = patches.shape[-1]
    assert p % channels == 0, (p, channels)
    split = patches.reshape(*patches.shape[:-1], channels, p // channels)
    return _normalize(split, split.ndim - 2, channels, dtype).reshape(patches.shape)


def normalize_video(video: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 ``[B, 3, T, H, W]`` (0..255) -> the same shape, as ``normalize_patches`` does it."""
    assert video.ndim == 5, video.shape
    assert video.shape[1] == 3, video.shape
    return _normalize(video, 1, 3, dtype)
