"""Folders of images, each folder one video and each image one stored frame."""

from __future__ import annotations

from marey.pixels.listfile import Entry
from marey.pixels.pictures import IMAGE_SUFFIXES, Stills
from marey.pixels.sourceformat import Request, SourceFormat


def _read(request: Request) -> tuple[list[Entry], str]:
    entries = [Entry(path=path, origin=request.source, footage=Stills(path)) for path in request.paths]
    return entries, f"{len(entries)} folder{'s' * (len(entries) != 1)} of images, each image one stored frame"


FORMAT = SourceFormat(title="folders of images", read=_read, members=IMAGE_SUFFIXES)
