"""The sittings of one run: what an earlier one left in the run folder, and how the next one joins it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from marey.core.errors import UserError


class Earlier(NamedTuple):
    """What the receipt of a new sitting begins with."""

    attempts: list[dict[str, Any]]
    """Sittings before this one, oldest first."""
    checkpoints: list[dict[str, Any]]
    """The folder's own checkpoints, those of an abandoned future first."""


def earlier_sittings(
    run_dir: Path,
    *,
    config: Mapping[str, Any],
    step: int | None,
    origin: Mapping[str, Any] | None,
) -> Earlier:
    """What ``run_dir`` and the checkpoint to go on from say of sittings so far.

    config: the new sitting's, plain values. step, origin: where an exact resume goes on, and the receipt inside its
    checkpoint; None for a run that begins at step 0.

    Raises:
        UserError: the folder holds the records of another run.
    """
    old = _read(run_dir)
    if step is None or origin is None:
        return _begin(old, config, run_dir)
    if old is None:
        return Earlier([*_of(origin)[:-1], _left(_of(origin)[-1], step)], [])
    if _name(old) != _name(origin):
        raise UserError(
            f"the run folder {run_dir} holds the records of another run ({old.get('run_id')}) than the checkpoint to "
            "go on from; set hydra.run.dir to that run's folder, or to a new one"
        )
    kept = [entry for entry in old.get("checkpoints") or [] if not entry.get("removed")]
    after = [{**entry, "abandoned": True} for entry in kept if entry["step"] > step and Path(entry["path"]).exists()]
    before = [entry for entry in old.get("checkpoints") or [] if entry["step"] <= step]
    return Earlier(_closed(old), [*after, *before])


def _begin(old: dict[str, Any] | None, config: Mapping[str, Any], run_dir: Path) -> Earlier:
    if old is None:
        return Earlier([], [])
    kept = [entry["path"] for entry in old.get("checkpoints") or [] if Path(entry["path"]).exists()]
    if kept:
        raise UserError(
            f"the run folder {run_dir} holds the records of a run with checkpoints ({kept[-1]}), which a new one would "
            "replace; set hydra.run.dir to another folder, or go on with that run (`marey inspect` on the folder "
            "prints the command)"
        )
    # Killed before its first checkpoint and started again as it was: the same run, from its beginning.
    same = {**(old.get("config") or {}), "resume": None} == {**config, "resume": None}
    return Earlier(_closed(old) if same else [], [])


def _read(run_dir: Path) -> dict[str, Any] | None:
    try:
        receipt = json.loads((run_dir / "receipt.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return receipt if isinstance(receipt, dict) and "run_id" in receipt else None


def _of(receipt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sittings that a receipt lists; one written before receipts listed them was of a single one."""
    listed = receipt.get("attempts")
    if listed:
        return [dict(attempt) for attempt in listed]
    keys = ("run_id", "started", "ended", "status", "how_it_ended", "code", "host")
    return [{"number": 1, **{key: receipt.get(key) for key in keys}, "from_step": 0, "to_step": None}]


def _name(receipt: Mapping[str, Any]) -> Any:
    """The first sitting's name is the run's."""
    return _of(receipt)[0]["run_id"]


def _closed(old: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sittings so far; one that still says ``running`` ended without a word, or this one could not start."""
    attempts = _of(old)
    if attempts[-1]["status"] == "running":
        attempts[-1].update(
            status="killed",
            ended=old.get("updated"),
            how_it_ended="it left no word: killed, or the machine failed; true as of `ended`",
        )
    return attempts


def _left(attempt: dict[str, Any], step: int) -> dict[str, Any]:
    if attempt["status"] != "running":
        return attempt
    sentence = f"continued from its checkpoint of step {step} in another folder; its own receipt says how it ended"
    return {**attempt, "status": "continued elsewhere", "to_step": step, "how_it_ended": sentence}
