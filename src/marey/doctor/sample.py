"""Reading a sample of the data: jobs that run in a process aside (``doctor.aside``) and return plain facts."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from marey.core.errors import UserError
from marey.doctor.data import DataRequest, Pick
from marey.pixels.clips import clip_span
from marey.pixels.storeformat import is_store

DEMO = "demo:"
MANIFEST = "manifest.csv"
"""What `marey encode` leaves in its folder."""
NAMED = 3
"""Missing files that are named."""


def load(_: None) -> None:
    """Import what reading needs, so that no clip's time is spent on it, and let FFmpeg's log into its errors."""
    import logging

    import av

    import marey.pixels.dataset  # noqa: F401

    logger = logging.getLogger("libav")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    av.logging.set_level(av.logging.ERROR)


def look(request: DataRequest) -> dict[str, Any]:
    """What ``request.path`` holds and which of it to read. Raises UserError where nothing is there."""
    path = request.path
    if path.startswith(DEMO):
        from marey.pixels.digits import demo_source

        return _store(str(demo_source(path.removeprefix(DEMO))), request)
    where = Path(path).expanduser()
    if is_store(where):
        return _store(str(where), request)
    if (where / MANIFEST).is_file():
        where = where / MANIFEST
    if _is_manifest(where):
        if request.pixels:
            raise UserError(
                f"{path} is a manifest of stored latents, which an encoder's run does not read; give "
                "--config-name causal_video, or name frames"
            )
        return _manifest(where, request)
    return _videos(path, request)


def _is_manifest(path: Path) -> bool:
    """Lists of videos are CSV files too; a manifest is known by its columns."""
    from marey.evaluation.inspect_manifest import csv_columns, is_manifest

    suffix = path.suffix.lower()
    return suffix in (".parquet", ".pq") or (suffix == ".csv" and path.is_file() and is_manifest(csv_columns(path)))


def _spread(total: int, wanted: int) -> list[int]:
    """``wanted`` positions of ``total``, from the first to the last."""
    spread = np.linspace(0, total - 1, min(total, wanted)).round().astype(int)
    return [int(position) for position in np.unique(spread)]


@lru_cache(maxsize=4)
def _open_store(path: str) -> Any:
    from marey.pixels.store import FrameStore

    return FrameStore.open(path)


def _store(path: str, request: DataRequest) -> dict[str, Any]:
    source = _open_store(path)
    lengths, span = source.lengths, clip_span(request.num_frames, request.frame_stride)
    long_enough = np.flatnonzero(lengths >= span)
    among = long_enough if len(long_enough) else np.arange(len(lengths))
    picks = []
    for episode in among[_spread(len(among), request.clips)].tolist():
        length = int(lengths[episode])
        start = max(0, (length - span) // 2)
        steps = np.minimum(start + np.arange(request.num_frames) * request.frame_stride, length - 1)
        picks.append(Pick(name=source.files[episode], store=path, episode=episode, steps=tuple(steps.tolist())))
    sizes = np.unique(np.stack([source.heights, source.widths]), axis=1).T
    return {
        "kind": "store",
        "count": len(lengths),
        "frames": int(lengths.sum()),
        "rate": source.rate,
        "size": tuple(sizes[0].tolist()) if len(sizes) == 1 else None,
        "short": int((lengths < span).sum()),
        "longest": int(lengths.max()),
        "picks": picks,
    }


def _videos(path: str, request: DataRequest) -> dict[str, Any]:
    from marey.pixels.sources import discover

    found = discover([path])
    chosen = [found.files[i] for i in _spread(len(found.files), request.clips)]
    picks = [Pick(name=v.path, video=True, footage=None if v.fault else v.frames(), fault=v.fault) for v in chosen]
    return {"kind": "videos", "count": len(found.files), "reading": found.readings[0], "picks": picks}


def _manifest(path: Path, request: DataRequest) -> dict[str, Any]:
    from marey.latents.manifest import read_manifest

    manifest = read_manifest(path, check_files=False)
    missing = _missing(path.parent, [str(text) for text in manifest.texts("path")])
    present = np.setdiff1d(np.arange(len(manifest)), missing)
    picks = []
    for row in present[_spread(len(present), request.clips)].tolist() if len(present) else []:
        clip = manifest.clip(row)
        picks.append(
            Pick(
                name=f"{clip.clip_id} ({clip.path})",
                latents=clip.path,
                expected=(clip.length_frames, clip.height, clip.width),
            )
        )
    usable = manifest.length_frames - manifest.start
    return {
        "kind": "manifest",
        "count": len(manifest),
        "frames": int(manifest.length_frames.sum()),
        "missing": len(missing),
        "missing_named": [str(manifest.clip(row).path) for row in missing[:NAMED]],
        "short": int((usable < request.latent_frames).sum()),
        "longest": int(usable.max()),
        "picks": picks,
    }


def _missing(base: Path, paths: list[str]) -> list[int]:
    """Rows whose file is not there, by one listing of each folder."""
    listings: dict[str, frozenset[str]] = {}
    rows = []
    for row, path in enumerate(paths):
        folder, name = os.path.split(path)
        if folder not in listings:
            try:
                listings[folder] = frozenset(os.listdir(base / folder))  # noqa: PTH208 (names alone, a million of them)
            except OSError:
                listings[folder] = frozenset()
        if name not in listings[folder]:
            rows.append(row)
    return rows


def read(task: tuple[DataRequest, Pick, float]) -> dict[str, Any]:
    """Read one clip within about so many seconds. ``error`` says why it cannot be had."""
    request, pick, budget_s = task
    start = time.perf_counter()
    if pick.video:
        facts = _read_video(pick, request, budget_s)
    elif pick.latents is not None:
        facts = _read_latents(pick, request)
    else:
        facts = _read_frames(pick)
    return {"error": None, **facts, "seconds": time.perf_counter() - start}


def _read_frames(pick: Pick) -> dict[str, Any]:
    from marey.pixels.episodes import FrameRequest
    from marey.pixels.reading import Refusal, read_clips

    assert pick.store is not None
    (clip,) = read_clips(_open_store(pick.store), [FrameRequest(pick.episode, np.asarray(pick.steps, np.int64))])
    if isinstance(clip, Refusal):
        return {"error": clip.reason, "frames": 0}
    return {"frames": len(set(pick.steps))}


def _read_latents(pick: Pick, request: DataRequest) -> dict[str, Any]:
    from marey.latents.sidecar import Expected, read_frames

    assert pick.latents is not None
    assert pick.expected is not None
    frames = pick.expected[0]
    try:
        latents = read_frames(
            pick.latents,
            clip=pick.name.partition(" (")[0],
            expected=Expected(*pick.expected),
            start=0,
            frames=frames,
            layout=request.layout,  # type: ignore[arg-type]  # checked by the configuration it comes from
        )
    except UserError as error:
        return {"error": str(error), "frames": 0}
    return {"frames": frames, "channels": int(latents.shape[0])}


def _read_video(pick: Pick, request: DataRequest, budget_s: float) -> dict[str, Any]:
    """Decode from the front, to the end or until the time is used up."""
    from marey.pixels.decode import Reading
    from marey.pixels.media import Unreadable

    if pick.fault is not None:
        return {"error": f"{pick.name} {pick.fault}", "frames": 0}
    until = time.perf_counter() + budget_s
    reading = Reading(pick.footage or pick.name, rate=request.rate)
    whole, first, last = True, 0.0, 0.0
    try:
        for shown in reading:
            first = first or shown.time_s
            last = shown.time_s
            if time.perf_counter() > until:
                whole = False
                break
    except Unreadable as error:
        return {"error": f"{pick.name} {error}", "frames": 0}
    counts = reading.counts
    return {
        "frames": counts.decoded,
        "whole": whole,
        "steps": counts.steps,
        "rate": counts.true_rate if whole else (counts.decoded - 1) / (last - first) if last > first else None,
        "partial": counts.partial() if whole else None,
    }
