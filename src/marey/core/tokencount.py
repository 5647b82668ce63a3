"""How many tokens survive the drop: needed by the plan, so it lives where no torch is imported."""

from typing import Literal

DropMode = Literal["random", "tube"]


def kept_count(tokens: int, drop_rate: float, *, mode: DropMode = "random", steps: int = 1) -> int:
    """``max(1, round(tokens * (1 - drop_rate)))``; in mode ``tube`` that many places, in each of ``steps`` of time.

    ``steps`` divides ``tokens``.
    """
    if mode == "tube":
        return kept_count(tokens // steps, drop_rate) * steps
    return max(1, round(tokens * (1 - drop_rate)))
