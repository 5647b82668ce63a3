"""``marey ingest``: video files to a frame store, whatever the files are like, and however often it is stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lance

from marey.core.errors import UserError
from marey.core.files import write_json
from marey.core.progress import Progress
from marey.pixels.committer import Committer
from marey.pixels.episodecolumns import TEXTS
from marey.pixels.footage import Footage
from marey.pixels.lancefaults import refusing
from marey.pixels.media import Unreadable, expanded
from marey.pixels.pool import Finished, Progressed, Refused, default_workers, run_tasks
from marey.pixels.report import IngestReport, fault_of, make_report, report_from_metadata, report_path
from marey.pixels.sources import Discovery, LabelsMode, VideoFile, discover
from marey.pixels.storeformat import STORE_FORMAT, partial_path, read_metadata
from marey.pixels.timeline import MIN_RATE
from marey.pixels.unfinished import Unfinished, compare_plans

JOB = "marey.pixels.ingest_worker:ingest_file"
MEGABYTE = 1e6


@dataclass(frozen=True)
class IngestSettings:
    """What decides the store's content (the number of workers does not)."""

    rate: float
    short_edge: int | None
    quality: int
    episode_length: int
    min_frames: int
    labels: LabelsMode

    def __post_init__(self) -> None:
        checks = (
            ("rate", MIN_RATE <= self.rate <= 1000, f"frames per second, {MIN_RATE:g} to 1000"),
            ("short_edge", self.short_edge is None or self.short_edge >= 8, "pixels, at least 8 (or none)"),
            ("quality", 1 <= self.quality <= 100, "JPEG quality, 1 to 100"),
            ("episode_length", self.episode_length >= 1, "frames, at least 1"),
            ("min_frames", self.min_frames >= 1, "frames, at least 1"),
            ("labels", self.labels in ("auto", "folders", "none"), "one of auto, folders, none"),
        )
        for name, good, rule in checks:
            if not good:
                raise UserError(f"{name}={getattr(self, name)} is not possible; give {rule}")


def ingest(
    sources: Sequence[str],
    out: Path | str,
    *,
    rate: float = 15.0,
    short_edge: int | None = 384,
    quality: int = 90,
    episode_length: int = 128,
    workers: int | None = None,
    labels: LabelsMode = "auto",
    stall_s: float = 60.0,
    min_frames: int = 1,
) -> IngestReport:
    """Read every video of ``sources`` (see ``sources.discover``) into a new frame store at ``out``.

    ``rate``: stored frames per second; ``short_edge``: pixels, larger frames are shrunk to it (None: never);
    ``quality``: JPEG; ``episode_length``: frames, a file's last episode may be shorter; ``workers``: decoding
    processes (None: one per CPU); ``stall_s``: seconds without a new frame after which a file is refused;
    ``min_frames``: stored frames a file must give.

    The store appears at ``out`` when it is complete. Until then ``out`` + ``.partial`` holds the work, and the same
    call goes on from there after a kill; its result, like that of any number of workers, is the same. Files that
    cannot be read are refused with a reason in the report. Raises ``UserError`` where nothing is usable, where
    ``out`` is something else, or where a call with other files or settings was begun there.
    """
    settings = IngestSettings(
        rate=float(rate),
        short_edge=short_edge,
        quality=quality,
        episode_length=episode_length,
        min_frames=min_frames,
        labels=labels,
    )
    if workers is not None and workers < 1:
        raise UserError(f"workers={workers} is not possible; give at least 1")
    if stall_s <= 0:
        raise UserError(f"stall_s={stall_s:g} is not possible; give seconds, above 0")
    out = Path(os.path.abspath(expanded(out)))  # noqa: PTH100 (the name as given, links and all)
    found = discover(sources, labels=labels)
    plan = {
        "settings": asdict(settings),
        "sources": len(found.files),
        "fingerprint": _fingerprint(found.files),
    }
    earlier = _already_there(out, plan)
    if earlier is not None:
        if partial_path(out).exists():  # killed between the last rename and the tidying up
            with contextlib.suppress(UserError), Unfinished.hold(out) as work:
                work.discard()
        return earlier
    with Unfinished.hold(out) as work:
        earlier = _already_there(out, plan)  # finished while this call was waiting to look
        if earlier is not None:
            work.discard()
            return earlier
        work.begin(plan)
        return _run(work, found, settings, plan, workers=workers or default_workers(), stall_s=stall_s)


