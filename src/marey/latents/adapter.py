"""From a window of a clip to a sample: the one place that knows what a stored latent video is.

A request says all that is needed to read one window, so a loader worker needs no manifest. The adapter
crops the tensor to the window's valid frames before anything is collated.
"""

from __future__ import annotations

from typing import Protocol

import torch

from marey.core.latents import LatentSample
from marey.latents.requests import WindowRequest
from marey.latents.sidecar import Expected, read_frames


class TextEncoder(Protocol):
    """Turns a clip's text into conditioning tokens."""

    width: int
    fingerprint: str
    """Names the encoder and its settings; equal fingerprints give equal embeddings."""

    def encode(self, text: str, *, clip: str) -> torch.Tensor:
        """float32 ``[L, width]``, 1 <= L <= the encoder's token limit."""
        ...

    def blank(self) -> torch.Tensor:
        """float32 ``[L, width]``: what stands for no text at all."""
        ...


class LatentAdapter:
    """Reads windows. Pickles cheaply; files open inside the process that reads.

    ``text`` None: samples carry no text. ``condition``: samples carry the stored frame before their first
    one (their windows must not start at frame 0). ``verify``: the manifest's SHA-256, where it has one, is
    checked at each read.
    """

    def __init__(self, *, text: TextEncoder | None = None, condition: bool = False, verify: bool = False) -> None:
        self._text, self._condition, self._verify = text, condition, verify

    def load(self, request: WindowRequest) -> LatentSample:
        """The sample of one window, float32. Raises UserError naming the clip when its file is not as promised."""
        clip, lead = request.clip, int(self._condition)
        assert request.start >= lead, request
        latents = read_frames(
            clip.path,
            clip=f"{request.source}/{clip.clip_id}",
            expected=Expected(clip.length_frames, clip.height, clip.width),
            start=request.start - lead,
            frames=request.frames + lead,
            layout=request.layout,
            digest=clip.sha256 if self._verify else None,
        ).to(torch.float32)
        text = None
        if self._text is not None and clip.text is not None:
            text = self._text.encode(clip.text, clip=f"{request.source}/{clip.clip_id}")
        return LatentSample(
            video_latents=latents[:, lead:],
            prefix_frames=request.prefix,
            future_frames=request.future,
            frame_positions=torch.arange(request.frames),
            identity=request.identity,
            length_hint=request.frames,
            text=text,
            condition_latent=latents[:, :1] if self._condition else None,
            epoch=request.epoch,
            position=request.position,
            repeat=request.repeat,
        )
