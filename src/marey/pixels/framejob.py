"""Frames of video files on request, in a process of its own: the far side of ``pixels.guard``."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from marey.pixels.footage import FrameReader

_open: dict[int, FrameReader] = {}


def read_frames(payload: dict[str, Any], tick: Callable[[int, float], None]) -> tuple[int, int]:
    """Write the frames of one file at ``payload["steps"]`` (ascending, distinct) into shared memory.

    ``payload``: ``file`` is the number the file goes by, ``opens`` its name, footage and index where it is new,
    ``closes`` the numbers of files that are no longer wanted, ``memory`` the file descriptor that receives uint8
    ``[steps, H, W, 3]`` and is large enough. Returns (H, W), upright. Raises ``UserError`` naming the file.
    """
    for number in payload["closes"]:
        _open.pop(number).close()
    if payload["opens"] is not None:
        _, footage, index = payload["opens"]
        _open[payload["file"]] = footage.reader(index, tick=lambda: tick(0, 0.0))
    pictures = _open[payload["file"]].fetch(payload["steps"])
    first = pictures[payload["steps"][0]]
    with mmap.mmap(payload["memory"], len(pictures) * first.nbytes) as memory:
        out = np.frombuffer(memory, np.uint8).reshape(len(pictures), *first.shape)
        for place, step in enumerate(payload["steps"]):
            out[place] = pictures[step]
        del out  # the map cannot be closed while an array looks into it
    return first.shape[0], first.shape[1]
