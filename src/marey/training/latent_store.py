"""Frames behind ``data.train`` of a causal run: encoded once into the cache, then read as a manifest."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from marey.config.causal import DEMO, LatentDataConfig
from marey.core.errors import UserError
from marey.core.files import cache_dir
from marey.latents.codec_record import record_codec, recorded_codec
from marey.latents.codecs import Codec, build_codec
from marey.latents.encode import MANIFEST, STATE, encode
from marey.latents.text import label_text
from marey.pixels.digits import demo_captions, demo_source
from marey.pixels.open import open_source
from marey.pixels.shrunk import Shrunk
from marey.training.latents import DEMO_SIDE, demo_latents, encoding_name


def encoded(path: str, data: LatentDataConfig) -> Path:
    """The manifest of the latents of ``path`` (``demo:SPLIT``, a store, videos) through ``data.codec``.

    Several processes may ask at once: one encodes, the others wait. Raises UserError as ``encode`` and
    ``open_source`` do.
    """
    codec = build_codec(data.codec.name, data.codec.options)
    if path.startswith(DEMO):
        split = path.removeprefix(DEMO)
        store = open_source(str(demo_source(split)), video_rate=15.0, video_episode_length=1)
        source: Any = Shrunk(store, DEMO_SIDE)
        captions = demo_captions(split)
        texts: list[str | None] | None = [captions[Path(file).name] for file in source.files]
        folder = Path(store.path).parent / demo_latents(split, data)
    else:
        source = open_source(path, video_rate=data.video_rate, video_episode_length=data.video_episode_length)
        folder = cache_dir() / "latents" / encoding_name(data, str(Path(path).resolve()), source.version)
        texts = _texts(source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _complete(folder, codec):
            encode(source, folder, codec, texts=texts)
            record_codec(folder, data.codec.name, data.codec.options or {})
    return folder / MANIFEST


def _complete(folder: Path, codec: Codec) -> bool:
    """Whether every file is there and of this codec; they are written after the latents."""
    if not all((folder / name).is_file() for name in (MANIFEST, STATE)):
        return False
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        recorded = recorded_codec(folder)
    except (ValueError, UserError):
        return False  # encoding again says what is wrong with it, or writes it anew
    return recorded is not None and bool(state.get("fingerprint") == codec.fingerprint)


def _texts(source: Any) -> list[str | None] | None:
    """The label of each episode, where there are labels."""
    labels = getattr(source, "labels", None)
    if labels is None:
        return None
    names = getattr(source, "label_names", None)
    return [label_text(label, names) for label in labels.tolist()]
