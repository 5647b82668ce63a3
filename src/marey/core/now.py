"""What this process is reading right now, told to the process that waits for it: also when the read never returns.

Threads of one process share one slot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BYTES = 1024
_slot: int | None = None


def tell(path: Path) -> None:
    """From here on, what ``reading`` names is found in the file ``path``."""
    global _slot
    _slot = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    _write("")


@contextmanager
def reading(name: str) -> Iterator[None]:
    """The file (or store) being read while this lasts. Without ``tell`` it costs nothing."""
    if _slot is None:
        yield
        return
    _write(name)
    try:
        yield
    finally:
        _write("")


def told(path: Path) -> str | None:
    """What the process that tells ``path`` is reading, or was when it died; None: nothing, or nothing yet."""
    try:
        text = path.read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return None
    return text or None


def _write(name: str) -> None:
    assert _slot is not None
    os.pwrite(_slot, name.encode(errors="replace")[:_BYTES].ljust(_BYTES, b"\0"), 0)
