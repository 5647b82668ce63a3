"""Footage made of pictures: a folder of images, one a frame, and animated WebP (which FFmpeg does not decode)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from marey.core.errors import UserError
from marey.pixels.footage import Blob, Counts, Decoded, Decoding, FileIndex, FrameReader
from marey.pixels.media import Unreadable, regular_size
from marey.pixels.naming import natural_key
from marey.pixels.picture import Painter, Size

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
FORMATS = ("JPEG", "PNG", "WEBP")
DEFAULT_MS = 100
"""How long a picture is shown that says 0, as browsers have it."""
# What Pillow's plugins raise on damage, and the refusal of a picture that would take too much memory.
_DAMAGE = (
    OSError, ValueError, SyntaxError, IndexError, KeyError, TypeError, EOFError, MemoryError, RuntimeError,
    struct.error, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip


def image_names(folder: Path | str) -> list[str]:
    """Images of a folder in natural order, hidden names left out."""
    with os.scandir(folder) as items:
        names = [item.name for item in items if is_image(item.name) and not item.is_dir()]
    return sorted(names, key=lambda name: (natural_key(name), name))


def is_image(name: str) -> bool:
    """Whether a file's name is that of an image."""
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


@dataclass(frozen=True)
class Stills:
    """A folder of images, each one stored frame: they have no clock, so the stored rate is theirs."""

    name: str
    """The folder's absolute path."""

    def _listed(self) -> list[tuple[str, os.stat_result]]:
        try:
            found = [(name, os.stat(f"{self.name}/{name}")) for name in image_names(self.name)]  # noqa: PTH116
        except OSError as error:
            raise Unreadable(f"cannot be opened: {error.strerror} ({Path(str(error.filename)).name})") from None
        if not found:
            raise Unreadable(f"holds no image ({', '.join(IMAGE_SUFFIXES)})")
        return found

    def size(self) -> float:
        """Bytes of all images."""
        return sum(status.st_size for _, status in self._listed())

    def identity(self) -> list[Any]:
        """Every image's name, size and time of change, as a digest."""
        digest = hashlib.sha256()
        for name, status in self._listed():
            digest.update(os.fsencode(name) + f"\0{status.st_size} {status.st_mtime_ns}\0".encode())
        return ["stills", os.fsencode(self.name).hex(), digest.hexdigest()]

    @contextlib.contextmanager
    def decoding(self, counts: Counts, *, rate: Fraction) -> Iterator[Decoding]:
        """See ``Footage``; time stamps are the images' numbers, counted from 0."""
        names = [name for name, _ in self._listed()]
        counts.promised = len(names)
        yield Decoding(1 / rate, self._frames(names, counts, 1 / rate))

    def _frames(self, names: Sequence[str], counts: Counts, time_base: Fraction) -> Iterator[Decoded]:
        for number, name in enumerate(names):
            try:
                pixels = _one_image(f"{self.name}/{name}")
            except Unreadable as error:
                counts.error(f"{name} {error}")
                continue
            yield Decoded(_as_frame(pixels, number, time_base), (number + 1) / len(names))

    def reader(self, index: FileIndex, *, tick: Callable[[], None] | None = None) -> FrameReader:
        """See ``Footage``."""
        names = [name for name, _ in self._listed()]

        def picture(step: int) -> NDArray[np.uint8]:
            return _one_image(f"{self.name}/{names[int(index.stamps[step])]}")

        return _PictureReader(self.name, index, picture, tick)


