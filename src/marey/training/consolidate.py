"""One file of a sharded run's checkpoint: ``python -m marey.training.consolidate FOLDER OUT.ckpt``."""

from __future__ import annotations

import sys
from pathlib import Path

from marey.core.errors import UserError
from marey.core.files import UNREADABLE
from marey.training.sealed import save_sealed

USAGE = "give a checkpoint folder and the file to write: python -m marey.training.consolidate FOLDER OUT.ckpt"


def consolidate(folder: Path, out: Path) -> Path:
    """Write what a sharded checkpoint holds, bit by bit, as the sealed file that an unsharded run would have written.

    Weights, averages and optimizer state are whole in memory meanwhile.

    Raises:
        UserError: no complete checkpoint folder, something at ``out`` already, or a disk that refuses.
    """
    from marey.training.shards import load_folder, whole  # deferred: torch takes seconds, a wrong word none

    if out.exists():
        raise UserError(f"{out} exists already; name a new file")
    try:
        if not folder.is_dir() or not whole(folder):
            raise UserError(
                f"{folder} is not a complete and undamaged checkpoint folder of a sharded run; give another checkpoint"
            )
        content = load_folder(folder)
    except UNREADABLE as error:
        raise UserError(f"{folder} cannot be read ({str(error) or type(error).__name__:.120})") from error
    try:
        save_sealed(content, out)
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({error.strerror or error}); make room or name another file"
        ) from error
    return out


def main(words: list[str]) -> int:
    """The command; 0 done, 2 refused."""
    try:
        if len(words) != 2:
            raise UserError(USAGE)
        out = consolidate(*(Path(word).expanduser() for word in words))
    except UserError as error:
        print(f"marey: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
