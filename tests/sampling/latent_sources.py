"""Manifests in memory for tests of sampling: sources of clips with given lengths and canvases, no files behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from marey.core.mixing import text_keys
from marey.latents.geometry import Geometry
from marey.latents.manifest import Manifest
from marey.sampling.windows import SourceWindows, WindowTable

BUCKETS = [(1, 3), (2, 6), (3, 9)]


def manifest(
    name: str,
    lengths: Sequence[int],
    *,
    canvases: Sequence[tuple[int, int]] | None = None,
    fps: float | None = None,
    starts: Sequence[int] | None = None,
) -> Manifest:
    ids = [f"{name}{i}" for i in range(len(lengths))]
    return Manifest(
        path=Path(f"{name}.csv"),
        table=pa.table({"clip_id": ids, "path": [f"{i}.npy" for i in ids]}),
        length_frames=np.asarray(lengths, dtype=np.int64),
        start=np.zeros(len(lengths), dtype=np.int64) if starts is None else np.asarray(starts, dtype=np.int64),
        height=None if canvases is None else np.array([h for h, _ in canvases], dtype=np.int64),
        width=None if canvases is None else np.array([w for _, w in canvases], dtype=np.int64),
        fps=None if fps is None else np.full(len(lengths), fps),
        clip_keys=text_keys(ids),
        ignored_columns=(),
    )


def source(
    name: str, lengths: Sequence[int], *, stride: int | None = None, lead: int = 0, **columns: Any
) -> SourceWindows:
    return SourceWindows(
        name,
        manifest(name, lengths, **columns),
        Geometry(BUCKETS, seed=0),
        stride=stride,
        lead=lead,
    )


def table(**lengths: Sequence[int]) -> WindowTable:
    return WindowTable([source(name, values) for name, values in lengths.items()])
