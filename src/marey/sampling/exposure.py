"""Exposure, measured: what was drawn, and what of it reached the optimizer, for every clip and source.

Counts are kept in memory between checkpoints and written, one Parquet file a rank and span of micro-steps,
at each checkpoint. A resumed run deletes the spans behind its checkpoint and counts those steps again, so
the sum over all spans is what one uninterrupted run would have counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from marey.core.errors import UserError
from marey.core.files import atomic_write

_WHOLE = ("drawn", "reached", "frames", "tokens", "supervised", "repeats", "tail_repeats", "dropped", "replaced")
COUNTS = (*_WHOLE, "quarantined", "seconds")
_SPAN = re.compile(r"^steps-(\d+)-(\d+)-rank(\d+)\.parquet$")
FORMAT = "marey exposure 1"


class Appearance(NamedTuple):
    """One sample of a microbatch. ``turn`` and ``repeat`` as planned; ``supervised`` counts latent elements."""

    source: str
    clip_id: str
    frames: int
    tokens: int
    seconds: float
    supervised: int
    turn: int = 0
    repeat: int = 0


class ExposureLog:
    """Counts of one rank since the last written span.

    drawn: draws, whatever became of them. reached: samples in an optimizer step that was taken, tail
    repeats included; frames, tokens, seconds and supervised count those alone. repeats: draws of a window
    drawn before. tail_repeats: samples repeated to complete a microbatch. dropped: draws that no step took.
    replaced: draws whose clip another stood in for; quarantined: times that a clip was refused.
    """

    def __init__(self, folder: Path | str, *, rank: int = 0, first_step: int = 0) -> None:
        self.folder, self.rank = Path(folder), rank
        self._first = first_step
        self._counts: dict[tuple[str, str], dict[str, float]] = {}

    def _of(self, source: str, clip_id: str) -> dict[str, float]:
        return self._counts.setdefault((source, clip_id), dict.fromkeys(COUNTS, 0))

    def record(self, appearances: Sequence[Appearance], *, reached: bool = True) -> None:
        """Count one microbatch; ``reached`` False when its step was skipped."""
        for sample in appearances:
            row = self._of(sample.source, sample.clip_id)
            if sample.repeat:
                row["tail_repeats"] += 1
            else:
                row["drawn"] += 1
                row["repeats"] += sample.turn > 0
            if reached:
                row["reached"] += 1
                row["frames"] += sample.frames
                row["tokens"] += sample.tokens
                row["seconds"] += sample.seconds
                row["supervised"] += sample.supervised

    def record_dropped(self, clips: Sequence[tuple[str, str, int]]) -> None:
        """Count draws (source, clip, turn) that no step takes."""
        for source, clip_id, turn in clips:
            row = self._of(source, clip_id)
            row["drawn"] += 1
            row["repeats"] += turn > 0
            row["dropped"] += 1

    def record_replaced(self, source: str, clip_id: str) -> None:
        """Count a refused clip whose draw another one took. The draw itself is the stand-in's appearance."""
        row = self._of(source, clip_id)
        row["replaced"] += 1
        row["quarantined"] += 1

    def flush(self, next_step: int) -> Path | None:
        """Write the span up to, not including, micro-step ``next_step`` (counted over epochs); None if it is empty."""
        assert next_step >= self._first, (next_step, self._first)
        path = None
        if self._counts:
            path = self.folder / f"steps-{self._first:010d}-{next_step:010d}-rank{self.rank}.parquet"
            keys = sorted(self._counts)
            columns: dict[str, Any] = {"source": [s for s, _ in keys], "clip_id": [c for _, c in keys]}
            for name in COUNTS:
                kind = pa.float64() if name == "seconds" else pa.int64()
                columns[name] = pa.array([self._counts[key][name] for key in keys]).cast(kind)
            table = pa.table(columns).replace_schema_metadata({"format": FORMAT})
            with atomic_write(path) as file:
                pq.write_table(table, file)
            self._counts.clear()
        self._first = next_step
        return path

    @classmethod
    def resumed(cls, folder: Path | str, *, step: int, rank: int = 0) -> ExposureLog:
        """A log that continues at micro-step ``step``; call :func:`cut_spans` once before, on one rank."""
        return cls(folder, rank=rank, first_step=step)


def cut_spans(folder: Path | str, *, step: int) -> int:
    """Delete what was counted at or after micro-step ``step``; returns how many files went.

    Raises UserError when a span crosses ``step``: it was then not written at the checkpoint being resumed.
    """
    cut = 0
    for path, first, last in _spans(Path(folder)):
        if first >= step:
            path.unlink()
            cut += 1
        elif last > step:
            raise UserError(
                f"{path}: it counts micro-steps {first}..{last - 1}, across the resumed one, {step}; resume from a "
                "checkpoint of this run, or give the run another folder."
            )
    return cut


def _spans(folder: Path) -> list[tuple[Path, int, int]]:
    found = []
    for path in sorted(folder.glob("steps-*.parquet")):
        match = _SPAN.match(path.name)
        if match:
            found.append((path, int(match[1]), int(match[2])))
    return found


def read_exposure(folder: Path | str) -> pa.Table:
    """All spans and ranks together: one row a clip, columns ``source, clip_id`` and :data:`COUNTS`, sorted.

    Raises UserError for a folder without a log.
    """
    tables = [pq.read_table(path) for path, _, _ in _spans(Path(folder))]
    if not tables:
        raise UserError(f"{folder}: it holds no exposure log; give a run's exposure folder.")
    whole = pa.concat_tables([table.replace_schema_metadata(None) for table in tables])
    summed = whole.group_by(["source", "clip_id"]).aggregate([(name, "sum") for name in COUNTS])
    renamed = summed.rename_columns([name.removesuffix("_sum") for name in summed.column_names])
    return renamed.select(["source", "clip_id", *COUNTS]).sort_by([("source", "ascending"), ("clip_id", "ascending")])


def summarise(table: pa.Table, asked: Mapping[str, Fraction | float]) -> list[dict[str, Any]]:
    """One entry a source: its counts, clips seen, share of what reached the optimizer and the share asked for."""
    by_source = table.group_by("source").aggregate([(name, "sum") for name in COUNTS] + [("clip_id", "count")])
    rows = {row["source"]: row for row in by_source.to_pylist()}
    refused = (
        table.filter(pa.compute.greater(table["quarantined"], 0)).group_by("source").aggregate([("clip_id", "count")])
    )
    quarantined = {row["source"]: row["clip_id_count"] for row in refused.to_pylist()}
    total = sum(row["reached_sum"] for row in rows.values())
    summary = []
    for source in dict.fromkeys([*asked, *rows]):
        row = rows.get(source, {})
        counts = {name: row.get(f"{name}_sum", 0) for name in COUNTS}
        summary.append(
            {
                "source": source,
                "clips": row.get("clip_id_count", 0),
                **counts,
                "quarantined_clips": quarantined.get(source, 0),
                "share": counts["reached"] / total if total else 0.0,
                "asked_share": float(asked.get(source, 0)),
            }
        )
    return summary
