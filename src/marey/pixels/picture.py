"""A decoded frame as it is stored (JPEG) or handed on (RGB): upright, short edge bounded."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import av
import numpy as np
import simplejpeg
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from numpy.typing import NDArray

# Bicubic in FFmpeg's scaler widens its support when it shrinks, so it is antialiased; the other flags make the
# result the same on every processor.
_QUALITY = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.BITEXACT


class Size(NamedTuple):
    """Pixels, in the decoder's orientation (before turning upright)."""

    height: int
    width: int


def target_size(frame: av.VideoFrame, *, short_edge: int | None) -> Size:
    """Size of the stored picture: the short edge brought down to ``short_edge`` (never up).

    Pixels are taken as they are coded: a file's pixel aspect ratio is not applied, which would invent columns.
    """
    height, width = Fraction(frame.height), Fraction(frame.width)
    if short_edge is not None and min(height, width) > short_edge:
        scale = short_edge / min(height, width)  # exact
        height, width = height * scale, width * scale
    return Size(max(1, round(height)), max(1, round(width)))


def quarter_turns(frame: av.VideoFrame) -> int:
    """Counter-clockwise quarter turns that make the frame upright, by the file's display matrix."""
    return round((frame.rotation or 0) / 90) % 4


class Painter:
    """Turns frames of one file into pictures of one size: ``size`` if given (in the decoder's orientation), else
    the first frame's, bounded by ``short_edge``. Holds the scaler's state."""

    def __init__(self, *, short_edge: int | None = None, size: Size | None = None) -> None:
        self._short_edge = short_edge
        self._size = size
        self._scaler = VideoReformatter()

    def _target(self, frame: av.VideoFrame) -> Size:
        # A file whose resolution changes midway keeps the size it began with, so that an episode can be stacked.
        if self._size is None:
            self._size = target_size(frame, short_edge=self._short_edge)
        return self._size

    def shape(self, frame: av.VideoFrame) -> tuple[int, int]:
        """Height and width of the upright picture."""
        size = self._target(frame)
        return (size.width, size.height) if quarter_turns(frame) % 2 else (size.height, size.width)

    def jpeg(self, frame: av.VideoFrame, *, quality: int) -> bytes:
        """JPEG (4:2:0). Planes are scaled and encoded as they are, without a detour through RGB: 2.4 times faster."""
        return encoded(*self.planes(frame), quality=quality)

    def planes(self, frame: av.VideoFrame) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
        """Y ``[H, W]``, U and V half as large: uint8, upright, in JPEG's matrix (BT.601) and full range."""
        size = self._target(frame)
        scaled = self._scaler.reformat(
            frame,
            width=size.width,
            height=size.height,
            format="yuvj420p",
            dst_colorspace=Colorspace.ITU601,  # what JPEG means by YCbCr
            dst_color_range=ColorRange.JPEG,
            interpolation=_QUALITY,
            threads=1,
        )
        turns = quarter_turns(frame)
        y, u, v = (np.ascontiguousarray(np.rot90(_plane(plane), turns)) for plane in scaled.planes)
        return y, u, v

    def rgb(self, frame: av.VideoFrame) -> NDArray[np.uint8]:
        """uint8 ``[H, W, 3]``, contiguous."""
        return np.ascontiguousarray(self.view(frame))

    def view(self, frame: av.VideoFrame) -> NDArray[np.uint8]:
        """uint8 ``[H, W, 3]`` of any strides: the scaler's own memory, to be copied from."""
        size = self._target(frame)
        same = (size.height, size.width) == (frame.height, frame.width)
        scaled = self._scaler.reformat(
            frame,
            width=size.width,
            height=size.height,
            format="rgb24",
            interpolation=Interpolation.BILINEAR if same else _QUALITY,
            threads=1,
        )
        return np.rot90(scaled.to_ndarray(), quarter_turns(frame))


def encoded(y: NDArray[np.uint8], u: NDArray[np.uint8], v: NDArray[np.uint8], *, quality: int) -> bytes:
    """Planes (see ``Painter.planes``) as a JPEG."""
    return bytes(simplejpeg.encode_jpeg_yuv_planes(_evened(y), u, v, quality=quality))


def _plane(plane: av.video.plane.VideoPlane) -> NDArray[np.uint8]:
    rows = np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)
    return rows[:, : plane.width]


def _evened(luma: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same picture inside a buffer of even height and width, its edge repeated.

    TurboJPEG reads the luma plane up to the next even size. Without the margin it would read the next row's start
    and, at the end, whatever lies behind the buffer: the same frame would give different bytes.
    """
    height, width = luma.shape
    if height % 2 == 0 and width % 2 == 0:
        return luma
    buffer = np.empty((height + height % 2, width + width % 2), np.uint8)
    buffer[:height, :width] = luma
    buffer[:height, width:] = luma[:, -1:]
    buffer[height:] = buffer[height - 1 : height]
    return buffer[:height, :width]
