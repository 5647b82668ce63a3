"""Folders that a run writes to: whether they can be written, and room for what goes there."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from marey.doctor.findings import Cost, Finding, fail, ok, warn
from marey.evaluation.wording import size

if TYPE_CHECKING:
    from marey.doctor.needs import Needs

LOW_DISK, NO_DISK = 10e9, 1e9
"""Bytes free that are little for a run of unknown size, and too little for any."""
FEW_INODES = 10_000


class Usage(NamedTuple):
    """Bytes of a file system, and files that can still be made (None: not counted)."""

    total: float
    free: float
    inodes: int | None = None


def usage(path: Path) -> Usage:
    """Of the file system that ``path`` lies on."""
    found = shutil.disk_usage(path)
    status = os.statvfs(path)
    return Usage(found.total, found.free, status.f_favail if status.f_files else None)


def usage_or_none(folder: Path) -> Usage | None:
    """The same; None where there is no such folder, or the system does not say."""
    try:
        return usage(folder) if folder.is_dir() else None
    except OSError:
        return None


class Place(NamedTuple):
    """A folder that something is written to."""

    what: str
    """``checkpoints``."""
    path: Path
    elsewhere: str
    """How to name another: ``set checkpoint.dirpath``."""


class PlaceFacts(NamedTuple):
    """What was found at a place."""

    usage: Usage | None
    problem: str | None
    """Why nothing can be written there."""


def look_at(place: Place) -> PlaceFacts:
    """Write a few bytes where ``place`` is or would be made, and take them away again."""
    parents = [place.path.absolute(), *place.path.absolute().parents]
    folder = next(parent for parent in parents if os.path.lexists(parent))
    if not folder.is_dir():
        return PlaceFacts(None, f"{folder} is not a folder")
    try:
        # Permission bits do not tell: they mean nothing to root, or on a read-only or full file system.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".marey-doctor-") as file:
            file.write(b"doctor")
            file.flush()
        return PlaceFacts(usage(folder), None)
    except OSError as error:
        return PlaceFacts(None, f"nothing can be written in {folder} ({error.strerror or error})")


def check_disk(place: Place, facts: PlaceFacts, needs: Needs | None = None) -> Finding:
    """Room for what goes to ``place``: a run's checkpoints where it is known, else some gigabytes."""
    name = f"{place.what}"
    if facts.usage is None:
        return fail(
            name, f"{place.path}: {facts.problem}", Cost.START, f"{place.elsewhere} to a folder you may write to"
        )
    free, inodes = facts.usage.free, facts.usage.inodes
    said = f"{size(free)} free for {place.path}"
    room = f"make room, or {place.elsewhere} to another disk"
    if inodes is not None and inodes < FEW_INODES:
        return fail(name, f"{said}, but only {inodes:,} more files fit (inodes)", Cost.LATE, room)
    if place.what == "checkpoints" and needs is not None and needs.checkpoint_bytes is not None:
        one = needs.checkpoint_bytes
        said += f"; a checkpoint takes about {size(one)}"
        if free < 2 * one:  # a new one is complete before an old one goes
            return fail(name, said, Cost.LATE, room)
        if needs.checkpoints is not None:
            said += f", the run keeps {needs.checkpoints:,}"
            if free < one * (needs.checkpoints + 1):
                return fail(name, said, Cost.LATE, f"{room}, or keep fewer (checkpoint.save_top_k=3)")
        return ok(name, said, Cost.LATE)
    if free < NO_DISK:
        return fail(name, said, Cost.LATE, room)
    if free < LOW_DISK:
        return warn(name, said, Cost.LATE, room)
    return ok(name, said, Cost.LATE)
