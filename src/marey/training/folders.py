"""Where checkpoints go and what they are called; no torch here, so that a wrong folder is refused at once."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from marey.core.errors import UserError
from marey.core.files import leftovers

SUFFIX = ".ckpt"
LAST = f"last{SUFFIX}"
MARKER = "complete.json"
"""Completes a checkpoint that is a folder (of a sharded run), with the SHA-256 of its other files."""
VALUES = "values.pt"
"""In such a folder, everything but the shards."""
_FIELD = re.compile(r"\{(\w+)(?::[^{}]*)?\}")


def check_folder(checkpoint_dir: Path, resume_path: Path | None) -> None:
    """Refuse a folder that holds another run's checkpoints. Creates nothing.

    ``resume_path`` is what an exact resume goes on from: a checkpoint in the folder makes it the same run. A start
    from weights alone is another run, whose checkpoints would mix with the first one's: it gives None.

    Raises:
        UserError: naming one of the checkpoints and both ways out.
    """
    if checkpoint_dir.exists() and not checkpoint_dir.is_dir():
        raise UserError(f"checkpoint.dirpath={checkpoint_dir} is a file, not a folder; set another checkpoint.dirpath")
    found = checkpoints_in(checkpoint_dir)
    if not found:
        return
    if resume_path is not None and resume_path.resolve().parent == checkpoint_dir.resolve():
        return
    newest = checkpoint_dir / LAST if checkpoint_dir / LAST in found else found[-1]
    raise UserError(
        f"the checkpoint folder {checkpoint_dir} holds checkpoints of another run ({newest.name}); "
        f"set checkpoint.dirpath to another folder, or continue that run with "
        f"resume.ckpt_path={newest} resume.weights_only=false"
    )


def check_writable(checkpoint_dir: Path) -> None:
    """Make the folder and write to it now, not first when hours of training are to be saved.

    Raises:
        UserError: naming the folder and the system's reason.
    """
    try:
        checkpoint_dir.mkdir(parents=True, exist_ok=True)
        # Permission bits do not tell: they mean nothing to root, or on a read-only or full file system.
        trial = checkpoint_dir / f".writable.{secrets.token_hex(4)}.tmp"
        try:
            trial.write_bytes(b"checkpoint")
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"checkpoints cannot be written to {checkpoint_dir} ({error.strerror or error}); "
            "set checkpoint.dirpath to a folder that can be written to"
        ) from error


def clean(folders: Iterable[Path]) -> str | None:
    """Remove what interrupted writes left in ``folders``; says what went in one line, None where there was nothing.

    Call it while the folders are locked: a temporary file there then belongs to nobody.
    """
    found = [path for folder in dict.fromkeys(folders) for path in sorted({*leftovers(folder), *_unfinished(folder)})]
    if not found:
        return None
    size = 0
    for path in found:
        size += 0 if path.is_symlink() else size_of(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    names = ", ".join(path.name for path in found[:3]) + (f" and {len(found) - 3} more" if found[3:] else "")
    files = "1 file" if len(found) == 1 else f"{len(found)} files"
    return f"removed {files} ({size / 1e6:.1f} MB) that an interrupted write left: {names}"


def temporary_beside(path: Path, tag: str | None = None) -> Path:
    """The name that a folder has until it is complete, or while it goes."""
    return path.with_name(f".{path.name}.{tag or secrets.token_hex(4)}.tmp")


def _unfinished(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.glob(f".*{SUFFIX}.*.tmp") if path.is_dir() or path.is_symlink())


def discard(path: Path) -> None:
    """Remove a checkpoint, file or folder; one that is gone already is no error."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    # Half removed it would look like a damaged checkpoint: it loses its name first.
    going = temporary_beside(path)
    path.rename(going)
    shutil.rmtree(going)


def size_of(path: Path) -> int:
    """Bytes of a checkpoint, file or folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir())
    return path.stat().st_size


def listed_hash(path: Path) -> str | None:
    """SHA-256 over what the completion marker of a folder lists, unchecked; None where there is no marker."""
    try:
        files = json.loads((path / MARKER).read_text(encoding="utf-8"))["files"]
        lines = "".join(f"{name} {facts['sha256']}\n" for name, facts in sorted(files.items()))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return hashlib.sha256(lines.encode()).hexdigest()


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints directly inside ``folder``, by name; what a dying write leaves is none."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))


def checkpoint_name(template: str, *, epoch: int, step: int, insert_names: bool = False) -> str:
    """A step checkpoint's file name. The optimizer step is part of every name, whatever the template says.

    ``insert_names`` writes ``epoch=0003`` for ``{epoch:04d}`` (``checkpoint.auto_insert_metric_name``).

    Raises:
        UserError: the template names a field other than epoch and step, or is no name in the folder.
    """
    fields = {match.group(1) for match in _FIELD.finditer(template)}
    if "step" not in fields:
        template += "-step-{step:07d}"
    if insert_names:
        template = re.sub(r"\{(\w+)", r"\1={\1", template)
    try:
        name = template.format(epoch=epoch, step=step)
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"checkpoint.filename={template} cannot be filled in ({error}); only {{epoch}} and {{step}} are "
            'known, as in "epoch-{epoch:04d}"'
        ) from error
    if not name or Path(name).name != name or name.startswith("."):
        raise UserError(f"checkpoint.filename={template} is not a plain file name; put folders into checkpoint.dirpath")
    return name + SUFFIX
