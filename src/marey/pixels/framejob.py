"""Frames of video files on request, in a process of its own: the far side of ``pixels.guard``."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from marey.pixels.footage import FrameReader

_open: dict[int, FrameReader] = {}
_blocks: dict[int, mmap.mmap] = {}
"""Stretches of the shared memory by where they begin. They stay mapped: mapping one anew costs a page fault for every
4 KiB written to it."""


def read_frames(payload: dict[str, Any], tick: Callable[[int, float], None]) -> tuple[int, int]:
    """Write the frames of one file at ``payload["steps"]`` (ascending, distinct) into shared memory.

    ``payload``: ``file`` is the number the file goes by, ``opens`` its name, footage and index where it is new,
    ``closes`` the numbers of files that are no longer wanted; ``memory`` is the file descriptor of the memory, and
    ``block`` (offset, bytes) the stretch of it that receives uint8 ``[steps, H, W, 3]`` and is large enough, ``drops``
    the offsets of those that are no longer used. Returns (H, W), upright. Raises ``UserError`` naming the file.
    """
    for number in payload["closes"]:
        _open.pop(number).close()
    for offset in payload["drops"]:
        _blocks.pop(offset).close()
    if payload["opens"] is not None:
        _, footage, index = payload["opens"]
        _open[payload["file"]] = footage.reader(index, tick=lambda: tick(0, 0.0))
    offset, size = payload["block"]
    if offset not in _blocks:
        _blocks[offset] = mmap.mmap(payload["memory"], size, offset=offset)
    steps, end = payload["steps"], 0
    shape = (0, 0)
    for _, picture in _open[payload["file"]].each(steps):
        shape = picture.shape[:2]
        out = np.frombuffer(_blocks[offset], np.uint8, picture.size, end).reshape(picture.shape)
        out[:] = picture
        end += picture.size
        del out  # a map cannot be closed while an array looks into it
    return shape
