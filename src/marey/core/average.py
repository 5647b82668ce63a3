"""Which key of a checkpoint holds the averaged weights: a run names it (``ema.save_key``), its checkpoints list it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def average_key(checkpoint: Mapping[str, Any]) -> str | None:
    """The key of a checkpoint's averaged weights, whatever ``ema.save_key`` says now; None: it has none."""
    listed = checkpoint["marey"].get("keys") or {}
    return next((key for key in listed if key != "state_dict" and checkpoint.get(key)), None)
