"""A refusal that only one rank meets, carried to rank 0, which alone speaks to people and keeps the receipt.

The rank that refuses leaves its sentence in the run's folder before it ends. The other ranks see no more than a
connection that breaks, and look there for the reason.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path

from marey.core.errors import UserError
from marey.core.files import write_text

_NAME = "refusal-rank-{rank}.txt"
PATIENCE_S = 2.0
"""How long a file on a shared disk may take to show on another machine."""


DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE}
"""What a disk refuses with, whatever was asked of it."""


@contextlib.contextmanager
def disk_in_words(*, run_dir: Path, checkpoint_dir: Path) -> Iterator[None]:
    """A disk that is full, or can no longer be written to, in one sentence; any other error as it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        what = error.filename or f"a file of the run in {run_dir} or {checkpoint_dir}"
        raise UserError(
            f"{what} cannot be written ({error.strerror}); checkpoints already written are untouched: make room, then "
            "resume from the newest"
        ) from error


def leave_refusal(run_dir: Path, *, rank: int, error: UserError) -> None:
    """Write down why this rank ends. A folder that cannot be written must not hide the refusal itself."""
    with contextlib.suppress(OSError):
        write_text(run_dir / _NAME.format(rank=rank), " ".join(str(error).split()) + "\n")


def clear_refusals(run_dir: Path) -> None:
    """Remove what an earlier sitting in this folder left."""
    for path in _found(run_dir):
        path.unlink(missing_ok=True)


def refusal_elsewhere(run_dir: Path) -> str | None:
    """The sentence of a rank that refused, with its rank; None when no rank left one."""
    end = time.monotonic() + PATIENCE_S
    while not (found := _found(run_dir)):
        if time.monotonic() > end:
            return None
        time.sleep(0.1)
    rank = found[0].stem.rpartition("-")[2]
    return f"rank {rank}: {found[0].read_text(encoding='utf-8').strip()}"


def _found(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob(_NAME.format(rank="*")))
