"""What each source contributed so far: a small table per checkpoint, and a part of the receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from marey.core.files import atomic_write
from marey.training.ledger import Ledger


def per_source(ledger: Ledger, *, names: list[str], frames_per_clip: int) -> list[dict[str, Any]]:
    """One entry per source: clips made, their frames and kept tokens, clips that stand in for another."""
    per_clip = ledger.tokens // ledger.clips_seen if ledger.clips_seen else 0
    return [
        {
            "name": name,
            "clips": clips,
            "frames": clips * frames_per_clip,
            "tokens": clips * per_clip,
            "replaced": replaced,
        }
        for name, clips, replaced in zip(names, ledger.clips, ledger.replaced, strict=True)
    ]


def cut_exposure(run_dir: Path, *, step: int) -> None:
    """Remove the tables of steps after ``step``: of a future that a resume abandons."""
    for path in (run_dir / "exposure").glob("step-*.parquet"):
        number = path.stem.removeprefix("step-")
        if number.isdigit() and int(number) > step:
            path.unlink()


def write_exposure(run_dir: Path, *, step: int, sources: list[dict[str, Any]]) -> Path:
    """``exposure/step-0000400.parquet``: columns step, name, clips, frames, tokens, replaced."""
    path = run_dir / "exposure" / f"step-{step:07d}.parquet"
    table = pa.Table.from_pylist([{"step": step, **source} for source in sources])
    with atomic_write(path) as file:
        pq.write_table(table, file)
    return path
