"""Random access into a video file by its index: seek to a key frame, decode forward to the frame asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.pixels.container import Container
from marey.pixels.footage import FileIndex, WholeFile
from marey.pixels.media import Unreadable
from marey.pixels.picture import Painter, Size

READ_LIMIT_S = 60.0
"""Seconds that finding one frame may take."""


class VideoReader:
    """One open file. Not for sharing between processes or threads.

    A C call that never returns cannot be interrupted here: ``pixels.guard`` has this done in a process that can be
    killed. ``tick`` is called once per decoded frame.
    """

    def __init__(self, video: str | Container, index: FileIndex, *, tick: Callable[[], None] | None = None) -> None:
        self._footage = Container(video, WholeFile(video)) if isinstance(video, str) else video
        self.path, self._index, self._tick = self._footage.name, index, tick
        self._stack = contextlib.ExitStack()
        self._container: Any = None
        self._stream: Any = None
        self._frames: Iterator[av.VideoFrame] = iter(())
        self._held: av.VideoFrame | None = None
        self._ordinal = -1  # of the held frame, where the file is read from its start
        self._painter = Painter(size=Size(index.height, index.width))

    def close(self) -> None:
        """Close the file."""
        self._stack.close()

    def fetch(self, steps: Sequence[int]) -> dict[int, NDArray[np.uint8]]:
        """uint8 ``[H, W, 3]`` by grid step. Raises ``UserError`` naming the file."""
        return {step: np.ascontiguousarray(picture) for step, picture in self.each(sorted(set(steps)))}

    def each(self, steps: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """As ``fetch``, one after another, for ``steps`` that are ascending and distinct."""
        last: tuple[int, NDArray[np.uint8]] | None = None
        for step in steps:
            ordinal = int(self._index.ordinals[step])
            if last is None or last[0] != ordinal:
                last = ordinal, self._painter.view(self._find(step, ordinal))
            yield step, last[1]

    def _find(self, step: int, ordinal: int) -> av.VideoFrame:
        deadline = time.monotonic() + READ_LIMIT_S
        try:
            if self._index.seekable:
                frame = self._by_stamp(int(self._index.stamps[step]), deadline)
            else:
                frame = self._by_count(ordinal, deadline)
        except (Unreadable, av.FFmpegError) as error:
            raise UserError(f"{self.path} can no longer be read ({error}); check the file and start again") from None
        if frame is None:
            raise UserError(
                f"{self.path}: the frame at step {step} decoded when the file was indexed and does not now; "
                "check the file and start again"
            )
        return frame

    def _by_stamp(self, stamp: int, deadline: float) -> av.VideoFrame | None:
        held = None if self._held is None else self._held.pts
        keys = self._index.keys
        at = int(np.searchsorted(keys, stamp, side="right")) - 1
        if held is not None and held <= stamp and (at < 0 or keys[at] <= held):
            frame = self._forward_to(stamp, deadline)  # no key frame between here and there: reading on is shortest
            if frame is not None:
                return frame
        while at >= 0:
            self._seek(int(keys[at]))
            frame = self._forward_to(stamp, deadline)
            if frame is not None:
                return frame
            at -= 1  # the seek landed late, or frames before this key frame need an earlier one
        self._restart()
        return self._forward_to(stamp, deadline)

    def _forward_to(self, stamp: int, deadline: float) -> av.VideoFrame | None:
        while self._held is None or self._held.pts is None or self._held.pts < stamp:
            self._held = self._next(deadline)
            if self._held is None:
                return None
        return self._held if self._held.pts == stamp else None

    def _by_count(self, ordinal: int, deadline: float) -> av.VideoFrame | None:
        if self._container is None or self._ordinal > ordinal:
            self._restart()
        while self._ordinal < ordinal:
            self._held = self._next(deadline)
            self._ordinal += 1
            if self._held is None:
                self._ordinal = len(self._index.ordinals) + ordinal  # past the end: start over next time
                return None
        return self._held

    def _seek(self, stamp: int) -> None:
        if self._container is None:
            self._restart()
        try:
            self._container.seek(stamp, stream=self._stream, backward=True)
        except av.FFmpegError:  # a container that cannot seek (GIF) is read from its start
            self._restart()
            return
        self._frames, self._held = self._decode(), None

    def _restart(self) -> None:
        self._stack.close()
        self._container, self._stream = self._stack.enter_context(self._footage.opened())
        self._frames, self._held, self._ordinal = self._decode(), None, -1

    def _next(self, deadline: float) -> av.VideoFrame | None:
        frame = next(self._frames, None)
        if self._tick is not None:
            self._tick()
        if time.monotonic() > deadline:
            raise UserError(
                f"{self.path}: finding one frame took more than {READ_LIMIT_S:g} s; the disk may be unreachable, or "
                "key frames too rare (`marey ingest` reads each file once, in order)"
            )
        return frame

    def _decode(self) -> Iterator[av.VideoFrame]:
        container, stream = self._container, self._stream
        with contextlib.suppress(av.FFmpegError):
            for packet in container.demux(stream):
                yield from _decoded(packet, stream)
            return
        yield from _decoded(av.Packet(), stream)


def _decoded(packet: Any, stream: Any) -> list[av.VideoFrame]:
    try:
        return list(packet.decode() if packet.size else stream.codec_context.decode(None))
    except av.FFmpegError:  # skipped when the file was indexed, too
        return []
