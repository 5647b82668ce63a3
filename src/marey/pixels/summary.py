"""What a frame store holds, as plain values for ``marey inspect``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from marey.pixels.store import FrameStore


def summarize(store: FrameStore) -> dict[str, Any]:
    """Episodes, frames, hours, rate, sizes, labels, files and bytes of a store. Reads no frame.

    ``sizes``: frames by ``"HxW"``; ``labels``: episodes by label (its name where there is one), None without
    labels; ``files``: number of video files, None where the store does not say; ``hours``: None without a rate.
    """
    frames = int(store.lengths.sum())
    sizes: Counter[str] = Counter()
    for height, width, length in zip(store.heights, store.widths, store.lengths, strict=True):
        sizes[f"{height}x{width}"] += int(length)
    dataset = store.dataset()
    has_source = "source" in dataset.schema.names
    return {
        "path": store.path,
        "version": store.version,
        "episodes": len(store.lengths),
        "frames": frames,
        "hours": frames / store.rate / 3600 if store.rate else None,
        "rate": store.rate,
        "episode_lengths": {
            "shortest": int(store.lengths.min()),
            "median": float(np.median(store.lengths)),
            "longest": int(store.lengths.max()),
        },
        "sizes": dict(sizes.most_common()),
        "labels": _labels(store),
        "files": len(set(store.files)) if has_source else None,
        "bytes": sum(
            file.file_size_bytes or 0 for fragment in dataset.get_fragments() for file in fragment.metadata.files
        ),
        "columns": list(dataset.schema.names),
        "settings": store.metadata.get("settings"),
        "refused": store.metadata.get("refused"),
        "partial": store.metadata.get("partial"),
    }


def _labels(store: FrameStore) -> dict[str, int] | None:
    if store.labels is None:
        return None
    names = store.label_names
    counted = Counter(store.labels.tolist())
    unlabelled = counted.pop(-1, 0)
    found = {names[label] if names else str(label): counted[label] for label in sorted(counted)}
    return found | ({"(none)": unlabelled} if unlabelled else {})
