"""Files that are either whole or absent: temporary name, flush, fsync, rename, fsync of the folder.

Archives (zip files, which is what ``torch.save`` writes) can also carry a seal: the SHA-256 of everything before it,
as the archive's comment. It is computed while the file is written and comes last, so a file without one is not whole
or was written by another program, a file that disagrees with its own is damaged, and a copy needs nothing beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import secrets
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from marey.core.errors import UserError

_TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{8}\.tmp$")
_SEAL = b"marey sha256 "
SEAL_BYTES = len(_SEAL) + 64
"""Length of the comment that seals an archive."""
_BLOCK = 1 << 22

UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)
"""What loading a checkpoint that is not what it should be can raise."""


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
def file_named(path: Path | str) -> Iterator[None]:
    """Give an OSError the file's name where the system did not: a full disk does not say what it had no room for."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def atomic_write(path: Path | str, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path``; on success flush it to disk and rename it onto ``path``.

    On any exception the temporary file is removed and an earlier ``path`` stays as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with file_named(target), open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:  # noqa: PTH123
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def leftovers(folder: Path) -> list[Path]:
    """What writes that a kill or a power cut interrupted left directly inside ``folder``: temporary files, by name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _TEMPORARY.match(path.name) and path.is_file())


class SealingWriter:
    """A binary file that only goes forward; hashes what passes, and ends the archive with its seal."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._held = b""
        self.error: OSError | None = None
        """The system's refusal, which a writer above may have turned into something else."""

    def write(self, data: Any) -> int:
        """All of ``data``, the last two bytes held back: an archive ends with the length of its comment."""
        block = memoryview(data).cast("B")
        whole = len(block)
        if whole < 2:
            block = memoryview(self._held + bytes(block))
            whole, self._held = len(data), b""
        try:
            self._pass(self._held)
            self._pass(block[:-2])
        except OSError as error:
            self.error = error
            raise
        self._held = bytes(block[-2:])
        return whole

    def flush(self) -> None:
        """Nothing: whoever opened the file flushes it."""

    def seal(self) -> str:
        """Write the comment; returns the hex SHA-256 of all bytes before it."""
        assert self._held == b"\0\0", "not an archive without a comment"
        self._pass(SEAL_BYTES.to_bytes(2, "little"))
        digest = self._hash.hexdigest()
        self._file.write(_SEAL + digest.encode())
        return digest

    def _pass(self, data: Any) -> None:
        self._hash.update(data)
        self._file.write(data)


def read_seal(path: Path | str) -> str | None:
    """The SHA-256 that an archive carries, unchecked; None where it carries none."""
    with open(path, "rb") as file:  # noqa: PTH123
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - SEAL_BYTES - 2, 0))
        end = file.read()
    head = SEAL_BYTES.to_bytes(2, "little") + _SEAL
    if not end.startswith(head) or not re.fullmatch(rb"[0-9a-f]{64}", end[len(head) :]):
        return None
    return end[len(head) :].decode()


def seal_holds(path: Path | str) -> bool:
    """Whether an archive carries a seal and is, byte for byte, what was sealed. Reads all of it."""
    seal = read_seal(path)
    if seal is None:
        return False
    digest = hashlib.sha256()
    with open(path, "rb") as file:  # noqa: PTH123
        left = file.seek(0, os.SEEK_END) - SEAL_BYTES
        file.seek(0)
        while left > 0:
            block = file.read(min(_BLOCK, left))
            if not block:
                return False
            digest.update(block)
            left -= len(block)
    return digest.hexdigest() == seal


def refuse_unwritable(path: Path, *, option: str, shown: Path | None = None) -> None:
    """UserError where no file could be written at ``path``; ``option`` is what named it. Nothing is made.

    ``shown``: what to call it (default: ``path``).
    """
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir():
        raise UserError(f"{option} {shown or path} cannot be written ({folder} is not a folder); give another place")
    try:
        # Permission bits do not tell: they mean nothing to root, or on a read-only disk.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"{error.strerror or error} in {folder}"
        raise UserError(f"{option} {shown or path} cannot be written ({why}); give another place") from error


def refuse_unwritable_folder(path: Path, *, option: str) -> None:
    """UserError where no files could be written into a folder ``path``; nothing is made. ``option`` named it."""
    if os.path.lexists(path) and not path.is_dir():
        raise UserError(f"{option} {path} is a file; name a folder")
    refuse_unwritable(path / "any", option=option, shown=path)


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
