"""One run at a time in a folder: a lock that ends with the process that holds it, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from marey.core.errors import UserError

NAME = ".marey.lock"
PATIENCE_S = 0.5
"""A start that only looks whether a folder is free holds it for a moment."""
_HELD = {errno.EWOULDBLOCK, errno.EACCES}
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def alone_in(folders: Sequence[tuple[str, Path]], *, run_dir: Path) -> Iterator[list[str]]:
    """Hold every folder (key that names it, folder) for as long as this lasts; gives notes for people.

    The kernel lets go of the lock when the process dies, SIGKILL included. Loader workers do not inherit it.

    Raises:
        UserError: another run holds one of them; naming its process.
    """
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        for folder, key in {path.resolve(): key for key, path in reversed(folders)}.items():
            note = stack.enter_context(_held(folder, key=key, run_dir=run_dir))
            notes += [note] if note else []
        yield notes


def check_free(folder: Path, *, key: str) -> None:
    """Refuse a folder that another run is using; creates nothing.

    Raises:
        UserError: as :func:`alone_in` does.
    """
    path = folder / NAME
    if not path.exists():
        return
    with contextlib.suppress(FileNotFoundError, PermissionError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise _in_use(folder, key, error) from error


@contextlib.contextmanager
def _held(folder: Path, *, key: str, run_dir: Path) -> Iterator[str | None]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    file = _open(folder, key=key)
    if file is None:
        yield f"{folder} cannot be locked on this disk: let no second run write to it"
        return
    try:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"pid": os.getpid(), "host": platform.node(), "since": since, "run_dir": str(run_dir)}
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
            file.truncate(0)
            file.write(json.dumps(about).encode())
            file.flush()
        yield None
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # still held, so nobody else holds this very file
        with contextlib.suppress(OSError):
            file.close()


def _open(folder: Path, *, key: str) -> Any:
    path = folder / NAME
    end = time.monotonic() + PATIENCE_S
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno in _UNSUPPORTED:
                return None
            if error.errno not in _HELD or time.monotonic() > end:
                raise _in_use(folder, key, error) from error
            time.sleep(0.05)
            continue
        # Its last holder may have removed the file between our opening it and our locking it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _in_use(folder: Path, key: str, error: OSError) -> UserError:
    if error.errno not in _HELD:
        return UserError(f"the folder {folder} cannot be locked ({error.strerror}); set {key} to another one")
    try:
        about = json.loads((folder / NAME).read_text(encoding="utf-8"))
        who = f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "it left no name"
    return UserError(
        f"the folder {folder} is in use by another run ({who}); wait for it to end, or set {key} to another folder"
    )
