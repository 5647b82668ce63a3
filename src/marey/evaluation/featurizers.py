"""What turns a clip into features: a frozen encoder, or nothing but its pixels.

Legend: B clips, T frames, S side in pixels, N tokens, D features (E of a token where they differ), P values of a patch.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import adaptive_avg_pool2d

from marey.config.schema import ModelConfig
from marey.core.tokens import grid_positions, grid_shape, patchify
from marey.evaluation.checkpoint_file import weights_hash
from marey.evaluation.features import summarise
from marey.models.rope import sincos_embedding
from marey.models.vit import VisionTransformer

CLIP_VALUES = 4096
"""Pixel values of a clip for kNN and the linear probe, at most (while a frame keeps 4 x 4)."""
MAX_SIDE, MIN_SIDE = 16, 4
PATCH_SIDE = 4
POSITION_WIDTH = 48


class Featurizer(Protocol):
    """Normalised clips ``[B, 3, T, S, S]`` to features, nothing random."""

    @property
    def identity(self) -> str:
        """Equal for two that give the same features: what a cache may go by."""
        ...

    def summary(self, video: torch.Tensor) -> torch.Tensor:
        """``[B, D]``: one vector for each clip."""
        ...

    def both(self, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The summary, and the patch tokens ``[B, N, E]``."""
        ...


@dataclass(frozen=True)
class FrozenEncoder:
    """The [CLS] output and all patch outputs of an encoder."""

    encoder: VisionTransformer
    identity: str

    @classmethod
    def of(cls, encoder: VisionTransformer, model: ModelConfig) -> FrozenEncoder:
        """Identified by its weights, bit for bit, and by the configuration of its model."""
        described = json.dumps(model.model_dump(mode="json"), sort_keys=True)
        both = f"{weights_hash(encoder.state_dict())} {described}"
        return cls(encoder, "encoder " + hashlib.sha256(both.encode()).hexdigest())

    def summary(self, video: torch.Tensor) -> torch.Tensor:
        """See ``Featurizer``."""
        return summarise(self.encoder, video, "clip")

    def both(self, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Featurizer``."""
        tokens: torch.Tensor = self.encoder(video)
        return tokens[:, 0].float(), tokens[:, 1:].float()


@dataclass(frozen=True)
class RawPixels:
    """No encoder: every frame averaged down to a few pixels; a token is a patch averaged down to 4 x 4 and where it is.

    The position (a fixed sine-cosine code, as without an encoder nothing else would say) makes this baseline stronger.
    """

    patch: int
    tubelet: int

    @property
    def identity(self) -> str:
        """The recipe, and its parameters."""
        return f"pixels 1, patch {self.patch}, tubelet {self.tubelet}"

    def summary(self, video: torch.Tensor) -> torch.Tensor:
        """``[B, 3*T*s*s]``: the largest s up to 16 with no more than 4,096 values, and 4 at least."""
        side = math.isqrt(CLIP_VALUES // (video.shape[1] * video.shape[2]))
        side = min(max(min(side, MAX_SIDE), MIN_SIDE), video.shape[-1])
        return adaptive_avg_pool2d(video.flatten(1, 2), side).flatten(1)

    def both(self, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Featurizer``; E is 48 values of a patch for each frame of a tubelet, and 48 of its position."""
        patches = patchify(video, patch=self.patch, tubelet=self.tubelet)  # [B, N, 3*tubelet*patch*patch]
        planes = patches.view(-1, 3 * self.tubelet, self.patch, self.patch)
        small = adaptive_avg_pool2d(planes, min(PATCH_SIDE, self.patch)).view(*patches.shape[:2], -1)
        where = grid_positions(grid_shape(*video.shape[2:], patch=self.patch, tubelet=self.tubelet)).to(video.device)
        position = sincos_embedding(where, width=POSITION_WIDTH, dtype=torch.float32)
        tokens = torch.cat((small, position.expand(len(video), -1, -1)), dim=-1)
        return self.summary(video), tokens