def _run(
    work: Unfinished,
    found: Discovery,
    settings: IngestSettings,
    plan: dict[str, Any],
    *,
    workers: int,
    stall_s: float,
) -> IngestReport:
    metadata = plan | {
        "format": STORE_FORMAT,
        "kind": "frames",
        "rate": settings.rate,
        "short_edge": settings.short_edge,
        "quality": settings.quality,
        "episode_length": settings.episode_length,
        "label_names": found.label_names,
        TEXTS: any(video.extra.get("text") for video in found.files),
    }
    # Lance stores text: a name that is none is refused before anything is read, the same way on every restart.
    outcomes = work.outcomes() | {
        source: {"refused": reason} for source, video in enumerate(found.files) if (reason := fault_of(video))
    }
    committer = Committer(work, found.files, episode_length=settings.episode_length, metadata=metadata)
    sizes = [_size(video.frames()) / MEGABYTE for video in found.files]
    with Progress("ingest", total=round(sum(sizes), 3), unit="MB") as progress:
        meter = _Meter(progress, sizes)
        for source, outcome in outcomes.items():
            meter.finished(source, outcome)
        while (outcome_ := outcomes.get(committer.next_source)) is not None:
            committer.add(outcome_)
        tasks = _tasks(work, found.files, outcomes, settings)
        for event in run_tasks(JOB, tasks, workers=workers, stall_s=stall_s):
            if isinstance(event, Progressed):
                meter.reading(event)
                continue
            result = _outcome(event)
            work.record(event.task, result)
            outcomes[event.task] = result
            meter.finished(event.task, result)
            while (outcome_ := outcomes.get(committer.next_source)) is not None:
                committer.add(outcome_)
        assert committer.next_source == len(found.files)
        committer.flush()
    report = make_report(
        work.out,
        found,
        settings=asdict(settings),
        outcomes=outcomes,
        episodes=committer.episodes,
        frames=committer.frames,
    )
    if not committer.frames:
        write_json(report_path(work.out), asdict(report))
        work.discard()
        reasons = "; ".join(f"{item['path']}: {item['reason']}" for item in report.refused[:3])
        more = f"; and {len(report.refused) - 3} more" if len(report.refused) > 3 else ""
        raise UserError(
            f"none of the {len(found.files)} videos is usable, so no store was made ({reasons}{more}); "
            f"all reasons are in {report_path(work.out)}"
        )
    totals = {"used": report.used, "episodes": report.episodes, "frames": report.frames, "repeats": report.repeats}
    committer.finish(metadata | {"totals": totals, "refused": len(report.refused), "partial": len(report.partial)})
    report = IngestReport(**(asdict(report) | {"bytes": folder_bytes(work.store)}))
    write_json(report_path(work.out), asdict(report))
    work.publish()
    return report


def _tasks(
    work: Unfinished, files: Sequence[VideoFile], outcomes: dict[int, dict[str, Any]], settings: IngestSettings
) -> Any:
    there = work.chunks_of()
    for source, video in enumerate(files):
        if source not in outcomes:
            yield (
                source,
                {
                    "path": video.path,
                    "footage": video.frames(),
                    "source": source,
                    "folder": str(work.chunks),
                    "chunks_done": there.get(source, 0),
                    "min_frames": settings.min_frames,
                    "settings": {
                        "rate": settings.rate,
                        "short_edge": settings.short_edge,
                        "quality": settings.quality,
                    },
                },
            )


def _outcome(event: Finished | Refused) -> dict[str, Any]:
    return {"refused": event.reason} if isinstance(event, Refused) else event.result


class _Meter:
    """Progress in megabytes of video read, which is what is known of a file before it is read."""

    def __init__(self, progress: Progress, sizes: list[float]) -> None:
        self._progress, self._sizes = progress, sizes
        self._read: dict[int, float] = {}  # of files being read
        self._decoded: dict[int, int] = {}
        self._files = self._frames = 0  # of files that are done

    def reading(self, event: Progressed) -> None:
        self._decoded[event.task] = event.frames
        self._move(event.task, event.fraction * self._sizes[event.task])

    def finished(self, source: int, outcome: dict[str, Any]) -> None:
        self._files += 1
        self._frames += outcome.get("decoded", 0)
        self._decoded.pop(source, None)
        self._move(source, self._sizes[source])
        del self._read[source]

    def _move(self, source: int, read: float) -> None:
        step = read - self._read.get(source, 0.0)
        self._read[source] = read
        frames = self._frames + sum(self._decoded.values())
        note = f"{self._files} of {len(self._sizes)} files, {frames} frames decoded"
        self._progress.advance(step, note=note)


def _already_there(out: Path, plan: dict[str, Any]) -> IngestReport | None:
    if not os.path.lexists(out):
        return None
    other = f"{out} exists and is not a store made by this command; choose another output, or delete it"
    if not (out / "_versions").is_dir():
        raise UserError(other)
    with refusing(lambda _said: UserError(other)):
        metadata = read_metadata(lance.dataset(str(out)).schema, where=out)
    if "fingerprint" not in metadata:
        raise UserError(other)
    compare_plans(metadata, plan, where=str(out))
    written = report_path(out)
    try:
        report = IngestReport(**json.loads(written.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # gone, or no report: what the store itself says is enough
        report = IngestReport(**report_from_metadata(out, metadata))
    return replace(report, already_complete=True)


def _fingerprint(files: Sequence[VideoFile]) -> str:
    digest = hashlib.sha256()
    for video in files:
        entry = [video.label, video.extra, *_identity(video)]
        digest.update(os.fsencode(video.path) + json.dumps(entry, sort_keys=True).encode())
    return digest.hexdigest()


def _identity(video: VideoFile) -> list[Any]:
    """What changes when the video does; its path is in the fingerprint anyhow."""
    try:
        return [video.fault] if video.fault else video.frames().identity()[1:]
    except Unreadable:
        return [-1, -1]


def _size(footage: Footage) -> float:
    try:
        return footage.size()
    except Unreadable:
        return 0.0


def folder_bytes(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())
