"""Features on disk, so that the second probe of a checkpoint need not run it again.

One entry is one folder ``<MAREY_CACHE>/features/<key>/``: ``facts.json``, ``rows.npz`` (summaries, and which clip each
row is) and, where tokens were asked for, ``tokens.f16``. The key is everything that decides the features: weights,
preprocessing, data and its version, which clips. An entry is written beside its place and renamed onto it, so it is
whole or absent; one that is not what its facts say is made again. The least recently used go first when all take more
than ``LIMIT_BYTES``.

Legend: n clips, N tokens, D features (E of a token).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.core.files import cache_dir, sync_folder, write_json

FORMAT = 1
LIMIT_BYTES = 64 * 2**30
STALE_S = 24 * 3600.0
SPARE_BYTES = 2**30
"""Left free on the disk."""

Key = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """Features of the clips of one source. ``episodes``, ``clips``: int64 ``[n]``, which clip each row is."""

    summary: NDArray[np.float32]
    """``[n, D]``."""
    tokens: NDArray[np.float16] | None
    """``[n, N, E]`` less ``offset``; a memory map."""
    offset: NDArray[np.float32]
    """``[E]``; empty without tokens."""
    episodes: NDArray[np.int64]
    clips: NDArray[np.int64]


class FeatureCache:
    """The features under ``folder`` (default: ``<MAREY_CACHE>/features``)."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_dir() / "features" if folder is None else folder

    def find(self, key: Key, *, tokens: bool) -> Entry | None:
        """What is known under ``key``, or None: nothing, no tokens where they are asked for, or something damaged."""
        for kind in ("tokens", "summaries"):
            if kind == "tokens" or not tokens:
                entry = self._read(self._place(key, kind))
                if entry is not None:
                    return entry
        return None

    def bytes(self) -> int:
        """What all entries take on disk."""
        return sum(size for _, size, _ in self._entries())

    @contextlib.contextmanager
    def writing(self, key: Key, *, tokens: bool) -> Iterator[Path]:
        """A folder to fill, which disappears unless ``keep`` is called.

        Raises UserError where it cannot be made.
        """
        place = self._place(key, "tokens" if tokens else "summaries")
        temporary = self.folder / f".{place.name}.{secrets.token_hex(4)}.tmp"
        try:
            temporary.mkdir(parents=True)
            self._sweep()
        except OSError as error:
            raise unwritable(self.folder, error) from error
        try:
            yield temporary
        finally:  # what is memory-mapped stays readable
            shutil.rmtree(temporary, ignore_errors=True)

    def keep(self, filled: Path, key: Key, *, entry: Entry) -> None:
        """Move a filled folder to its place, and let the oldest entries go where all take too much.

        filled: from ``writing``, holding ``tokens.f16`` where the entry has tokens. Raises UserError where the disk
        refuses.
        """
        place = self._place(key, "summaries" if entry.tokens is None else "tokens")
        try:
            with (filled / "rows.npz").open("wb") as file:
                np.savez(file, summary=entry.summary, offset=entry.offset, episodes=entry.episodes, clips=entry.clips)
                file.flush()
                os.fsync(file.fileno())
            shape = None if entry.tokens is None else list(entry.tokens.shape)
            write_json(filled / "facts.json", {"format": FORMAT, "key": dict(key), "tokens": shape})
            if place.exists() and self._read(place) is None:
                self._remove(place)
            with contextlib.suppress(OSError):  # another process was first: its features are these
                filled.rename(place)
            sync_folder(self.folder)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        self._trim(place)

    def _place(self, key: Key, kind: str) -> Path:
        text = json.dumps({"format": FORMAT, "kind": kind, **key}, sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:40]

    def _read(self, place: Path) -> Entry | None:
        try:
            facts = json.loads((place / "facts.json").read_text(encoding="utf-8"))
            if facts["format"] != FORMAT:
                return None
            with (place / "rows.npz").open("rb") as file, np.load(file, allow_pickle=False) as rows:
                summary, offset = rows["summary"], rows["offset"]
                episodes, clips = rows["episodes"], rows["clips"]
            tokens = None
            if facts["tokens"] is not None:
                tokens = mapped_tokens(place / "tokens.f16", shape=tuple(facts["tokens"]))
                if len(tokens) != len(summary) or tokens.shape[2:] != offset.shape:
                    return None
            if not len(summary) == len(episodes) == len(clips):
                return None
            os.utime(place / "facts.json")  # when it was used last
        except Exception:  # a cache may hold anything, and everything in it can be made again
            return None
        return Entry(summary, tokens, offset, episodes, clips)

    def _entries(self) -> list[tuple[float, int, Path]]:
        """(when used last, bytes, place) of each entry."""
        found = []
        for facts in self.folder.glob("*/facts.json"):
            with contextlib.suppress(OSError):
                if not facts.parent.name.startswith("."):
                    size = sum(file.stat().st_size for file in facts.parent.iterdir())
                    found.append((facts.stat().st_mtime, size, facts.parent))
        return found

    def _trim(self, newest: Path) -> None:
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, place in entries:
            if total <= LIMIT_BYTES:
                return
            if place != newest:
                self._remove(place)
                total -= size

    def _remove(self, place: Path) -> None:
        gone = self.folder / f".{place.name}.{secrets.token_hex(4)}.tmp"
        with contextlib.suppress(OSError):
            place.rename(gone)  # at once: nobody finds half an entry
            shutil.rmtree(gone, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what a killed process left."""
        for left in self.folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                newest = max([left.stat().st_mtime, *(file.stat().st_mtime for file in left.iterdir())])
                if time.time() - newest > STALE_S:
                    shutil.rmtree(left, ignore_errors=True)


def mapped_tokens(path: Path, *, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """A file of float16 values as an array of exactly this shape. Raises ValueError where the size is another."""
    if path.stat().st_size != 2 * int(np.prod(shape)):
        raise ValueError(f"{path} is not of shape {shape}")
    return np.memmap(path, dtype=np.float16, mode="r", shape=shape)


def refuse_full_disk(folder: Path, needed: int, *, what: str) -> None:
    """UserError, naming the ways out, where the disk of ``folder`` has no room for ``needed`` bytes."""
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise UserError(
            f"{what} take {needed / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free; set MAREY_CACHE to a folder "
            "with room, give --no-attentive (which needs none of them), or lower --clips-per-video"
        )


def unwritable(folder: Path, error: OSError) -> UserError:
    """The refusal of a cache that cannot be written."""
    return UserError(
        f"features cannot be kept under {folder} ({error.strerror or error}); set MAREY_CACHE to another folder, or "
        "give --no-cache"
    )
