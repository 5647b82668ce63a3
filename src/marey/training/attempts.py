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
    if old is None or (_name(old) != _name(origin) and not _stepped(old, run_dir)):
        return Earlier([*_of(origin)[:-1], _left(_of(origin)[-1], step)], [])
    _refuse_another(old, origin, run_dir)
    kept = [entry for entry in old.get("checkpoints") or [] if not entry.get("removed")]
    after = [{**entry, "abandoned": True} for entry in kept if entry["step"] > step and Path(entry["path"]).exists()]
    before = [entry for entry in old.get("checkpoints") or [] if entry["step"] <= step]
    return Earlier(_closed(old), [*after, *before])


def check_records(run_dir: Path, config: Mapping[str, Any], *, origin: Mapping[str, Any] | None) -> None:
    """Refuse what ``earlier_sittings`` will refuse, as far as it can be told before the run has opened its data.

    config: as the command line gives it, plain values; what data add to ``model`` is not compared. origin: the
    receipt inside the checkpoint of an exact resume. Writes nothing.

    Raises:
        UserError: as ``earlier_sittings``.
    """
    old = _read(run_dir)
    if old is None:
        return
    if origin is None:
        _begin(old, {**config, "model": (old.get("config") or {}).get("model")}, run_dir)
    elif _stepped(old, run_dir):
        _refuse_another(old, origin, run_dir)


def _refuse_another(old: Mapping[str, Any], origin: Mapping[str, Any], run_dir: Path) -> None:
    if _name(old) != _name(origin):
        raise UserError(
            f"the run folder {run_dir} holds the records of another run ({old.get('run_id')}) than the checkpoint to "
            "go on from; set hydra.run.dir to that run's folder, or to a new one"
        )


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
    # Killed or failed before its first checkpoint and started again as it was: the same run, from its beginning.
    same = {**(old.get("config") or {}), "resume": None} == {**config, "resume": None}
    if _stepped(old, run_dir) and not (same and old.get("status") in ("running", "failed", "refused")):
        raise UserError(
            f"the run folder {run_dir} holds the records of another run ({old.get('run_id')}, {old.get('status')}), "
            "which a new one would replace; set hydra.run.dir to another folder"
        )
    return Earlier(_closed(old) if same else [], [])


def _stepped(old: Mapping[str, Any], run_dir: Path) -> bool:
    """Whether the run made an optimizer step; of a killed one, the metrics know more than the receipt."""
    if any((attempt.get("to_step") or 0) > (attempt.get("from_step") or 0) for attempt in _of(old)):
        return True
    if ((old.get("consumed") or {}).get("optimizer_steps") or 0) > (_of(old)[-1].get("from_step") or 0):
        return True
    try:
        return len((run_dir / "metrics.csv").read_bytes().splitlines()) > 1
    except OSError:
        return False


def _read(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / "receipt.json"
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(receipt, dict) or not all("run_id" in attempt for attempt in [receipt, *_of(receipt)]):
            raise ValueError("it is no receipt of a run")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"the records in {run_dir} belong to a run of which {path.name} cannot be read ({error}); set "
            "hydra.run.dir to another folder, or move that file away"
        ) from error
    return receipt


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
