"""One stored latent video as the programs see it: what the latent adapter makes and the transport collates.

Legend: C channels, T valid latent frames, H and W the latent canvas, L text tokens, D text channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Identity(NamedTuple):
    """Which window of which clip a sample is; it travels with the sample into errors and the exposure log.

    ``start`` counts latent frames from the first frame of the clip. ``physical_key`` names the recording that
    the clip was cut from (the clip's own id where the manifest does not say).
    """

    source: str
    clip_id: str
    physical_key: str
    start: int

    def __str__(self) -> str:
        return f"{self.source}/{self.clip_id}@{self.start}"


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentSample:
    """A window of a latent video, already cropped to its valid frames.

    ``prefix_frames + future_frames == T``, each at least 1. ``frame_positions`` are temporal positions of the
    frames of this sample alone. ``text`` is this sample's own, as long as it is; None where there is none.
    ``epoch``, ``position`` and ``repeat`` say which draw brought it: equal windows drawn twice differ
    there, so a key made of the identity and these three belongs to one appearance of one sample.
    """

    video_latents: torch.Tensor
    """floating ``[C, T, H, W]``."""
    prefix_frames: int
    future_frames: int
    frame_positions: torch.Tensor
    """int64 ``[T]``; 0..T-1 unless the source says otherwise."""
    identity: Identity
    length_hint: int
    """Frames of the window as the manifest promised them, known without opening the tensor."""
    text: torch.Tensor | None = None
    """floating ``[L, D]``, L >= 1."""
    condition_latent: torch.Tensor | None = None
    """floating ``[C, 1, H, W]``: the clean frame before the first one."""
    epoch: int = 0
    position: int = 0
    """Position among the draws of the epoch."""
    repeat: int = 0
    """0 for the draw itself; k for its k-th repetition that completes a microbatch over all ranks."""

    def __post_init__(self) -> None:
        assert self.video_latents.ndim == 4, self.video_latents.shape
        assert self.prefix_frames >= 1, self.identity
        assert self.future_frames >= 1, self.identity
        assert self.prefix_frames + self.future_frames == self.video_latents.shape[1], self.identity
        assert self.frame_positions.shape == (self.video_latents.shape[1],), self.identity
        assert self.text is None or (self.text.ndim == 2 and len(self.text) >= 1), self.identity
        if self.condition_latent is not None:
            c, _, h, w = self.video_latents.shape
            assert self.condition_latent.shape == (c, 1, h, w), self.identity

    @property
    def valid_frames(self) -> int:
        """T."""
        return self.prefix_frames + self.future_frames
