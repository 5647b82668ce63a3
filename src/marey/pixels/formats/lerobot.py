"""LeRobot datasets, v2 (a video file an episode) and v3 (many episodes in one file, told apart by time stamps).

Read from the format's own description: ``meta/info.json`` names the cameras and where files lie; episodes with their
tasks are ``meta/episodes.jsonl`` (v2) or ``meta/episodes/**/*.parquet`` (v3).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from marey.core.errors import UserError, nearest
from marey.pixels.container import Container, Window
from marey.pixels.footage import WholeFile
from marey.pixels.listfile import Entry
from marey.pixels.naming import path_key
from marey.pixels.sourceformat import Request, SourceFormat

INFO = "meta/info.json"


class _Info(NamedTuple):
    root: Path
    version: int
    rate: float
    template: str
    """Where videos lie, with ``{video_key}`` and numbers in braces."""
    chunk_size: int
    cameras: list[str]


class _Episode(NamedTuple):
    number: int
    tasks: list[str]
    frames: int | None
    where: dict[str, Any]
    """v3: chunk and file index, and the time window, of the chosen camera."""


def _read(request: Request) -> tuple[list[Entry], str]:
    info = _info(Path(request.paths[0]), request.source)
    camera = _camera(info, request)
    episodes = list(_episodes_v2(info) if info.version == 2 else _episodes_v3(info, camera))
    if not episodes:
        raise UserError(f"{request.source} lists no episodes in its meta folder; check that the download is complete")
    entries = list(_entries(info, camera, episodes, request.source))
    tasks = {task for episode in episodes for task in episode.tasks}
    return entries, (
        f"LeRobot v{info.version}, camera {camera}, {len(entries)} episodes at {info.rate:g} frames/s, "
        f"{len(tasks)} tasks as text"
    )


def _info(root: Path, source: str) -> _Info:
    where = root / INFO
    try:
        found = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read ({error}); download the dataset again") from None
    version = found.get("codebase_version") if isinstance(found, dict) else None
    match = re.match(r"v([23])\.", version) if isinstance(version, str) else None
    if match is None:
        raise UserError(
            f"{where} is of version {version!r}, and v2.x and v3.x are read; convert it with LeRobot's own script"
        )
    features, rate, template = found.get("features"), found.get("fps"), found.get("video_path")
    chunk_size = found.get("chunks_size", 1000)
    kinds = {
        name: feature.get("dtype") if isinstance(feature, dict) else None
        for name, feature in (features.items() if isinstance(features, dict) else ())
    }
    cameras = [name for name, kind in kinds.items() if kind == "video"]
    if not cameras:
        pictures = [name for name, kind in kinds.items() if kind == "image"]
        held = f"its cameras ({', '.join(pictures)}) are stored as images" if pictures else "it has no camera"
        raise UserError(f"{source} holds no video: {held}; record or convert it with LeRobot's video option")
    good = isinstance(rate, int | float) and math.isfinite(rate) and 0 < rate <= 1000
    if not good or not isinstance(template, str) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise UserError(f"{where} does not say fps, video_path and chunks_size as LeRobot does; download it again")
    return _Info(root, int(match[1]), float(rate), template, chunk_size, cameras)


def _camera(info: _Info, request: Request) -> str:
    names = ", ".join(info.cameras)
    if request.part is None:
        if len(info.cameras) > 1:
            raise UserError(
                f"{request.source} has {len(info.cameras)} cameras ({names}); choose one, as in "
                f"{request.source}:{info.cameras[0]}"
            )
        return info.cameras[0]
    fitting = [name for name in info.cameras if request.part in (name, name.rpartition(".")[2])]
    if len(fitting) != 1:
        close = nearest(request.part, info.cameras)
        hint = f"did you mean {close}?" if close else f"it has {names}"
        raise UserError(f"{request.source}: there is no camera {request.part!r}; {hint}")
    return fitting[0]


def _episodes_v2(info: _Info) -> Iterator[_Episode]:
    where = info.root / "meta/episodes.jsonl"
    try:
        lines = where.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be read ({error}); download the dataset again") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield _episode(row, {}, f"{where}, line {number}")


def _episodes_v3(info: _Info, camera: str) -> Iterator[_Episode]:
    folder = info.root / "meta/episodes"
    fields = [f"videos/{camera}/{name}" for name in ("chunk_index", "file_index", "from_timestamp", "to_timestamp")]
    tables = sorted((str(path) for path in folder.glob("**/*.parquet")), key=path_key)
    for where in tables:
        try:
            rows = pq.read_table(where, columns=["episode_index", "tasks", "length", *fields]).to_pylist()
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            said = " ".join(str(error).split())[:200]
            raise UserError(f"{where} cannot be read ({said}); download the dataset again") from None
        for number, row in enumerate(rows, start=1):
            place = {name.rpartition("/")[2]: row.get(name) for name in fields}
            yield _episode(row, place, f"{where}, row {number}")


def _episode(row: Any, where: dict[str, Any], place: str) -> _Episode:
    number = row.get("episode_index") if isinstance(row, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise UserError(f"{place} names no episode_index; download the dataset again")
    tasks, frames = row.get("tasks"), row.get("length")
    tasks = [tasks] if isinstance(tasks, str) else tasks if isinstance(tasks, list) else []
    counted = isinstance(frames, int) and not isinstance(frames, bool) and frames > 0
    return _Episode(number, [t for t in tasks if isinstance(t, str) and t], frames if counted else None, where)


def _entries(info: _Info, camera: str, episodes: list[_Episode], source: str) -> Iterator[Entry]:
    windows = [_window(info, episode) if info.version == 3 else None for episode in episodes]
    paths = [_path(info, camera, episode) for episode in episodes]
    seconds: defaultdict[str | None, float] = defaultdict(float)
    for path, window in zip(paths, windows, strict=True):
        seconds[path] += window.end_s - window.start_s if window else 0.0
    for episode, path, window in zip(episodes, paths, windows, strict=True):
        extra = {"episode_index": str(episode.number)}
        if episode.tasks:
            extra["text"] = "; ".join(episode.tasks)
        numbered = f"episode_{episode.number:06d}"
        fault = None
        if path is None:
            fault = f"its place in the dataset ({info.template}) cannot be made out, or lies outside it"
        elif info.version == 3 and window is None:
            fault = "its from_timestamp and to_timestamp are not a stretch of time"
        name = path or f"{info.root}/{camera}"
        if info.version == 3 or path is None:
            name += f"#{numbered}"
        share = (window.end_s - window.start_s) / seconds[path] if window else 1.0
        footage = Container(name, WholeFile(path or ""), window._replace(share=share) if window else None)
        yield Entry(path=name, extra=extra, origin=source, footage=None if fault else footage, fault=fault)


def _window(info: _Info, episode: _Episode) -> Window | None:
    start, end = episode.where.get("from_timestamp"), episode.where.get("to_timestamp")
    if not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in (start, end)):
        return None
    assert start is not None
    assert end is not None
    if not 0 <= start < end <= 1e7:
        return None
    return Window(float(start), float(end), info.rate, episode.frames, 1.0)


def _path(info: _Info, camera: str, episode: _Episode) -> str | None:
    """The episode's video file; None where the template cannot be filled, or leads out of the dataset."""
    values: dict[str, Any] = {
        "video_key": camera,
        "episode_chunk": episode.number // info.chunk_size,
        "episode_index": episode.number,
        **{name: episode.where.get(name) for name in ("chunk_index", "file_index")},
    }

    def filled(found: re.Match[str]) -> str:
        value = values.get(found[1])
        if isinstance(value, str) and not found[2]:
            return value
        if isinstance(value, int) and value >= 0:
            return f"{value:0{int(found[2] or 1)}d}"
        raise ValueError(found[0])

    # By hand: str.format would let a stranger's template look into Python's objects.
    try:
        relative = re.sub(r"\{(\w+)(?::0?(\d{1,2})d)?\}", filled, info.template)
    except ValueError:
        return None
    path = os.path.normpath(info.root / relative)
    inside = path.startswith(f"{info.root}{os.sep}") and not set("{}\0") & set(relative)
    return path if inside else None


FORMAT = SourceFormat(
    title="a LeRobot dataset", read=_read, marks=lambda folder: (folder / INFO).is_file(), part="camera"
)
