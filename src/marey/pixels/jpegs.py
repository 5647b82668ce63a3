"""Encoded frames back to pixels: JPEG through TurboJPEG, anything else through Pillow."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
from numpy.typing import NDArray


def decode_frame(encoded: memoryview | bytes, out: NDArray[np.uint8]) -> str | None:
    """Decode into ``out`` (uint8 ``[H, W, 3]``, contiguous); None if done, else what is wrong, as a verb phrase."""
    if bytes(encoded[:2]) == b"\xff\xd8":
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(encoded)
            if space in ("RGB", "YCbCr", "Gray"):
                if (height, width) != out.shape[:2]:
                    return f"is {height}x{width} where its row says {out.shape[0]}x{out.shape[1]}"
                simplejpeg.decode_jpeg(encoded, colorspace="RGB", buffer=out)
                return None
        except ValueError as error:
            return f"is not a whole JPEG ({error})"
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        return "is not a JPEG or PNG"
    except (OSError, ValueError, SyntaxError) as error:  # Pillow's plugins raise all of these on damage
        return f"is not a whole image ({error})"
    if pixels.shape != out.shape:
        return f"is {pixels.shape[0]}x{pixels.shape[1]} where its row says {out.shape[0]}x{out.shape[1]}"
    out[:] = pixels
    return None
