"""Small encoders and token groups for the tests of models and objectives."""

from __future__ import annotations

from typing import Any

import torch

from marey.config.schema import ModelConfig
from marey.core.tokens import TokenGroup, grid_positions
from marey.models.vit import VisionTransformer, build_encoder


def model_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "name": "vit_nano",
        "img_size": 32,
        "patch_size": 8,
        "num_frames": 4,
        "tubelet_size": 1,
        "use_rope": True,
        "token_drop_rate": 0.5,
        "attn_mode": "block_causal",
        "rope_layout": "tiled",
    }
    return ModelConfig(**(values | changes))


def encoder(seed: int = 0, **changes: Any) -> VisionTransformer:
    """A float64 encoder whose biases and norms are not trivial, so that a forgotten one is seen."""
    model = build_encoder(model_config(**changes), seed=seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def kept_tokens(count: int, tokens: int, keep: int, *, seed: int) -> torch.Tensor:
    """int64 ``[count, keep]``: ascending token numbers, another draw for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, tokens, generator=generator).argsort(dim=1)[:, :keep].sort(dim=1).values


def group(count: int, grid: tuple[int, int, int], keep: int, *, values: int = 192, seed: int = 0) -> TokenGroup:
    """float64 patches of kept tokens on a grid, ``values`` numbers each."""
    positions = grid_positions(grid)
    kept = kept_tokens(count, len(positions), keep, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(count, keep, values, generator=generator, dtype=torch.float64)
    return TokenGroup(patches, positions[kept])
