"""What an encoder makes of every patch of a clip, and where its [CLS] looks.

Legend: n clips, T frames, G = T / tubelet_size positions along time, h and w rows and columns of patches,
N = G*h*w patches, D width, H heads, d channels of one head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marey.core.errors import UserError
from marey.models.attention import Layout
from marey.models.rope import rotate
from marey.models.vit import Attention, VisionTransformer


@dataclass(frozen=True)
class Look:
    """The outputs of one encoder for n clips, float32 on the CPU."""

    patches: Tensor
    """``[n, G, h, w, D]``: patch outputs after the last LayerNorm"""
    summary: Tensor
    """``[n, D]``: the [CLS] output"""
    attention: Tensor
    """``[n, H, G, h, w]``: weight that [CLS] gives each patch in the last block"""
    to_itself: Tensor
    """``[n, H]``: weight that [CLS] gives itself; with ``attention`` it sums to 1"""


def cls_attention(attention: Attention, x: Tensor, layout: Layout) -> Tensor:
    """Softmax weights ``[n, H, 1+N]`` of [CLS] over the tokens of its own sequence, itself first.

    x: the layer's input ``[n*(1+N), D]``, one group of equally long sequences.
    """
    ((n, length),) = layout.groups
    packed = attention.qkv(x).view(n * length, 3, attention.num_heads, -1)
    query = packed.view(n, length, 3, attention.num_heads, -1)[:, 0, 0]  # [n, H, d]; [CLS] is never turned
    keys = packed[:, 1]
    if layout.cos is not None and layout.sin is not None:
        keys = rotate(keys, layout.cos[:, 0], layout.sin[:, 0], out=torch.empty_like(keys))
    keys = keys.view(n, length, attention.num_heads, -1)
    scores = torch.einsum("nhd,nlhd->nhl", query, keys) * query.shape[-1] ** -0.5
    weights: Tensor = scores.softmax(dim=-1)
    return weights


@torch.inference_mode()
def look(encoder: VisionTransformer, video: Tensor) -> Look:
    """One full forward pass of normalised ``video`` ``[n, 3, T, height, width]``, nothing dropped.

    Raises UserError for outputs that are not finite, and as the encoder does.
    """
    last = encoder.blocks[-1]
    seen: dict[str, Any] = {}

    def keep(_module: Any, inputs: tuple[Any, ...]) -> None:
        seen["x"], seen["layout"] = inputs

    hook = last.attn.register_forward_pre_hook(keep)  # type: ignore[union-attr]
    try:
        tokens: Tensor = encoder(video)
    finally:
        hook.remove()
    weights = cls_attention(last.attn, seen["x"], seen["layout"])  # type: ignore[arg-type]
    if not (bool(tokens.isfinite().all()) and bool(weights.isfinite().all())):
        raise UserError("the encoder's features are not finite: its training diverged")
    n, _, t, height, width = video.shape
    grid = (t // encoder.tubelet_size, height // encoder.patch_size, width // encoder.patch_size)
    return Look(
        patches=tokens[:, 1:].reshape(n, *grid, -1).float().cpu(),
        summary=tokens[:, 0].float().cpu(),
        attention=weights[..., 1:].reshape(n, -1, *grid).float().cpu(),
        to_itself=weights[..., 0].float().cpu(),
    )
