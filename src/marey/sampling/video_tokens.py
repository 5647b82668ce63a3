"""What a program shows the video transformer of a window: frames, and pairs of frames that see each other. No torch.

The arithmetic of ``marey.objectives``' programs, for a plan and for counts by clip; multiply frames by the tokens of a
frame, and pairs by its square.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from marey.config.causal import ProgramConfig

Ints = NDArray[np.int64]


def frames_seen(program: ProgramConfig, frames: Ints) -> Ints:
    """int64 ``[k]``: frames that the model is given of windows of ``frames`` (in temporal patches where it has them).

    ``chunked_conditioned`` sees a condition frame, a clean stream and a noisy one.
    """
    return 1 + 2 * frames if program.name == "chunked_conditioned" else frames


def visible_pairs(program: ProgramConfig, prefix: Ints, future: Ints) -> NDArray[np.float64]:
    """float64 ``[k]``: (query, key) pairs of frames that attend, of windows of ``prefix`` + ``future`` frames.

    Under ``chunked_conditioned`` a window's chunks are drawn when it is: this is the mean over what may be drawn.
    """
    frames = (prefix + future).astype(np.float64)
    if program.name == "chunked_conditioned":
        lengths, where = np.unique(prefix + future, return_inverse=True)
        means = [_chunked_pairs(int(n), program.chunk_size, program.chunk_window) for n in lengths]
        return np.asarray(means, dtype=np.float64)[where]
    if program.visibility == "prefix_causal":
        return prefix.astype(np.float64) ** 2 + future * frames
    return frames**2


@lru_cache(maxsize=4096)
def _chunked_pairs(frames: int, sizes: tuple[int, int], windows: tuple[int, int]) -> float:
    """The mean of :func:`chunked_pairs` over all chunk sizes and windows, ends included."""
    found = [
        chunked_pairs(frames, size=size, window=window)
        for size in range(sizes[0], sizes[1] + 1)
        for window in range(windows[0], windows[1] + 1)
    ]
    return float(np.mean(found))


def chunked_pairs(frames: int, *, size: int, window: int) -> int:
    """Pairs of frames in chunks of ``size``, none further than ``window`` chunks apart.

    Clean frames (the condition frame is chunk 0) see clean ones of the same and earlier chunks, noisy ones see noisy
    ones of their own chunk and clean ones of earlier chunks.
    """
    count = -(-frames // size)
    inside = np.array([1, *[min(size, frames - i * size) for i in range(count)]], dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(inside)])
    chunk = np.arange(count + 1)
    first = before[np.maximum(0, chunk - window)]
    clean = inside * (before[chunk + 1] - first)
    noisy = inside * (before[chunk] - first + inside)
    return int(clean.sum() + noisy[1:].sum())
