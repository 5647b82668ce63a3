"""The codec ``encoder``: the patch features of a pretrained Marey encoder as latent video.

It needs a model, so it lives here; the latents room finds it by the entry point in ``pyproject.toml``.
Legend: C features of a patch, T frames, T' latent frames, H and W pixels, t tubelet size, p patch size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from marey.core.errors import UserError
from marey.core.files import sha256
from marey.evaluation.colours import FeatureColours
from marey.evaluation.loading import Weights, load_encoder, resolve_device


class EncoderCodec:
    """Every latent frame is what the frozen encoder makes of its own frames alone.

    A latent frame stands for ``t`` frames (the first one for frame 0 alone, repeated t times), given to the encoder
    as a clip of their own: so no feature of a known frame holds anything of a later one, whatever attention the
    encoder was trained with. The canvas is that of the frames; ingest at the short edge of the encoder's training to
    give it patches of the scale it knows. Features cannot be turned back into pixels: ``decode`` colours them.
    """

    name = "encoder"

    def __init__(
        self, *, path: str, weights: Weights | None = None, device: str = "auto", frames_per_pass: int = 16
    ) -> None:
        if weights not in (None, "ema", "online"):
            raise UserError(f"codec encoder: weights={weights} is not one of ema, online; name one of them.")
        if frames_per_pass < 1:
            raise UserError(f"codec encoder: frames_per_pass={frames_per_pass} is not possible; use 1 or more.")
        file = Path(path).expanduser()
        self._device = resolve_device(device)
        loaded = load_encoder(file, weights=weights, device=self._device)
        self._encoder = loaded.encoder
        self._mean, self._std = (
            torch.tensor(values, device=self._device).view(1, 3, 1, 1, 1)
            for values in (loaded.preprocessing.mean, loaded.preprocessing.std)
        )
        self._per_pass = frames_per_pass
        self.channels = loaded.encoder.embed_dim
        self.spatial, self.temporal = loaded.encoder.patch_size, loaded.encoder.tubelet_size
        self.fingerprint = f"encoder-1 checkpoint={sha256(file)[:16]} weights={loaded.info.weights}"

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        """uint8 ``[T, 3, H, W]``, T = 1 + t*(T'-1) -> float32 ``[C, T', H/p, W/p]``."""
        assert frames.ndim == 4, frames.shape
        assert frames.dtype == torch.uint8, frames.dtype
        t = self.temporal
        height, width = frames.shape[2:]
        if height % self.spatial or width % self.spatial:
            raise UserError(
                f"codec encoder: frames of {height}x{width} pixels do not divide into patches of {self.spatial}; crop "
                "or resize them to a multiple."
            )
        assert (len(frames) - 1) % t == 0, frames.shape
        repeated = torch.cat((frames[:1].expand(t, -1, -1, -1), frames[1:]))
        clips = repeated.reshape(-1, t, 3, height, width)
        features = []
        for part in torch.split(clips, self._per_pass):
            video = part.transpose(1, 2).to(self._device).float() / 255
            tokens: Tensor = self._encoder((video - self._mean) / self._std)  # [b, 1 + N, C]
            features.append(tokens[:, 1:].float().cpu())
        rows, columns = height // self.spatial, width // self.spatial
        grid = torch.cat(features).reshape(len(clips), rows, columns, self.channels)
        return grid.permute(3, 0, 1, 2).contiguous()

    def decode(self, latents: Tensor) -> Tensor:
        """Floating ``[C, T', H', W']`` -> uint8 ``[T', 3, H'*p, W'*p]``: the features' own principal colours.

        One colour map for one call: to compare videos, fit ``FeatureColours`` once and use it for both.
        """
        return FeatureColours.fit(latents, cell=self.spatial).decode(latents)
