"""What an ingest did, for a person and for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marey.core.progress import duration
from marey.pixels.sources import Discovery, VideoFile

NOT_TEXT = "its name is not UTF-8, which a table cannot hold; rename it"
"""Why a file is refused whose path is no text."""
_SHOWN = 10
"""Lines of a kind in the text; the JSON holds them all."""


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did; also written as JSON beside the store."""

    out: str
    settings: dict[str, Any]
    readings: list[str]
    """One line per source named: how it was understood."""
    sources: int
    used: int
    episodes: int
    frames: int
    hours: float
    bytes: int
    label_names: list[str] | None
    repeats: int
    """Stored frames that repeat the one before, because the source is slower than the stored rate."""
    refused: list[dict[str, Any]] = field(default_factory=list)
    """``{"path", "reason"}`` for each file that gave nothing."""
    partial: list[dict[str, Any]] = field(default_factory=list)
    """``{"path", "promised", "decoded", "reason"}`` for each file read in part."""
    slow: list[dict[str, Any]] = field(default_factory=list)
    """``{"path", "true_rate", "repeats"}`` for each file with repeated frames."""
    broken_clocks: list[dict[str, Any]] = field(default_factory=list)
    """``{"path", "breaks"}`` for each file whose time stamps are missing, run backwards or leap."""
    already_complete: bool = False
    """Nothing was done: the same command had finished before."""

    def text(self) -> str:
        """The report for a person: what is in the store, and every file that is not, or not wholly."""
        if self.already_complete:
            return f"{self.out} is already complete ({self.frames:,} frames of {self.used:,} files); nothing to do"
        lines = [
            f"store     {self.out}: {self.frames:,} frames in {self.episodes:,} episodes, "
            f"{_hours(self.hours)} at {self.settings['rate']:g} frames/s, {self.bytes / 1e6:,.1f} MB",
            *(f"source    {reading}" for reading in self.readings[:_SHOWN]),
            *_more("source", self.readings),
            f"files     {self.used:,} of {self.sources:,} used",
        ]
        if self.label_names:
            names = ", ".join(self.label_names[:_SHOWN]) + (", ..." if self.label_names[_SHOWN:] else "")
            lines.append(f"labels    {len(self.label_names):,} classes: {names}")
        if self.repeats:
            lines.append(
                f"repeats   {self.repeats:,} stored frames repeat the one before, in {len(self.slow):,} files slower "
                f"than {self.settings['rate']:g} frames/s"
            )
        for word, items, phrase in (
            ("partial", self.partial, "{path}: {reason}"),
            ("clock", self.broken_clocks, "{path}: {breaks} missing, backward or leaping time stamps"),
            ("refused", self.refused, "{path}: {reason}"),
        ):
            lines += [f"{word:<9} {phrase.format(**item)}" for item in items[:_SHOWN]]
            lines += _more(word, items)
        lines.append(f"report    {printable(str(report_path(Path(self.out))))}")
        return "\n".join(lines)


def report_path(out: Path) -> Path:
    """``clips.lance`` -> ``clips.report.json``, beside it."""
    return out.with_name(out.name.removesuffix(".lance") + ".report.json")


def make_report(
    out: Path,
    found: Discovery,
    *,
    settings: dict[str, Any],
    outcomes: dict[int, dict[str, Any]],
    episodes: int,
    frames: int,
) -> IngestReport:
    """The report from each file's outcome (``ingest_worker.outcome``, or ``{"refused": reason}``); ``bytes`` is 0."""
    read = {source: outcome for source, outcome in sorted(outcomes.items()) if "refused" not in outcome}
    paths = [printable(video.path) for video in found.files]

    def listed(keep: str, *keys: str) -> list[dict[str, Any]]:
        return [
            {"path": paths[source]} | {key: outcome[key] for key in keys}
            for source, outcome in read.items()
            if outcome[keep]
        ]

    return IngestReport(
        out=printable(str(out)),
        settings=settings,
        readings=found.readings,
        sources=len(found.files),
        used=len(read),
        episodes=episodes,
        frames=frames,
        hours=frames / settings["rate"] / 3600,
        bytes=0,
        label_names=found.label_names,
        repeats=sum(outcome["repeats"] for outcome in read.values()),
        refused=[
            {"path": paths[source], "reason": outcome["refused"]}
            for source, outcome in sorted(outcomes.items())
            if "refused" in outcome
        ],
        partial=[
            {"reason" if key == "partial" else key: value for key, value in item.items()}
            for item in listed("partial", "promised", "decoded", "partial")
        ],
        slow=listed("repeats", "true_rate", "repeats"),
        broken_clocks=listed("breaks", "breaks"),
    )


def report_from_metadata(out: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Fields of the report of a finished store whose report file is gone: the totals, without the lists of files."""
    totals, rate = metadata["totals"], metadata["rate"]
    return {
        "out": printable(str(out)),
        "settings": metadata["settings"],
        "readings": [],
        "sources": metadata["sources"],
        "used": totals["used"],
        "episodes": totals["episodes"],
        "frames": totals["frames"],
        "hours": totals["frames"] / rate / 3600,
        "bytes": sum(item.stat().st_size for item in out.rglob("*") if item.is_file()),
        "label_names": metadata["label_names"],
        "repeats": totals["repeats"],
    }


def fault_of(video: VideoFile) -> str | None:
    """Why a video is refused before it is tried; None where nothing is known against it."""
    return NOT_TEXT if printable(video.path) != video.path else video.fault


def printable(text: str) -> str:
    """A path as text that any file can hold, also where its bytes are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _hours(hours: float) -> str:
    return duration(hours * 3600)


def _more(word: str, items: Sequence[Any]) -> list[str]:
    hidden = len(items) - _SHOWN
    return [f"{word:<9} and {hidden:,} more, all in the report"] if hidden > 0 else []
