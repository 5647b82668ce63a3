"""Episodes straight from video files, without a store: slower than a store, and nothing to build first."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from numpy.typing import NDArray

from marey.core.errors import MachineError, UserError
from marey.core.files import atomic_write, cache_dir
from marey.core.now import reading
from marey.core.progress import Progress
from marey.pixels.episodes import FrameRequest
from marey.pixels.footage import FileIndex, Footage
from marey.pixels.guard import GuardedReader
from marey.pixels.media import Unreadable, expanded
from marey.pixels.pool import Progressed, Refused, default_workers, run_tasks
from marey.pixels.report import fault_of, printable
from marey.pixels.sources import VideoFile, discover
from marey.pixels.timeline import MIN_RATE

JOB = "marey.pixels.decode:index_job"
INDEX_FORMAT = 1


class RefusedFile(NamedTuple):
    """A file that gives nothing, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class _Indexed:
    footage: Footage
    key: str  # path, size, time of change, rate and decoder: what the index stands for
    index: FileIndex


class VideoEpisodes:
    """An ``EpisodeSource`` over video files. Make one with ``VideoEpisodes.open``.

    A file's frames on the grid (the same that an ingest at this rate would store) are cut into episodes of
    ``episode_length``, the last one shorter. Beyond the protocol: ``refused`` (files that give nothing, with the
    reason), ``label_names`` and ``texts`` (or None), ``readings`` (how the path was understood).
    """

    def __init__(
        self,
        *,
        path: str,
        name: str,
        rate: float,
        episode_length: int,
        indexed: Sequence[_Indexed],
        labels: Sequence[int | None],
        label_names: list[str] | None,
        texts: Sequence[str | None],
        refused: list[RefusedFile],
        readings: list[str],
        stall_s: float,
    ) -> None:
        self.path, self.name = path, name
        self.rate: float | None = rate
        self.refused, self.label_names, self.readings = refused, label_names, readings
        self._indexed = list(indexed)
        self._length = episode_length
        steps = [len(item.index.stamps) for item in self._indexed]
        self._episodes = [
            (number, start) for number, count in enumerate(steps) for start in range(0, count, episode_length)
        ]
        self.lengths: NDArray[np.int64] = np.asarray(
            [min(episode_length, steps[number] - start) for number, start in self._episodes], np.int64
        )
        self.files = [self._indexed[number].footage.name for number, _ in self._episodes]
        numbers = np.asarray([-1 if labels[number] is None else labels[number] for number, _ in self._episodes])
        self.labels: NDArray[np.int64] | None = numbers.astype(np.int64) if (numbers >= 0).any() else None
        words = [texts[number] for number, _ in self._episodes]
        self.texts: list[str | None] | None = words if any(words) else None
        identity: list[Any] = [[item.key for item in self._indexed], list(labels), episode_length, rate]
        if self.texts is not None:
            identity.append(list(texts))
        self.version = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self._stall_s = stall_s
        self._guard: GuardedReader | None = None
        self._pid: int | None = None

    @classmethod
    def open(
        cls,
        path: str,
        *,
        name: str | None = None,
        rate: float,
        episode_length: int,
        workers: int | None = None,
        stall_s: float = 60.0,
        read_stall_s: float | None = None,
    ) -> VideoEpisodes:
        """Find the videos of ``path`` (see ``sources.discover``) and index each, in processes that can be killed.

        ``rate`` in frames per second, ``episode_length`` in frames, ``workers`` processes (None: one per CPU),
        ``stall_s`` seconds without a new frame after which a file is refused, ``read_stall_s`` (None: the same) those
        after which a clip is refused when it is read. Indices are cached under ``core.files.cache_dir()``, so that
        the next opening reads no video. Raises ``UserError`` if nothing is usable.
        """
        if rate < MIN_RATE:
            raise UserError(f"a rate of {rate:g} frames per second is not possible; give at least {MIN_RATE:g}")
        found = discover([path])
        indices, refused = _index_all(found.files, rate, workers=workers or default_workers(), stall_s=stall_s)
        if not indices:
            reasons = "; ".join(f"{item.path}: {item.reason}" for item in refused[:3])
            more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
            raise UserError(f"{path}: none of its {len(found.files)} videos is usable ({reasons}{more})")
        return cls(
            path=os.path.abspath(expanded(path)),  # noqa: PTH100 (may be a pattern)
            name=name or Path(path).stem,
            rate=rate,
            episode_length=episode_length,
            indexed=[indices[number] for number in sorted(indices)],
            labels=[found.files[number].label for number in sorted(indices)],
            label_names=found.label_names,
            texts=[found.files[number].extra.get("text") or None for number in sorted(indices)],
            refused=refused,
            readings=found.readings,
            stall_s=stall_s if read_stall_s is None else read_stall_s,
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_guard": None, "_pid": None}

    def read(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor]:
        """uint8 ``[T, 3, H, W]`` per request (channels last in memory); each file is read forward once per call.

        Clips that overlap may share memory: they are for reading only.

        Raises ``UserError`` naming the file when it changed, no longer decodes, or its decoder hung or died;
        ``IndexError`` for a step outside the episode.
        """
        clips = []
        for clip in self.read_each(requests):
            if isinstance(clip, UserError):
                raise clip
            clips.append(clip)
        return clips

    def read_each(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor | UserError]:
        """As ``read``, with the error of a clip that cannot be read in its place.

        Raises ``MachineError`` where no decoder can be started.
        """
        steps: list[NDArray[np.int64]] = []
        by_file: dict[int, list[int]] = {}
        for position, request in enumerate(requests):
            wanted = np.asarray(request.steps, np.int64)
            length = int(self.lengths[request.episode])
            if request.episode < 0 or (wanted < 0).any() or (wanted >= length).any():
                raise IndexError(f"steps {wanted.tolist()} of episode {request.episode}, which has {length} frames")
            number, start = self._episodes[request.episode]
            steps.append(start + wanted)
            by_file.setdefault(number, []).append(position)
        clips: dict[int, torch.Tensor | UserError] = {}
        for number, positions in by_file.items():
            try:
                read = self._clips(number, [steps[position] for position in positions])
                clips |= dict(zip(positions, read, strict=True))
            except MachineError:
                raise
            except UserError as error:
                if len(positions) == 1:
                    clips[positions[0]] = error
                    continue
                for position in positions:  # which of them is at fault
                    try:
                        clips[position] = self._clips(number, [steps[position]])[0]
                    except MachineError:
                        raise
                    except UserError as own:
                        clips[position] = own
        return [clips[position] for position in range(len(requests))]

    def _clips(self, number: int, steps: Sequence[NDArray[np.int64]]) -> list[torch.Tensor]:
        """Clips of one file, read together."""
        item = self._indexed[number]
        with reading(item.footage.name):
            self._check_unchanged(item)
            if self._guard is None or self._pid != os.getpid():
                self._guard, self._pid = GuardedReader(stall_s=self._stall_s), os.getpid()
            every = np.unique(np.concatenate(steps))
            pictures = self._guard.fetch(number, item.footage, item.index, every.tolist())
            return [torch.from_numpy(_rows(pictures, every, own)).permute(0, 3, 1, 2) for own in steps]

    def _check_unchanged(self, item: _Indexed) -> None:
        try:
            unchanged = index_key(item.footage, self.rate or 0.0) == item.key
        except Unreadable as error:
            raise UserError(f"{item.footage.name} {error}; it was there when the run began") from None
        if not unchanged:
            raise UserError(f"{item.footage.name} changed since it was indexed; start again")


def _rows(pictures: NDArray[np.uint8], every: NDArray[np.int64], own: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The pictures of steps ``own`` among those of ``every``: a view where they stand in a row, as most clips' do."""
    places = np.searchsorted(every, own)
    if len(own) and (np.diff(places) == 1).all():
        return pictures[places[0] : places[-1] + 1]
    return pictures[places]


def index_key(footage: Footage, rate: float) -> str:
    """What an index stands for; a changed file, rate or decoder has another. Raises ``Unreadable``."""
    identity = [INDEX_FORMAT, av.__version__, *footage.identity(), rate]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _index_all(
    files: Sequence[VideoFile], rate: float, *, workers: int, stall_s: float
) -> tuple[dict[int, _Indexed], list[RefusedFile]]:
    indexed: dict[int, _Indexed] = {}
    refused: dict[int, str] = {}
    keys: dict[int, str] = {}
    footage: dict[int, Footage] = {}
    for number, video in enumerate(files):
        fault = fault_of(video)
        if fault is not None:
            refused[number] = fault
            continue
        footage[number] = video.frames()
        try:
            keys[number] = index_key(footage[number], rate)
        except Unreadable as error:
            refused[number] = str(error)
            continue
        known = _load(keys[number])
        if isinstance(known, FileIndex):
            indexed[number] = _Indexed(footage[number], keys[number], known)
        elif known is not None:
            refused[number] = known
    tasks = [
        (number, {"path": files[number].path, "footage": footage[number], "rate": rate})
        for number in keys
        if number not in indexed and number not in refused
    ]
    if tasks:
        with Progress("index", total=len(tasks), unit="files") as progress:
            for event in run_tasks(JOB, tasks, workers=min(workers, len(tasks)), stall_s=stall_s):
                if isinstance(event, Progressed):
                    continue
                progress.advance(1)
                if isinstance(event, Refused):
                    refused[event.task] = event.reason
                    if event.lasting:
                        _save(keys[event.task], event.reason)
                else:
                    indexed[event.task] = _Indexed(footage[event.task], keys[event.task], event.result)
                    _save(keys[event.task], event.result)
    return indexed, [RefusedFile(printable(files[number].path), reason) for number, reason in sorted(refused.items())]


def _cached(key: str) -> Path:
    return cache_dir() / "video-index" / key[:2] / f"{key}.npz"


def _load(key: str) -> FileIndex | str | None:
    """What the cache knows; None where it knows nothing, or holds something damaged: the file is then read again."""
    try:
        with np.load(io.BytesIO(_cached(key).read_bytes()), allow_pickle=False) as arrays:
            facts = json.loads(str(arrays["facts"]))
            if "refused" in facts:
                return str(facts["refused"])
            index = FileIndex(stamps=arrays["stamps"], ordinals=arrays["ordinals"], keys=arrays["keys"], **facts)
    except Exception:  # a cache may hold anything, and everything in it can be made again
        return None
    whole = all(array.dtype == np.int64 and array.ndim == 1 for array in (index.stamps, index.ordinals, index.keys))
    return index if whole and 0 < len(index.stamps) == len(index.ordinals) else None


def _save(key: str, value: FileIndex | str) -> None:
    arrays: dict[str, Any] = {}
    facts: dict[str, Any] = {"refused": value}
    if isinstance(value, FileIndex):
        facts = value._asdict()
        arrays = {name: facts.pop(name) for name in ("stamps", "ordinals", "keys")}
    try:
        with atomic_write(_cached(key)) as file:
            np.savez_compressed(file, facts=np.array(json.dumps(facts)), **arrays)
    except OSError as error:
        raise UserError(
            f"cannot write to {_cached(key).parent}: {error.strerror}; make room, or set MAREY_CACHE to another folder"
        ) from None
