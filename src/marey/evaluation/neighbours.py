"""Which clips an encoder finds alike.

Legend: n clips, D features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from marey.evaluation.classifiers import Floats, unit_rows


def nearest_clips(
    query: Floats,
    base: Floats,
    *,
    count: int,
    query_videos: Sequence[str] | None = None,
    base_videos: Sequence[str] | None = None,
) -> NDArray[np.int64]:
    """int64 ``[queries, count]``: rows of ``base`` nearest in cosine similarity, nearest first.

    Given the videos of both, clips of the query's own video are passed over; where too few others are left,
    the row is filled with -1.
    """
    similarity = unit_rows(query) @ unit_rows(base).T
    if query_videos is not None and base_videos is not None:
        similarity[np.asarray(query_videos)[:, None] == np.asarray(base_videos)[None, :]] = -np.inf
    order = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
    found = np.where(np.isneginf(np.take_along_axis(similarity, order, axis=1)), -1, order)
    return np.pad(found, ((0, 0), (0, count - found.shape[1])), constant_values=-1).astype(np.int64)
