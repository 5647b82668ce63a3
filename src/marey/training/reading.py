"""Opening a checkpoint to start from: whole, undamaged, this program's own, and nothing in it is executed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from marey.core.errors import UserError
from marey.core.files import UNREADABLE, read_seal, seal_holds
from marey.training.folders import MARKER, VALUES, checkpoints_in


def read_checkpoint(path: Path, *, exact: bool) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint this program wrote, on the CPU, and what should be said of it.

    The file's seal is checked first, against all of its bytes. An exact resume takes sealed files alone; weights
    alone are taken from an unsealed one too (an export, a file of an older version), with a note.

    Raises:
        UserError: missing, empty, damaged, cut off, would execute code, or not a training checkpoint of this
            program; naming the newest complete checkpoint beside it, where there is one.
    """
    where = f"resume.ckpt_path={path}"
    if path.is_dir():
        return _read_folder(path, where, exact=exact), []
    if not path.is_file():
        raise _refusal(f"{where} is not a file", path)
    try:
        seal, holds = read_seal(path), seal_holds(path)
    except OSError as error:
        raise _refusal(f"{where} cannot be read ({error.strerror or error})", path) from error
    if seal is not None and not holds:
        raise _refusal(f"{where} is damaged: its content is not what was written (its SHA-256 does not match)", path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UNREADABLE as error:
        raise _refusal(f"{where} {_reason(path, error)}", path) from error
    about = content.get("marey") if isinstance(content, dict) else None
    if not isinstance(about, dict) or about.get("format") != 1 or not isinstance(content.get("state_dict"), dict):
        raise _refusal(f"{where} was not written by this version of `marey train`", path)
    if seal is not None:
        return dict(content), []
    if exact:
        raise _refusal(
            f"{where} does not end with the completion marker of a checkpoint that was written whole, which an exact "
            "resume needs (weights alone start another run from it: resume.weights_only=true)",
            path,
        )
    return dict(content), [f"{path} carries no completion marker: whether its weights are undamaged is not known"]


def _read_folder(path: Path, where: str, *, exact: bool) -> dict[str, Any]:
    """As ``read_checkpoint``, of a sharded run: weights whole; of an average, only for a start from weights."""
    if not (path / MARKER).is_file():
        raise _refusal(
            f"{where} is a folder without the completion marker ({MARKER}) of a sharded run's checkpoint", path
        )
    from marey.training.shards import load_folder, load_values, whole  # deferred: few runs have one to read

    try:
        if not whole(path):
            raise _refusal(f"{where} is damaged: its files are not what was written (by the SHA-256 of each)", path)
        about = load_values(path).get("marey")
        if not isinstance(about, dict) or about.get("format") != 1:
            raise _refusal(f"{where} was not written by this version of `marey train`", path)
        return load_folder(path, only=("state_dict",) if exact else ("state_dict", *about["keys"]))
    except UNREADABLE as error:
        raise _refusal(f"{where} {_reason(path, error)}", path) from error


def origin_of(path: Path) -> dict[str, Any] | None:
    """The receipt inside a checkpoint, its weights left on disk; None where there is none to read."""
    try:
        values = path / VALUES if path.is_dir() else path
        content = torch.load(values, map_location="cpu", weights_only=True, mmap=True)
        receipt: dict[str, Any] = dict(content["marey"]["receipt"])
    except UNREADABLE:
        return None
    return receipt if "run_id" in receipt else None


def newest_complete(folder: Path, *, besides: Path | None = None) -> Path | None:
    """The checkpoint in ``folder`` that is furthest in training among those whose seal holds; None: there is none."""
    found = []
    for path in checkpoints_in(folder):
        if besides is not None and path.name == besides.name:
            continue
        try:
            values = path / VALUES if path.is_dir() else path
            content = torch.load(values, map_location="cpu", weights_only=True, mmap=True)
            found.append((int(content["marey"]["step"]), path))
        except UNREADABLE:
            continue
    for _, path in sorted(found, key=lambda pair: pair[0], reverse=True):
        if _holds(path):
            return path
    return None


def _holds(path: Path) -> bool:
    try:
        if path.is_dir():
            from marey.training.shards import whole

            return whole(path)
        return seal_holds(path)
    except OSError:
        return False


def _refusal(what: str, path: Path) -> UserError:
    newest = newest_complete(path.parent, besides=path)
    if newest is None:
        return UserError(f"{what}; give another checkpoint that `marey train` wrote")
    return UserError(f"{what}; the newest complete checkpoint there is resume.ckpt_path={newest}")


def _reason(path: Path, error: BaseException) -> str:
    if path.is_file() and path.stat().st_size == 0:
        return "is empty"
    text = str(error).strip()
    if isinstance(error, pickle.UnpicklingError) and ("nsupported global" in text or "nsupported class" in text):
        return (
            "holds more than tensors and plain values, and loading the rest would execute code from the file, "
            "so it was not loaded"
        )
    if text.startswith("mmap can only be used"):  # how PyTorch says that a file is no archive of its own
        return "cannot be read: it is cut off, damaged or no checkpoint"
    first = text.splitlines()[0] if text else type(error).__name__
    return f"cannot be read: it is cut off, damaged or no checkpoint ({first[:120]})"
