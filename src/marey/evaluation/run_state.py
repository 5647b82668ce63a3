"""Where a run stands, told from its folder: running, killed or ended; its newest checkpoint; its probes. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from marey.core.errors import UserError
from marey.evaluation.run_folder import read_receipt
from marey.evaluation.wording import dig

LOCK = ".marey.lock"
"""Held by a run for as long as it lives."""
_TREES = ("batch", "checkpoint_keys", "code", "config", "consumed", "data", "ema", "host", "recipe", "steps")
_LISTS = ("attempts", "checkpoints", "differences_from_recipe", "differences_from_published_code")


def tidy_receipt(path: Path) -> dict[str, Any]:
    """A run's receipt, parts of an unexpected shape left out. Raises UserError where there is none to read."""
    receipt = read_receipt(path)
    for key in _TREES:
        if not isinstance(receipt.get(key), dict):
            receipt[key] = {}
    for key in ("data", "loss", "model", "recipe"):
        if not isinstance(receipt["config"].get(key), dict):
            receipt["config"].pop(key, None)
    for key in _LISTS:
        if not isinstance(receipt.get(key), list):
            receipt[key] = []
    for key in ("attempts", "differences_from_published_code"):
        receipt[key] = [item for item in receipt[key] if isinstance(item, dict)]
    return receipt


def is_held(folder: Path) -> bool:
    """Whether a process of this machine holds the lock of a run folder."""
    with contextlib.suppress(OSError), (folder / LOCK).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def state(receipt: Mapping[str, Any], folder: Path) -> str:
    """One of the receipt's statuses; for one that says ``running``: ``running``, ``killed`` or ``unknown``."""
    status = str(receipt.get("status") or "unknown")
    if status != "running":
        return status
    if is_held(folder):
        return "running"
    here = dig(receipt, "host", "name") == platform.node()
    return "killed" if here and (folder / LOCK).exists() else "unknown"


def state_words(receipt: Mapping[str, Any], folder: Path) -> str:
    """The same in a sentence."""
    now, updated = state(receipt, folder), moment(receipt.get("updated"))
    return {
        "running": f"It is still running; this is how far it was at {updated}",
        "killed": f"It left no word after {updated}: it was killed, or the machine failed",
        "unknown": f"It was running when it was last heard of, {updated}",
        "finished": "It finished",
        "failed": "It failed",
        "refused": "It was refused",
    }.get(now, f"It ended: {now}")


def moment(stamp: Any) -> str:
    """An ISO 8601 time as people write it; anything else as it is."""
    try:
        return datetime.fromisoformat(str(stamp)).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):
        return str(stamp)


def newest_checkpoint(receipt: Mapping[str, Any], folder: Path) -> Path | None:
    """The newest checkpoint that is still there, also where the run's folder has been moved with it."""
    named = [
        Path(str(entry.get("path") if isinstance(entry, dict) else entry))
        for entry in reversed(receipt.get("checkpoints") or [])
        if not (isinstance(entry, dict) and entry.get("removed"))
    ]
    places = [Path(str(receipt["checkpoint_dir"]))] if receipt.get("checkpoint_dir") else []
    places += [folder / "checkpoints", folder]
    candidates = [
        *named,
        *(place / path.name for path in named for place in places),
        *(p / "last.ckpt" for p in places),
    ]
    return next((path for path in candidates if path.is_file()), None)


def read_probes(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Probe results in ``probe*.json`` of a run folder, as ``marey probe --json`` and the demonstration write them.

    Also sentences about files that hold none.
    """
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for path in sorted(folder.glob("probe*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            notes.append(f"{path.name} is not readable JSON ({error})")
            continue
        results = [item for item in (content if isinstance(content, list) else [content]) if _is_probe(item)]
        if not results:
            notes.append(f"{path.name} holds no probe result")
        found += results
    return found, notes


def _is_probe(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("encoders"), dict) and "label" in item


def scores(encoder: Any) -> dict[str, tuple[float, float, float]]:
    """Accuracy and its interval by kind of probe (``knn``, ``linear``, ...), of one encoder of a probe's JSON."""
    if not isinstance(encoder, dict):
        return {}
    return {kind: score for kind, value in encoder.items() if (score := score_of(value)) is not None}


def score_of(value: Any) -> tuple[float, float, float] | None:
    """(share right, low, high) of a score in a probe's JSON; None for anything else."""
    try:
        share = (value["right"] / value["videos"], float(value["low"]), float(value["high"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return share if all(map(math.isfinite, share)) else None


def data_path(receipt: Mapping[str, Any]) -> tuple[str, str]:
    """The first source of a run that is still there, and what it was to it: ``validation`` or ``training``.

    Raises UserError where none is.
    """
    looked = []
    for side, words in (("val", "validation"), ("train", "training")):
        sources = dig(receipt, "data", side)
        for source in sources if isinstance(sources, list) else []:
            path = source.get("path") if isinstance(source, dict) else None
            if path and Path(str(path)).exists():
                trained = side == "val" and dig(receipt, "data", "val_is_train")
                return str(path), "training" if trained else words
            looked.append(str(path))
    named = f" ({', '.join(looked[:3])})" if looked else ""
    raise UserError(f"the run's own data is no longer there{named}; name other clips with --data")
