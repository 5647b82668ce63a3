"""The shared video transformer: denoises latent video, one set of weights for every batching mode and program.

Legend: B samples, C latent channels, T latent frames, H and W the latent canvas; (pt, p, p) the patch; F temporal
positions that the heavy layers see (temporal patches: frames where pt = 1), S tokens of each, N = F*S; M text
tokens; D width, d channels of one head.

Which positions are seen and who sees whom comes from a ``VideoLayout``; nothing here knows modes or programs. Every
heavy layer is called once per forward pass, on flat tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from marey.batching.attention import isolated_attention
from marey.batching.layout import VideoLayout
from marey.batching.segments import AttentionLayout
from marey.core.errors import UserError
from marey.models.adaln import EPS, TimeEmbedding, gated_add, modulated_norm
from marey.models.init import make
from marey.models.rope3d import rotary_factors, rotate_pairs


@dataclass(frozen=True, kw_only=True)
class VideoTransformerSize:
    """What decides the parameters, and nothing else."""

    channels: int
    """latent channels, C"""
    width: int
    """D"""
    depth: int
    """blocks"""
    heads: int
    patch: int = 2
    """latent pixels, side of a patch"""
    patch_t: int = 1
    """latent frames of a patch"""
    mlp_ratio: float = 4.0
    text_channels: int | None = None
    """channels of the text embedding; None: no cross-attention"""

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise UserError(
                f"model.hidden={self.width} over model.heads={self.heads} does not give an even number of channels per "
                "head: choose heads that divide half of hidden"
            )

    @property
    def head_dim(self) -> int:
        """d"""
        return self.width // self.heads

    @property
    def patch_channels(self) -> int:
        """Values of one patch."""
        return self.channels * self.patch_t * self.patch**2


class _HeadNorm(nn.RMSNorm):
    """RMS norm over the channels of a head, in the precision of its weight whatever autocast hands it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = _HeadNorm(width // heads)
        self.k_norm = _HeadNorm(width // heads)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, factors: Tensor, layout: AttentionLayout) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q = rotate_pairs(self.q_norm(q), factors).to(v.dtype)
        k = rotate_pairs(self.k_norm(k), factors).to(v.dtype)
        out: Tensor = self.proj(isolated_attention(q, k, v, layout).flatten(1))
        return out


class _CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.q_norm = _HeadNorm(width // heads)
        self.k_norm = _HeadNorm(width // heads)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, text: Tensor, layout: AttentionLayout) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = self.kv(text).unflatten(-1, (2, self.heads, -1)).unbind(1)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        out: Tensor = self.proj(isolated_attention(q, k, v, layout).flatten(1))
        return out


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))
        return out


class _Block(nn.Module):
    """Self-attention, text cross-attention and MLP; the first and the last modulated six ways by time."""

    def __init__(self, size: VideoTransformerSize) -> None:
        super().__init__()
        self.modulation = nn.Linear(size.width, 6 * size.width)
        self.attn = _SelfAttention(size.width, size.heads)
        if size.text_channels is not None:
            self.norm_cross = nn.LayerNorm(size.width, eps=EPS)
            self.cross = _CrossAttention(size.width, size.heads)
        self.mlp = _Mlp(size.width, round(size.width * size.mlp_ratio))

    def forward(self, x: Tensor, time: Tensor, factors: Tensor, text: Tensor | None, layout: VideoLayout) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(time).chunk(6, dim=-1)
        x = gated_add(x, gate_a, self.attn(modulated_norm(x, shift_a, scale_a), factors, layout.attention))
        if text is not None:
            assert layout.cross is not None
            x = x + self.cross(self.norm_cross(x), text, layout.cross)
        return gated_add(x, gate_m, self.mlp(modulated_norm(x, shift_m, scale_m)))


class _Final(nn.Module):
    def __init__(self, size: VideoTransformerSize) -> None:
        super().__init__()
        self.modulation = nn.Linear(size.width, 2 * size.width)
        self.proj = nn.Linear(size.width, size.patch_channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = self.modulation(time).chunk(2, dim=-1)
        out: Tensor = self.proj(modulated_norm(x, shift, scale))
        return out


class VideoTransformer(nn.Module):
    """Latent video in, the same shape out: the velocity of the flow at each frame's own noise level."""

    def __init__(self, size: VideoTransformerSize) -> None:
        super().__init__()
        self.size = size
        self.patch_embed = nn.Linear(size.patch_channels, size.width)
        self.time_embed = TimeEmbedding(size.width)
        if size.text_channels is not None:
            self.text_embed = nn.Linear(size.text_channels, size.width)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.depth))
        self.final = _Final(size)

    def tokens_per_position(self, height: int, width: int) -> int:
        """S on a canvas of ``height`` x ``width`` latent pixels; refused where the patch does not divide it."""
        p = self.size.patch
        if height % p or width % p:
            raise UserError(
                f"a latent canvas of {height} x {width} cannot be cut into patches of {p} x {p}: choose model.patch "
                "that divides both, or crop the canvas when encoding"
            )
        return (height // p) * (width // p)

    def _patches(self, latents: Tensor, layout: VideoLayout) -> Tensor:
        """``[B, C, T, H, W]`` -> ``[N, patch channels]``, only the positions that the layout shows."""
        pt, p = self.size.patch_t, self.size.patch
        b, c, t, h, w = latents.shape
        blocks = latents.reshape(b, c, t // pt, pt, h, w).transpose(1, 2)
        seen = layout.gather(blocks)
        seen = seen.reshape(-1, c, pt, h // p, p, w // p, p).permute(0, 3, 5, 1, 2, 4, 6)
        return seen.reshape(layout.tokens, self.size.patch_channels)

    def _video(self, patches: Tensor, layout: VideoLayout, shape: torch.Size) -> Tensor:
        """``[N, patch channels]`` -> ``[B, C, T, H, W]``, zero where nothing was seen."""
        pt, p = self.size.patch_t, self.size.patch
        b, c, t, h, w = shape
        blocks = patches.reshape(-1, h // p, w // p, c, pt, p, p).permute(0, 3, 4, 1, 5, 2, 6)
        seen = blocks.reshape(-1, c, pt, h, w)
        return layout.scatter(seen).transpose(1, 2).reshape(b, c, t, h, w)

    def forward(
        self,
        latents: Tensor,
        *,
        times: Tensor,
        positions: Tensor,
        layout: VideoLayout,
        text: Tensor | None = None,
    ) -> Tensor:
        """Velocity ``[B, C, T, H, W]`` of ``latents`` ``[B, C, T, H, W]``.

        ``times`` are model times ``[B, T/pt]`` (0: clean, 1000: noise) and ``positions`` temporal positions
        ``[B, T/pt]``, both per temporal patch. ``text`` holds every sample's own text tokens, one sample after the
        other in batch order, without padding: ``[M, text channels]``, or None for a model without text.
        """
        assert (text is None) == (self.size.text_channels is None)
        rows, columns = (n // self.size.patch for n in latents.shape[-2:])
        x = self.patch_embed(self._patches(latents, layout))
        time = self.time_embed(layout.gather(times))
        factors = rotary_factors(
            layout.gather(positions), rows=rows, columns=columns, head_dim=self.size.head_dim, dtype=latents.dtype
        )
        context: Tensor | None = None
        if text is not None:
            context = self.text_embed(text if layout.text_index is None else text[layout.text_index])
        for block in self.blocks:
            x = block(x, time, factors, context, layout)
        return self._video(self.final(x, time), layout, latents.shape)


def _draw(name: str, values: Tensor, generator: torch.Generator) -> None:
    """adaLN-Zero: modulations and the output start at zero, so every block starts as the identity."""
    if name.endswith("norm.weight") or name.endswith("norm_cross.weight"):
        values.fill_(1.0)
    elif values.ndim >= 2 and "modulation" not in name and name != "final.proj.weight":
        nn.init.xavier_uniform_(values, generator=generator)


def build_video_transformer(size: VideoTransformerSize, *, seed: int) -> VideoTransformer:
    """A fresh model: weights are a function of (seed, parameter name), on the default device."""
    return make(lambda: VideoTransformer(size), prefix="video_transformer.", seed=seed, draw=_draw)
