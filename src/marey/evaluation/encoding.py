"""``marey encode``: a frame store, videos or the demo's clips into latents and a manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from marey.core.errors import UserError
from marey.evaluation.labels import labels_from_csv
from marey.evaluation.wording import aligned, count
from marey.latents.codec_record import record_codec
from marey.latents.codecs import build_codec
from marey.latents.encode import encode
from marey.pixels.digits import demo_source
from marey.pixels.open import open_source

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SHOWN = 20
"""Clips that were left out, of which so many are named."""
VIDEO_RATE, VIDEO_EPISODE_LENGTH = 15.0, 128


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` words as a codec's keywords, numbers as numbers. UserError for a word without ``=``."""
    options: dict[str, Any] = {}
    for word in words:
        key, found, value = word.partition("=")
        if not found or not key:
            raise UserError(f"--option {word} is not KEY=VALUE, as in --option patch=8")
        whole, decimal = re.fullmatch(r"-?\d+", value), re.fullmatch(r"-?\d*\.\d+", value)
        options[key] = int(value) if whole else float(value) if decimal else value
    return options


def encode_store(
    source: str,
    out: Path,
    *,
    codec: str = "patch",
    options: Mapping[str, Any] | None = None,
    dtype: str = "float16",
    texts: Path | None = None,
    text_column: str = "text",
) -> str:
    """Encode every episode of ``source`` into ``out`` and say what was done; a second call finishes a first one's work.

    A clip that cannot be read or encoded is left out and listed.

    texts: a CSV with columns ``path`` and ``text_column``, joined by video file. Raises UserError for a source, codec
    or folder that cannot be used, and where nothing could be encoded.
    """
    built = build_codec(codec, options)
    path = str(demo_source(source.removeprefix("demo:"))) if source.startswith("demo:") else source
    frames = open_source(path, name=None, video_rate=VIDEO_RATE, video_episode_length=VIDEO_EPISODE_LENGTH)
    words = None if texts is None else labels_from_csv(frames.files, texts, text_column, where=frames.path).values
    done = encode(frames, out, built, texts=words, dtype=DTYPES[dtype])
    record_codec(done.manifest.parent, codec, options or {})
    rows = [
        ("clips", f"{done.clips:,}" + (f", {done.reused:,} of them from an earlier call" if done.reused else "")),
        ("left out", f"{count(len(done.skipped), 'clip')} (skipped.csv lists them)" if done.skipped else ""),
        *(("", _one_line(clip, reason)) for clip, reason in done.skipped[:SHOWN]),
        ("", f"and {len(done.skipped) - SHOWN:,} more" if len(done.skipped) > SHOWN else ""),
        ("codec", built.fingerprint),
        ("latents", f"{built.channels} channels, a cell per {built.spatial} x {built.spatial} pixels, {dtype}"),
        ("train", f"marey train --config-name causal_video data.train={done.manifest}"),
    ]
    return "\n".join([f"{done.manifest}: {count(done.clips, 'clip')} from {frames.path}", *aligned(rows, indent=2)])


def _one_line(clip: str, reason: str) -> str:
    return reason if clip in reason else f"{clip}: {reason}"
