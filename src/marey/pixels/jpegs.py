"""Encoded frames back to pixels: JPEG through TurboJPEG, anything else through Pillow."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Sequence

import numpy as np
import simplejpeg
from numpy.typing import NDArray

JPEG = b"\xff\xd8"


def frame_size(encoded: memoryview | bytes) -> tuple[int, int] | None:
    """(height, width) by the header of a JPEG; None for anything else."""
    if bytes(encoded[:2]) != JPEG:
        return None
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(encoded)
    except ValueError:
        return None
    return int(height), int(width)


def decode_clip(
    encoded: Sequence[memoryview | bytes], places: Sequence[int], out: NDArray[np.uint8]
) -> tuple[int, str] | None:
    """Decode ``encoded[place]`` for each of ``places`` into ``out`` (uint8 ``[places, H, W, 3]``, contiguous).

    A frame asked for again is copied. None if done, else the first position that fails and what is wrong with it.
    """
    done: dict[int, int] = {}
    for position, place in enumerate(places):
        if place in done:
            out[position] = out[done[place]]
            continue
        done[place] = position
        fault = decode_frame(encoded[place], out[position])
        if fault:
            return position, fault
    return None


def decode_frame(encoded: memoryview | bytes, out: NDArray[np.uint8]) -> str | None:
    """Decode into ``out`` (uint8 ``[H, W, 3]``, contiguous); None if done, else what is wrong, as a verb phrase.

    Sizes are compared by the header: no memory is taken for a picture that does not fit ``out``.
    """
    if bytes(encoded[:2]) == JPEG:
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(encoded)
            if space in ("RGB", "YCbCr", "Gray"):
                if (height, width) != out.shape[:2]:
                    return _other_size((height, width), out)
                simplejpeg.decode_jpeg(encoded, colorspace="RGB", buffer=out)
                return None
        except ValueError as error:
            return f"is not a whole JPEG ({error})"
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG")) as image:
                if image.size != (out.shape[1], out.shape[0]):
                    return _other_size(image.size[::-1], out)
                out[:] = np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        return "is not a JPEG or PNG"
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return "is larger than any video frame"
    # Pillow's plugins raise all of these on damage.
    except (OSError, ValueError, SyntaxError, IndexError, KeyError, TypeError, struct.error, zlib.error) as error:
        return f"is not a whole image ({error})"
    return None


def _other_size(size: tuple[int, ...], out: NDArray[np.uint8]) -> str:
    return f"is {size[0]}x{size[1]} where its row says {out.shape[0]}x{out.shape[1]}"