@dataclass(frozen=True)
class Animation:
    """An animated WebP, by the times it says itself."""

    name: str
    blob: Blob

    def size(self) -> float:
        """Bytes."""
        return self.blob.size()

    def identity(self) -> list[Any]:
        """The bytes'."""
        return self.blob.identity()

    @contextlib.contextmanager
    def decoding(self, counts: Counts, *, rate: Fraction) -> Iterator[Decoding]:  # noqa: ARG002 (it has a clock)
        """See ``Footage``."""
        with _animation(self.blob) as image:
            counts.promised = getattr(image, "n_frames", 1)
            time_base = Fraction(1, 1000)
            yield Decoding(time_base, self._frames(image, counts, time_base))

    def _frames(self, image: Image.Image, counts: Counts, time_base: Fraction) -> Iterator[Decoded]:
        total, now = counts.promised or 1, 0
        for number in range(total):
            try:
                pixels = _nth(image, number)
            except Unreadable as error:  # each frame builds on those before it: the rest is lost too
                counts.error(f"frame {number} {error}")
                return
            yield Decoded(_as_frame(pixels, now, time_base), (number + 1) / total)
            now += round(image.info.get("duration") or DEFAULT_MS)

    def reader(self, index: FileIndex, *, tick: Callable[[], None] | None = None) -> FrameReader:
        """See ``Footage``."""
        stack = contextlib.ExitStack()
        image = stack.enter_context(_animation(self.blob))
        return _PictureReader(self.name, index, lambda step: _nth(image, int(index.ordinals[step])), tick, stack)


class _PictureReader:
    """A ``FrameReader`` over pictures that can be had one by one."""

    def __init__(
        self,
        name: str,
        index: FileIndex,
        picture: Callable[[int], NDArray[np.uint8]],
        tick: Callable[[], None] | None,
        stack: contextlib.ExitStack | None = None,
    ) -> None:
        self._name, self._index, self._picture, self._tick = name, index, picture, tick
        self._stack = stack or contextlib.ExitStack()
        self._painter = Painter(size=Size(index.height, index.width))

    def fetch(self, steps: Sequence[int]) -> dict[int, NDArray[np.uint8]]:
        return dict(self.each(sorted(set(steps))))

    def each(self, steps: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        last: tuple[int, NDArray[np.uint8]] | None = None
        for step in steps:
            ordinal = int(self._index.ordinals[step])
            if last is None or last[0] != ordinal:
                try:
                    frame = _as_frame(self._picture(step), 0, Fraction(1))
                except (Unreadable, IndexError) as error:
                    raise UserError(
                        f"{self._name} can no longer be read ({error}); check the file and start again"
                    ) from None
                last = ordinal, self._painter.rgb(frame)
                if self._tick is not None:
                    self._tick()
            yield step, last[1]

    def close(self) -> None:
        self._stack.close()


def is_animated_webp(head: bytes) -> bool:
    """By the first 21 bytes of a file: an extended WebP whose header has the animation flag."""
    return head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) > 20 and bool(head[20] & 2)


@contextlib.contextmanager
def _animation(blob: Blob) -> Iterator[Image.Image]:
    source = blob.opened()
    with contextlib.ExitStack() as stack:
        if not isinstance(source, str):
            stack.enter_context(contextlib.closing(source))
        with _damage_as_unreadable():
            image = stack.enter_context(Image.open(source, formats=("WEBP",)))
        yield image


def _one_image(path: str) -> NDArray[np.uint8]:
    regular_size(path)  # a FIFO would be waited for
    with _damage_as_unreadable(), Image.open(path, formats=FORMATS) as image:
        return _pixels(image)


def _nth(image: Image.Image, number: int) -> NDArray[np.uint8]:
    with _damage_as_unreadable():
        image.seek(number)
        return _pixels(image)


def _pixels(image: Image.Image) -> NDArray[np.uint8]:
    if image.mode.startswith(("I", "F")):
        raise Unreadable("has more than 8 bits a pixel; convert it to 8 bits")
    return np.ascontiguousarray(ImageOps.exif_transpose(image).convert("RGB"))


@contextlib.contextmanager
def _damage_as_unreadable() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            yield
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise Unreadable("is larger than any video frame") from None
        except UnidentifiedImageError:
            raise Unreadable("is not a JPEG, PNG or WebP image") from None
        except _DAMAGE as error:
            raise Unreadable(f"is not a whole image ({' '.join(str(error).split())})") from None


def _as_frame(pixels: NDArray[np.uint8], stamp: int, time_base: Fraction) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
    frame.pts, frame.time_base = stamp, time_base
    return frame
