"""Memory for clips that is used again once nobody looks at it.

A clip takes tens of megabytes. Fresh memory of that size comes from the system page by page and zeroed, which costs
about a tenth of what decoding JPEGs into it does, and more where two processes map it.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

KEEP_BYTES = 1 << 27
"""Memory kept for later; what lies unused beyond it is given back at the next ``take``."""
GRAIN = 1 << 20
"""Blocks are whole multiples of it, so that clips of almost one size share them."""


class Block(NamedTuple):
    """A piece of memory."""

    memory: Any
    """Anything with a writable buffer."""
    size: int
    """Bytes."""
    offset: int = 0
    """Where it lies, if it is part of something larger."""


class Buffers:
    """Hands out blocks as arrays, and takes each back when the last view of its array is gone.

    Not for several threads, though the last view may go in any.
    """

    def __init__(self) -> None:
        self._free: list[Block] = []  # longest unused first
        # A view may die at any moment, also in the middle of a ``take``: what comes back waits here.
        self._returned: deque[Block] = deque()

    def make(self, size: int) -> Block:
        """A new block of so many bytes, in this process's own memory."""
        return Block(np.empty(size, np.uint8), size)

    def drop(self, block: Block) -> None:
        """Called with a block that is let go."""

    def take(self, size: int) -> tuple[NDArray[np.uint8], Block]:
        """An array uint8 ``[size]`` of arbitrary values, and the block that it looks into."""
        while self._returned:
            self._free.append(self._returned.popleft())
        fitting = [place for place, block in enumerate(self._free) if block.size >= size]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda place: self._free[place].size))
        else:
            block = self.make(-(-max(size, 1) // GRAIN) * GRAIN)
        while sum(free.size for free in self._free) > KEEP_BYTES:
            self.drop(self._free.pop(0))
        # A view refers to the last array before something that is none: the memoryview makes that this one, so that it
        # lives as long as any view of it. Over a plain array, views would refer to that.
        array = np.frombuffer(memoryview(block.memory), np.uint8, size)
        weakref.finalize(array, self._returned.append, block).atexit = False
        return array, block
