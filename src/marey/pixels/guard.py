"""Reading frames of video files so that a decoder that hangs or dies costs its clip and nothing else.

FFmpeg is C: a call that never returns cannot be interrupted, and one that crashes takes its process with it. So
frames are decoded by a child process (``pixels.framejob``) that is killed when it stalls, and comes back through
memory that both processes map: the child writes a clip where the parent hands it on, and nothing is copied.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.pixels.buffers import Block, Buffers
from marey.pixels.footage import FileIndex, Footage
from marey.pixels.pool import Child, Finished, Refused, end_child, hear, late, stalled, start_child

JOB = "marey.pixels.framejob:read_frames"
OPEN_FILES = 8
"""Files that a decoding process keeps open."""
POLL_S = 0.1


class GuardedReader:
    """Frames of any of a list of files. Belongs to the process that made it; not for several threads.

    ``stall_s``: seconds without a decoded frame after which the decoder is killed (longer where the machine leaves
    it too little of the CPU, see ``pixels.pool``). The next read starts another.
    """

    def __init__(self, *, stall_s: float) -> None:
        self._stall_s = stall_s
        self._process: _Process | None = None

    def fetch(self, number: int, footage: Footage, index: FileIndex, steps: Sequence[int]) -> NDArray[np.uint8]:
        """uint8 ``[steps, H, W, 3]``, upright, at grid ``steps`` (ascending, distinct) of video ``number``.

        The memory is shared with the decoding process, and used again when no array looks into it any more. Raises
        ``UserError`` naming the file: it can no longer be read, or its decoder hung or died; ``MachineError``
        where no decoder can be started, which says nothing of the file.
        """
        if self._process is None:
            self._process = _Process()
        process = self._process
        frames, block = process.memory.take(len(steps) * index.height * index.width * 3)
        opens, closes = None, []
        if number in process.files:
            process.files.move_to_end(number)
        else:
            opens = (footage.name, footage, index)
            process.files[number] = None
            if len(process.files) > OPEN_FILES:
                closes.append(process.files.popitem(last=False)[0])
        payload: dict[str, Any] = {
            "file": number,
            "opens": opens,
            "closes": closes,
            "steps": list(steps),
            "memory": process.memory.file.fileno(),
            "block": (block.offset, block.size),
            "drops": process.memory.dropped(),
        }
        try:
            height, width = self._ask(process.child, payload, footage.name)
        except BaseException:
            # Also after an ordinary refusal: an open file that failed once is not asked again.
            self.close()
            raise
        return frames.reshape(len(steps), height, width, 3)

    def _ask(self, child: Child, payload: dict[str, Any], path: str) -> tuple[int, int]:
        while not child.ready:
            if child.pipe.poll(POLL_S):
                hear(child)
            else:
                late(child)
        child.task = 0
        child.heard()
        with contextlib.suppress(OSError):  # it has just died, which is heard below
            child.pipe.send(payload)
        while True:
            event = hear(child) if child.pipe.poll(POLL_S) else stalled(child, self._stall_s)
            if isinstance(event, Refused):
                raise UserError(f"{path}: {event.reason}")
            if isinstance(event, Finished):
                child.task = None
                height, width = event.result
                return int(height), int(width)

    def close(self) -> None:
        """End the decoding process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.end()


class _SharedBuffers(Buffers):
    """Blocks of one file that both processes map."""

    def __init__(self) -> None:
        super().__init__()
        self.file = _anonymous()
        self._size = 0
        self._dropped: list[int] = []

    def make(self, size: int) -> Block:
        offset = self._size
        os.ftruncate(self.file.fileno(), offset + size)
        self._size += size
        return Block(mmap.mmap(self.file.fileno(), size, offset=offset), size, offset)

    def drop(self, block: Block) -> None:
        if hasattr(mmap, "MADV_REMOVE"):  # gives the memory back; the stretch of the file stays, empty
            block.memory.madvise(mmap.MADV_REMOVE)
        self._dropped.append(block.offset)

    def dropped(self) -> list[int]:
        """Where the blocks began that were let go since the last call."""
        offsets, self._dropped = self._dropped, []
        return offsets


class _Process:
    """A decoding process, the memory it writes to, and the files that it has open, oldest use first."""

    def __init__(self) -> None:
        self.memory = _SharedBuffers()
        self.files: OrderedDict[int, None] = OrderedDict()
        self.child = start_child(JOB, inherit=[self.memory.file.fileno()])
        self.end = weakref.finalize(self, _end, self.child, self.memory.file, os.getpid())


def _anonymous() -> IO[bytes]:
    """A file without a name; in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("marey-frames"), "w+b")
    return tempfile.TemporaryFile()


def _end(child: Child, memory: IO[bytes], owner: int) -> None:
    memory.close()
    if os.getpid() == owner:  # a fork of the owner has the object and not the process
        end_child(child)
