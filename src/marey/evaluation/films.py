"""Two videos side by side as MP4, GIF and a page's animated picture.

Legend: T frames, H and W pixels.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

import av
import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from marey.core.errors import UserError
from marey.core.files import atomic_write
from marey.evaluation.pictures import Pixels

ENCODERS = ("libx264", "libopenh264", "mpeg4")
"""The first that PyAV's FFmpeg has; its wheels have libx264."""
LEAST_SIDE = 160
"""Pixels: smaller videos are enlarged, each pixel a block, to at least this height."""
TITLE, BAR, GAP = 18, 4, 6
PAPER, INK, GIVEN, GUESSED = (248, 246, 241), (30, 27, 23), (98, 92, 83), (178, 58, 18)
"""Given frames have a grey bar beneath them, predicted ones a red one."""
DEFAULT_FPS = 8.0


def side_by_side(videos: Sequence[tuple[str, Tensor]], *, known: int) -> Pixels:
    """uint8 ``[T, H, W, 3]``, even in H and W: each of ``videos`` (a title, uint8 ``[T, 3, h, w]``) in a panel.

    The first ``known`` frames are marked as given, the others as predicted.
    """
    frames, _, height, width = videos[0][1].shape
    assert all(video.shape == videos[0][1].shape for _, video in videos), [v.shape for _, v in videos]
    scale = max(1, -(-LEAST_SIDE // height))
    h, w = height * scale, width * scale
    total_w, total_h = len(videos) * w + (len(videos) - 1) * GAP, TITLE + h + BAR
    out = np.empty((frames, total_h + total_h % 2, total_w + total_w % 2, 3), np.uint8)
    out[:] = PAPER
    title = Image.new("RGB", (total_w, TITLE), PAPER)
    for place, (name, video) in enumerate(videos):
        left = place * (w + GAP)
        ImageDraw.Draw(title).text((left + 2, 3), name, fill=INK)
        pixels = video.permute(0, 2, 3, 1).numpy().repeat(scale, axis=1).repeat(scale, axis=2)
        out[:, TITLE : TITLE + h, left : left + w] = pixels
        out[:known, TITLE + h : TITLE + h + BAR, left : left + w] = GIVEN
        out[known:, TITLE + h : TITLE + h + BAR, left : left + w] = GUESSED
    out[:, :TITLE, :total_w] = np.asarray(title)
    return out


def write_mp4(path: Path, frames: Pixels, *, fps: float) -> None:
    """uint8 ``[T, H, W, 3]``, H and W even, as MP4; whole or not at all. UserError where PyAV has no encoder."""
    encoder = next((name for name in ENCODERS if _has(name)), None)
    if encoder is None:
        raise UserError(
            f"this PyAV has no video encoder (looked for {', '.join(ENCODERS)}); install PyAV's own wheel with "
            "pip install --force-reinstall av"
        )
    with atomic_write(path) as file, av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(encoder, rate=Fraction(fps).limit_denominator(1000))
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        if encoder == "libx264":
            stream.options = {"crf": "14"}
        else:
            stream.bit_rate = 4_000_000
        for pixels in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)


def _has(name: str) -> bool:
    try:
        av.Codec(name, "w")
    except ValueError:
        return False
    return True


def write_gif(path: Path, frames: Pixels, *, fps: float) -> None:
    """uint8 ``[T, H, W, 3]`` as a GIF that repeats for ever; whole or not at all."""
    with atomic_write(path) as file:
        _save(file, frames, fps=fps)


def moving_uri(frames: Pixels, *, fps: float) -> str:
    """The same GIF as a ``data:`` address."""
    buffer = io.BytesIO()
    _save(buffer, frames, fps=fps)
    return f"data:image/gif;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _save(file: IO[Any], frames: Pixels, *, fps: float) -> None:
    images = [Image.fromarray(pixels).quantize(256, dither=Image.Dither.NONE) for pixels in frames]
    # A GIF counts hundredths of a second; the last frame stays a second, so that the end is seen.
    each = max(20, round(100 / fps) * 10)
    durations = [each] * (len(images) - 1) + [1000]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
