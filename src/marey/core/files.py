"""Files that are either whole or absent: temporary name, flush, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from marey.core.errors import UserError


def cache_dir() -> Path:
    """Where Marey keeps what it can make again: ``$MAREY_CACHE``, else the user's cache folder."""
    explicit = os.environ.get("MAREY_CACHE")
    if explicit:
        return Path(explicit).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "marey"


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable (a no-op where folders cannot be opened)."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_write(path: Path | str, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path``; on success flush it to disk and rename it onto ``path``.

    On any exception the temporary file is removed and an earlier ``path`` stays as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:  # noqa: PTH123
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def refuse_unwritable(path: Path, *, option: str) -> None:
    """UserError where no file could be written at ``path``; ``option`` is what named it. Nothing is made."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir():
        raise UserError(f"{option} {path} cannot be written ({folder} is not a folder); give another place")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{option} {path} cannot be written (no permission in {folder}); give another place")


def write_text(path: Path | str, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8), whole or not at all."""
    with atomic_write(path, "w") as file:
        file.write(text)


def write_json(path: Path | str, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sha256(path: Path | str) -> str:
    """Hex SHA-256 of a file's content."""
    with open(path, "rb") as file:  # noqa: PTH123
        return hashlib.file_digest(file, "sha256").hexdigest()
