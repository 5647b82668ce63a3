"""What a video is read from, whatever it is stored in: a file, a stretch of one, a folder of pictures.

A ``Footage`` names its frames and can tell when they change. It is small, holds nothing open, and is sent to the
process that decodes it. What a new source format has to give is one of these for each video.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import av
import numpy as np
from numpy.typing import NDArray

from marey.pixels.media import Unreadable, modified_ns, regular_size


@dataclass
class Counts:
    """What a video promised and what it gave."""

    promised: int | None = None
    """Frames by the container's index; None where it does not say. Never used to decode, only to compare."""
    promised_s: float | None = None
    """Seconds by the header, where the container counts no frames; None where that does not say either."""
    decoded: int = 0
    seconds: float = 0.0
    """What the frames that decode cover."""
    steps: int = 0
    repeats: int = 0
    """Grid steps that show the same frame as the step before."""
    breaks: int = 0
    """Missing, backward or leaping time stamps."""
    damaged: int = 0
    """Frames the decoder gave but marked as corrupt."""
    errors: int = 0
    first_error: str | None = None
    true_rate: float | None = None

    def error(self, reason: str) -> None:
        """Count a frame, or a stretch, that does not decode; the first reason is kept."""
        self.errors += 1
        self.first_error = self.first_error or reason

    def partial(self) -> str | None:
        """One phrase where less was read than the video holds, else None."""
        parts = []
        if self.promised is not None and self.decoded < self.promised:
            parts.append(f"{self.decoded} of {self.promised} promised frames decode")
        if self.promised_s is not None and self.seconds < self.promised_s - max(0.1, 3 / (self.true_rate or 1)):
            parts.append(f"{self.seconds:.2f} of {self.promised_s:.2f} promised seconds decode")
        if self.errors:
            parts.append(f"{self.errors} decoding errors (first: {self.first_error})")
        if self.damaged:
            parts.append(f"{self.damaged} frames are marked as damaged")
        return "; ".join(parts) or None


class FileIndex(NamedTuple):
    """Where each grid step of a video is found again. int64 arrays; ``[steps]`` unless said otherwise."""

    stamps: NDArray[np.int64]
    """Time stamp, in ticks, of the frame on screen at each step (0 where the video has none)."""
    ordinals: NDArray[np.int64]
    """The same frame, counted from the front among the frames that decode."""
    keys: NDArray[np.int64]
    """``[key frames]``: time stamps, ascending."""
    seekable: bool
    """Time stamps are all present and strictly ascending, so that one names one frame."""
    height: int
    width: int
    """Size of the first frame as it is coded (not turned upright); what the whole video is shown at."""
    repeats: int
    true_rate: float | None


class Decoded(NamedTuple):
    """A frame from the decoder, in the order of showing."""

    frame: av.VideoFrame
    fraction: float
    """How much of the footage is read by now, 0 to 1."""
    own: bool = True
    """Whether it belongs to the footage; what is decoded only to get there does not."""


class Decoding(NamedTuple):
    """An open footage."""

    time_base: Fraction
    """Seconds per tick of the frames' time stamps."""
    frames: Iterator[Decoded]


class FrameReader(Protocol):
    """Random access to the frames of one footage; belongs to one process."""

    def fetch(self, steps: Sequence[int]) -> dict[int, NDArray[np.uint8]]:
        """uint8 ``[H, W, 3]``, upright, by grid step. Raises ``UserError`` naming the video."""

    def each(self, steps: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """As ``fetch``, (grid step, picture of any strides) one after another; ``steps`` are ascending and distinct."""

    def close(self) -> None:
        """Let go of what is open."""


class Footage(Protocol):
    """One video, wherever its frames lie."""

    @property
    def name(self) -> str:
        """What it is called in a store and a report: an absolute path, or one with a member behind it."""

    def size(self) -> float:
        """Bytes to read, for progress. Raises ``Unreadable``."""

    def identity(self) -> list[Any]:
        """JSON values that change when its content does. Raises ``Unreadable``."""

    def decoding(self, counts: Counts, *, rate: Fraction) -> AbstractContextManager[Decoding]:
        """Open it to decode from front to back, noting in ``counts`` what is promised and what fails.

        ``rate``: stored frames per second, for footage that has no clock of its own. Raises ``Unreadable``.
        """

    def reader(self, index: FileIndex, *, tick: Callable[[], None] | None = None) -> FrameReader:
        """Random access by its index; ``tick`` is called for every frame that is decoded on the way."""


class Blob(Protocol):
    """Bytes that are a media file of their own, wherever they lie."""

    def size(self) -> float:
        """Bytes. Raises ``Unreadable``."""

    def identity(self) -> list[Any]:
        """JSON values that change when the bytes do. Raises ``Unreadable``."""

    def opened(self) -> str | IO[bytes]:
        """A path, or a binary file that can seek; whoever asks closes it. Raises ``Unreadable``."""


@dataclass(frozen=True)
class WholeFile:
    """A file as it is."""

    path: str

    def size(self) -> float:
        """Bytes."""
        return regular_size(self.path)

    def identity(self) -> list[Any]:
        """Path, size and time of change."""
        return [os.fsencode(self.path).hex(), regular_size(self.path), modified_ns(self.path)]

    def opened(self) -> str:
        """The path."""
        regular_size(self.path)
        return self.path


@dataclass(frozen=True)
class Span:
    """A stretch of a larger file (a member of a tar, say), read where it lies."""

    path: str
    start: int
    length: int
    """Bytes."""

    def size(self) -> float:
        """Bytes."""
        return self.length

    def identity(self) -> list[Any]:
        """The larger file's path, size and time of change, and where in it."""
        return [*WholeFile(self.path).identity(), self.start, self.length]

    def opened(self) -> IO[bytes]:
        """A file that ends where the stretch does."""
        regular_size(self.path)
        if self.length == 0:
            raise Unreadable("is empty (0 bytes)")
        try:
            return _SpanFile(self)  # type: ignore[return-value]  # a RawIOBase has all that is asked of an IO here
        except OSError as error:
            raise Unreadable(f"cannot be opened: {error.strerror}") from None


class _SpanFile(io.RawIOBase):
    """Reads by position: nothing outside the stretch is ever seen, and no state is shared with another reader."""

    def __init__(self, span: Span) -> None:
        self._file = Path(span.path).open("rb", buffering=0)  # noqa: SIM115 (closed with this one)
        self._start = span.start
        # A file that was cut short holds less than it says.
        self._length = max(0, min(span.length, os.fstat(self._file.fileno()).st_size - span.start))
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        data = os.pread(self._file.fileno(), count, self._start + self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(22, "seek before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()
