"""The same training step written the plain way, as a comparison for ``encoder_step.py``.

Every token of every view is embedded by a convolution and most are dropped afterwards; global and local views go
through the encoder in two calls; rotary angles are computed in every layer, for queries and for keys; the last
block computes all outputs, though the loss reads [CLS] alone. The weights, the loss and the result are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from marey.core.pixelstats import normalize_video
from marey.models.attention import block_causal_mask
from marey.models.rope import axis_channels
from marey.models.vit import Attention, Block, VisionTransformer
from marey.objectives.invariance import InvarianceObjective, invariance_loss

THETA = 10_000.0


def _turn(x: Tensor, positions: Tensor, layout: str) -> Tensor:
    """``x`` ``[N, H, L, d]`` without [CLS], rotated axis by axis with angles made on the spot."""
    n = axis_channels(x.shape[-1])
    parts = []
    for axis in range(3):
        part = x[..., axis * n : (axis + 1) * n]
        steps = torch.arange(n // 2, dtype=x.dtype, device=x.device)
        angles = positions[:, None, :, axis, None].to(x.dtype) * THETA ** (-steps / (n / 2))
        sin, cos = angles.sin(), angles.cos()
        if layout == "tiled":
            sin, cos = sin.repeat(1, 1, 1, 2), cos.repeat(1, 1, 1, 2)
        else:
            sin, cos = sin.repeat_interleave(2, dim=-1), cos.repeat_interleave(2, dim=-1)
        pairs = part.reshape(*part.shape[:-1], -1, 2)
        swapped = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
        parts.append(part * cos + swapped * sin)
    return torch.cat((*parts, x[..., 3 * n :]), dim=-1)


def _attend(layer: Attention, x: Tensor, positions: Tensor, mask: Tensor | None, layout: str) -> Tensor:
    n, length, width = x.shape
    qkv = layer.qkv(x).view(n, length, 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    q, k = (torch.cat((y[:, :, :1], _turn(y[:, :, 1:], positions, layout)), dim=2) for y in (q, k))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    joined: Tensor = layer.proj(out.transpose(1, 2).reshape(n, length, width))
    return joined


def _summaries(model: VisionTransformer, video: Tensor, kept: Tensor, positions: Tensor) -> Tensor:
    """uint8 video ``[N, 3, T, H, W]``, kept token numbers ``[N, K]`` and positions ``[N, K, 3]`` -> ``[N, D]``."""
    tokens = model.patch_embed.proj(normalize_video(video)).flatten(2).transpose(1, 2)
    tokens = tokens.gather(1, kept[..., None].expand(-1, -1, model.embed_dim))
    x = torch.cat((model.cls_token.expand(len(video), -1, -1), tokens), dim=1)
    mask = None
    if model.attn_mode == "block_causal":
        mask = block_causal_mask(positions[..., 0], dtype=x.dtype)
    for block in model.blocks:
        assert isinstance(block, Block)
        x = x + _attend(block.attn, block.norm1(x), positions, mask, model.rope_layout)
        x = x + block.mlp(block.norm2(x))
    normed: Tensor = model.norm(x)
    return normed[:, 0]


def plain_loss(
    objective: InvarianceObjective, views: list[tuple[Tensor, Tensor, Tensor]], *, micro_step: int
) -> Tensor:
    """The loss of clips whose global and local views are given whole: (video, kept, positions) of each kind."""
    b = views[0][0].shape[0]
    summaries = [_summaries(objective.encoder, *view).view(b, -1, objective.encoder.embed_dim) for view in views]
    z = objective.projector(torch.cat(summaries, dim=1))
    sigreg: Tensor = objective.sigreg(z.transpose(0, 1), micro_step=micro_step)
    return invariance_loss(z) + objective.sigreg_weight * sigreg
