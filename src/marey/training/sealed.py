"""Single files of tensors and plain values that carry their own proof; no Lightning here."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, cast

import torch

from marey.core.files import SealingWriter, atomic_write


def save_sealed(content: dict[str, Any], path: str | Path) -> str:
    """``torch.save`` into a sealed file, whole or not at all; returns its SHA-256, computed as it was written.

    Raises:
        OSError: as the system refuses; an earlier file of that name stays as it was.
    """
    with atomic_write(path) as file:
        writer = SealingWriter(file)
        try:
            torch.save(content, cast("IO[bytes]", writer))  # all that it uses is write and flush
        except RuntimeError as error:
            # PyTorch's archive writer turns what the disk said into a complaint about positions.
            if writer.error is None:
                raise
            raise writer.error from error
        return writer.seal()
