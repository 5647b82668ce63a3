"""Footage that FFmpeg decodes: a media file, its bytes within another file, or a time window of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import av
import av.container
import av.video.stream

from marey.pixels.footage import Blob, Counts, Decoded, Decoding, FileIndex, FrameReader
from marey.pixels.media import Unreadable, open_video, promised_seconds, reason_of


class Window(NamedTuple):
    """A stretch of a file's time line: frames from ``start_s`` up to, not including, ``end_s``."""

    start_s: float
    end_s: float
    rate: float
    """Frames per second of the file; a frame within half a frame of an edge belongs to the side it rounds to."""
    frames: int | None
    """How many are promised."""
    share: float
    """Of the file's bytes, 0 to 1."""


@dataclass(frozen=True)
class Container:
    """A media file, or a window of one."""

    name: str
    blob: Blob
    window: Window | None = None

    def size(self) -> float:
        """Bytes."""
        return self.blob.size() * (self.window.share if self.window else 1.0)

    def identity(self) -> list[Any]:
        """The bytes', and the window."""
        return self.blob.identity() + ([list(self.window)] if self.window else [])

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[av.container.InputContainer, av.video.stream.VideoStream]]:
        """Container and video stream. Raises ``Unreadable``."""
        source = self.blob.opened()
        with contextlib.ExitStack() as stack:
            if not isinstance(source, str):
                stack.enter_context(contextlib.closing(source))
            yield stack.enter_context(open_video(source))

    @contextlib.contextmanager
    def decoding(self, counts: Counts, *, rate: Fraction) -> Iterator[Decoding]:  # noqa: ARG002 (it has a clock)
        """See ``Footage``."""
        with self.opened() as (container, stream):
            if stream.time_base is None:
                raise Unreadable("has no clock (no time base)")
            if self.window is None:
                counts.promised = stream.frames or None
                counts.promised_s = None if counts.promised else promised_seconds(container, stream)
                frames = _frames(container, stream, counts, self.blob.size())
            else:
                counts.promised = self.window.frames
                frames = _windowed(container, stream, counts, self.window)
            yield Decoding(stream.time_base, frames)

    def reader(self, index: FileIndex, *, tick: Callable[[], None] | None = None) -> FrameReader:
        """See ``Footage``."""
        from marey.pixels.reader import VideoReader

        return VideoReader(self, index, tick=tick)


def _frames(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, counts: Counts, size: float
) -> Iterator[Decoded]:
    fraction = 0.0
    for packet in _packets(container, stream, counts):
        if packet.is_discard and counts.promised is not None:
            counts.promised -= 1  # an edit list cuts it away: nobody is promised to see it
        if packet.pos is not None and packet.pos > 0:
            fraction = max(fraction, min(1.0, packet.pos / size))
        for frame in _decoded(packet, stream, counts):
            yield Decoded(frame, fraction)


def _windowed(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, counts: Counts, window: Window
) -> Iterator[Decoded]:
    """The frames whose time stamps lie in the window, decoded from the key frame before it."""
    base = Fraction(stream.time_base or 0)
    half = Fraction(1, 2) / Fraction(window.rate).limit_denominator(100_000)
    start, end = (Fraction(edge).limit_denominator(1_000_000) - half for edge in (window.start_s, window.end_s))
    frames = _ascending(container, stream, counts)
    if start > 0:
        frames = _from_key(container, stream, counts, int(start / base), int((start + 2 * half) / base))
    for frame in frames:
        time = frame.pts * base
        if time >= end:
            return
        fraction = float(min(Fraction(1), max(Fraction(0), (time - start) / (end - start))))
        yield Decoded(frame, fraction, own=time >= start)


def _from_key(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, counts: Counts, stamp: int, latest: int
) -> Iterator[av.VideoFrame]:
    """From the key frame before ``stamp``; from the front where no frame up to ``latest`` decodes from there."""
    first = None
    if _seek(container, stream, stamp):
        first = next(_ascending(container, stream, Counts()), None)
    back = stamp if first is not None and first.pts is not None and first.pts <= latest else 0
    if not _seek(container, stream, back):
        raise Unreadable("cannot be searched for its episodes")
    yield from _ascending(container, stream, counts)


def _seek(container: av.container.InputContainer, stream: av.video.stream.VideoStream, stamp: int) -> bool:
    try:
        container.seek(max(0, stamp), stream=stream, backward=True)
    except av.FFmpegError:
        return False
    return True


def _ascending(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, counts: Counts
) -> Iterator[Any]:
    """Frames by their time stamps; one out of order is as good as lost, since nobody can say when it is shown."""
    newest: int | None = None
    for packet in _packets(container, stream, counts):
        for frame in _decoded(packet, stream, counts):
            if frame.pts is None:
                raise Unreadable("its frames carry no time stamps, so its episodes cannot be told apart")
            if newest is not None and frame.pts <= newest:
                counts.error("a time stamp that does not ascend")
                continue
            newest = frame.pts
            yield frame


def _packets(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, counts: Counts
) -> Iterator[Any]:
    try:
        yield from container.demux(stream)
    except av.FFmpegError as error:
        counts.error(reason_of(error))
        yield av.Packet()  # an empty packet flushes the frames the decoder still holds


def _decoded(packet: Any, stream: av.video.stream.VideoStream, counts: Counts) -> list[av.VideoFrame]:
    try:
        frames = packet.decode() if packet.size else stream.codec_context.decode(None)
    except av.FFmpegError as error:
        if not isinstance(error, av.error.EOFError):
            counts.error(reason_of(error))
        return []
    return list(frames)
