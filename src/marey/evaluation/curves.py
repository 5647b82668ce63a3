"""``metrics.csv`` of any length as curves of a few hundred points. No torch here.

Legend: n rows.
"""

from __future__ import annotations

import csv
import math
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError

MOST = 360
"""Points of a curve: more than a chart has room for are averaged."""
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Points to draw; ``low`` and ``high`` are the extremes of the rows that a point stands for, None for single rows.

    A point whose rows hold no finite value is NaN.
    """

    x: Numbers
    y: Numbers
    low: Numbers | None
    high: Numbers | None


def read_columns(path: Path) -> dict[str, Numbers]:
    """A CSV of numbers by column, float64 ``[n]``, NaN where a cell is empty or no number. Reads a row at a time.

    Raises UserError where the file cannot be read or has no row.
    """
    columns: list[array[float]] = []
    names: list[str] = []
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.reader(file)
            names = next(rows, [])
            columns = [array("d") for _ in names]
            for cells in rows:
                if len(cells) != len(names):  # cut off by a kill, or still being written
                    continue
                for column, cell in zip(columns, cells, strict=True):
                    column.append(_number(cell))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the folder of a training run") from error
    except csv.Error as error:
        raise UserError(f"{path} is no table of numbers ({error}); give the folder of a training run") from error
    if not columns or not columns[0]:
        raise UserError(f"{path} holds no row: no step has been logged yet")
    return {name: np.frombuffer(column, dtype=np.float64) for name, column in zip(names, columns, strict=True)}


def _number(text: str) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        return math.nan


def thinned(x: Numbers, y: Numbers, *, most: int = MOST) -> Curve:
    """``y`` over ``x`` (both ``[n]``) in at most ``most`` points: each the mean of equally many rows in order."""
    each = -(-len(y) // most)
    if each <= 1:
        return Curve(x, y, None, None)
    bins = -(-len(y) // each)
    filled = np.full(bins * each, math.nan)
    filled[: len(y)] = np.where(np.isfinite(y), y, math.nan)
    table = filled.reshape(bins, each)
    there = np.isfinite(table)
    count = there.sum(axis=1)
    mean = np.where(there, table, 0.0).sum(axis=1) / np.where(count, count, math.nan)
    low = np.where(count, np.where(there, table, math.inf).min(axis=1), math.nan)
    high = np.where(count, np.where(there, table, -math.inf).max(axis=1), math.nan)
    ends = np.minimum(np.arange(1, bins + 1) * each, len(y)) - 1
    return Curve((x[np.arange(bins) * each] + x[ends]) / 2, mean, low, high)


def last_finite(values: Numbers) -> float:
    """The last value that is a number; NaN where there is none."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan


def first_finite(values: Numbers) -> float:
    """The first value that is a number; NaN where there is none."""
    return last_finite(values[::-1])
