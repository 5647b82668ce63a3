"""Held-out splits by source video: clips of one video never stand on both sides."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from marey.core.keys import derive

VALIDATION_SHARE = 0.2
"""Of the training videos: held out once more, to choose a probe's settings by."""


def relative_names(files: Sequence[str]) -> list[str]:
    """Each file's path below the deepest folder they share, so that a moved folder keeps its split."""
    folders = {os.path.dirname(file) for file in files}  # noqa: PTH120 (a string operation, not a file's)
    try:
        common = os.path.commonpath(sorted(folders)) if all(folders) else ""
    except ValueError:  # absolute and relative paths together, or two drives
        common = ""
    return [os.path.relpath(file, common) if common else file for file in files]


def held_out(
    files: Sequence[str], labels: Sequence[int] | NDArray[np.int64], *, share: float, seed: int, purpose: str
) -> NDArray[np.bool_]:
    """bool ``[rows]``: True where the row's file is held out.

    Within each class (a file's most frequent label) files are ordered by a keyed hash of their names and the
    first ``share`` of them is held out: at least one, and at least one stays. A pure function of the names,
    the labels and (seed, purpose), whatever the order of the rows.
    """
    names = relative_names(files)
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    for name, label in zip(names, labels, strict=True):
        seen[name][int(label)] += 1
    by_class: dict[int, list[str]] = defaultdict(list)
    for name, counts in seen.items():
        by_class[max(counts, key=lambda label: (counts[label], -label))].append(name)
    chosen: set[str] = set()
    for members in by_class.values():
        if len(members) < 2:
            continue
        members.sort(key=lambda name: (derive(seed, purpose, _hash(name)), name))
        chosen.update(members[: min(len(members) - 1, max(1, round(share * len(members))))])
    return np.array([name in chosen for name in names], dtype=np.bool_)


def few_per_class(
    files: Sequence[str], labels: Sequence[str], *, per_class: int, seed: int, draw: int
) -> NDArray[np.bool_]:
    """bool ``[rows]``: True where the row's file is among the ``per_class`` drawn of its label (all of fewer).

    Files of a label are ordered by a keyed hash of (seed, draw, name) and the first are taken, so that a draw of one
    is part of the same draw of ten.
    """
    names = relative_names(files)
    chosen: set[tuple[str, str]] = set()
    for label in sorted(set(labels)):
        members = {name for name, own in zip(names, labels, strict=True) if own == label}
        order = sorted(members, key=lambda name: (derive(seed, "probe-few-labels", draw, _hash(name)), name))
        chosen.update((name, label) for name in order[:per_class])
    return np.array([pair in chosen for pair in zip(names, labels, strict=True)], dtype=np.bool_)


def _hash(name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
