"""What a loader worker hands the training loop: a latent batch, and what was replaced in it. No Lightning here."""

from __future__ import annotations

from collections.abc import Sequence

from marey.batching.transport import LatentBatch, Mode, collate
from marey.core.latents import LatentSample
from marey.latents.dataset import Replacement


class ReadBatch:
    """``replaced`` holds (place in the batch, what stood in for what). A plain object: nobody converts its tensors."""

    def __init__(self, batch: LatentBatch, replaced: list[tuple[int, Replacement]]) -> None:
        self.batch, self.replaced = batch, replaced

    def pin_memory(self) -> ReadBatch:
        """What a loader does before a copy to a GPU."""
        return ReadBatch(self.batch.pin_memory(), self.replaced)


def collate_read(
    read: Sequence[tuple[LatentSample, Replacement | None]], *, mode: Mode, pad_to_multiple_of: int
) -> ReadBatch:
    """One microbatch from what the dataset read. Raises UserError as ``batching.transport.collate``."""
    batch = collate([sample for sample, _ in read], mode=mode, pad_to_multiple_of=pad_to_multiple_of)
    return ReadBatch(batch, [(place, replacement) for place, (_, replacement) in enumerate(read) if replacement])
