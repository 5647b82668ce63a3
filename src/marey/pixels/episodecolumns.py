"""What a store's table says of whole episodes: the video each came from, and its text."""

from __future__ import annotations

import json
from typing import Any

import lance
import numpy as np
from numpy.typing import NDArray

TEXTS = "texts"
"""Key of a store's metadata: whether some of its videos have a text."""


def _of_first_frames(dataset: lance.LanceDataset, rows: NDArray[np.int64], column: str) -> list[Any]:
    """A column's values at table ``rows``, in that order."""
    ascending, back = np.unique(rows, return_inverse=True)
    values = dataset.take(ascending, columns=[column]).column(column).to_pylist()
    shared: dict[Any, Any] = {}  # one string per video, so that a pickled store stays small
    values = [shared.setdefault(value, value) for value in values]
    return [values[place] for place in back.tolist()]


def files_of(dataset: lance.LanceDataset, rows: NDArray[np.int64], ids: NDArray[np.int64]) -> list[str]:
    """``[episodes]``: the video of each, whose first frames are at table ``rows``; else its own name."""
    if "source" not in dataset.schema.names:
        return [f"episode {number}" for number in ids.tolist()]
    named = _of_first_frames(dataset, rows, "source")
    return [str(name) if name else f"episode {number}" for name, number in zip(named, ids.tolist(), strict=True)]


def texts_of(dataset: lance.LanceDataset, rows: NDArray[np.int64], metadata: dict[str, Any]) -> list[str | None] | None:
    """``[episodes]``: what each shows, in words; None where the store holds no text."""
    if not metadata.get(TEXTS) or "extra" not in dataset.schema.names:
        return None
    made: dict[str | None, str | None] = {}
    found = _of_first_frames(dataset, rows, "extra")
    for value in set(found):
        made[value] = _text(value)
    return [made[value] for value in found]


def _text(extra: Any) -> str | None:
    try:
        fields = json.loads(extra) if extra else {}
    except (ValueError, TypeError, RecursionError):
        return None
    text = fields.get("text") if isinstance(fields, dict) else None
    return text if isinstance(text, str) and text else None
