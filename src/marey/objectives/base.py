"""What every objective hands the trainer for one micro-step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepOutput(NamedTuple):
    """One micro-step of one rank. B clips of this rank; everything but ``loss`` is detached.

    loss: scalar, to be differentiated. parts: named scalars the loss is made of (before weighting).
    embeddings: ``[B, O]``, what the loss compares, of the undisturbed view of each clip, or None. features:
    ``[B, D]``, what a user of the encoder gets, or None; both serve to see a collapse coming.
    clips: B. tokens: tokens that went through the encoder on this rank, [CLS] included.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    embeddings: Tensor | None
    features: Tensor | None
    clips: int
    tokens: int
