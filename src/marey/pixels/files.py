"""From a path to its footage: a video file, an animated picture, or a folder of images."""

from __future__ import annotations

from pathlib import Path

from marey.pixels.container import Container
from marey.pixels.footage import Blob, Footage, WholeFile
from marey.pixels.media import VIDEO_SUFFIXES
from marey.pixels.pictures import Animation, Stills


def footage_of(path: str) -> Footage:
    """Whatever stands at ``path``; that it cannot be read is found out when it is."""
    name = path.lower()
    if not name.endswith(VIDEO_SUFFIXES) and Path(path).is_dir():
        return Stills(path)
    return media(path, WholeFile(path))


def media(name: str, blob: Blob) -> Footage:
    """Bytes that are a media file, by the ending of ``name``."""
    return Animation(name, blob) if name.lower().endswith(".webp") else Container(name, blob)
