"""Conditioning text of a batch: who keeps theirs, who gets the blank, laid side by side without padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marey.batching.transport import LatentBatch
from marey.core.errors import UserError
from marey.objectives.flow import sample_seed


def refuse_text_settings(*, dropout: float, blank: Tensor | None, text_channels: int | None) -> None:
    """Text dropout replaces a text by the blank embedding ``[L, D]``, so both must exist; ``UserError`` otherwise."""
    if dropout > 0 and text_channels is None:
        raise UserError(
            f"program.text_dropout={dropout} has no text to drop: set data.text_conditioning=task_prompt, or "
            "program.text_dropout=0"
        )
    if dropout > 0 and blank is None:
        raise UserError(
            f"program.text_dropout={dropout} replaces texts by the blank embedding, which does not exist: embed the "
            "empty text with the same encoder, or set program.text_dropout=0"
        )
    if blank is not None and blank.shape[-1] != text_channels:
        raise UserError(
            f"the blank embedding has {blank.shape[-1]} channels and the model reads {text_channels}: embed both with "
            "the text encoder of this run"
        )


def dropped_texts(batch: LatentBatch, *, dropout: float, seed: int) -> list[bool]:
    """Whose text is replaced, with probability ``dropout``: keyed by the sample, so batch-mates do not enter."""
    return [
        sample_seed(batch, b, seed=seed, purpose="text-drop") / 2**63 < dropout if dropout > 0 else False
        for b in range(len(batch))
    ]


def flat_text(
    batch: LatentBatch, *, text_channels: int | None, dropped: Sequence[bool], blank: Tensor | None
) -> tuple[Tensor | None, tuple[int, ...] | None]:
    """Every sample's own text tokens in batch order ``[M, D]`` and how many each has; None twice without text.

    Raises ``UserError``, naming a sample, where texts and ``text_channels`` do not go together.
    """
    if text_channels is None:
        if batch.text is not None:
            raise UserError(
                f"{batch.identities[0]} has a text and the model has no cross-attention: set "
                "data.text_conditioning=task_prompt, or drop the text from the data"
            )
        return None, None
    if batch.text is None or batch.text_lengths is None:
        raise UserError(
            f"{batch.identities[0]} has no text and the model is conditioned on text: give every clip a text, or set "
            "data.text_conditioning=disabled"
        )
    if batch.text.shape[-1] != text_channels:
        raise UserError(
            f"the text of {batch.identities[0]} has {batch.text.shape[-1]} channels and the model reads "
            f"{text_channels}: use the text encoder that the model was built for"
        )
    texts: list[Tensor] = []
    for b, length in enumerate(batch.text_lengths):
        if dropped[b]:
            assert blank is not None
            texts.append(blank.to(batch.text))
        else:
            texts.append(batch.text[b, :length])
    return torch.cat(texts).to(batch.latents.dtype), tuple(len(text) for text in texts)
