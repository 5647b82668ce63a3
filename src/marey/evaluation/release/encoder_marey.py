# SPDX-License-Identifier: Apache-2.0
"""A video Vision Transformer in plain PyTorch: the encoder that Marey trains, without Marey, for inference.

Legend: B clips, T frames, H and W pixels, S side of the input, N patch tokens of a clip, L = 1 + N tokens ([CLS]
first), D width, h heads, d channels of a head.

Operations and their order are those of the training code, so that float32 results on a CPU are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, linear, pad, scaled_dot_product_attention

THETA = 10_000.0
AXES = 3  # t, h, w


def preprocess(frames: Tensor, *, size: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 frames ``[T, 3, H, W]`` or ``[B, T, 3, H, W]`` (RGB, 0..255) -> float32 ``[B, 3, T, S, S]``.

    Short side to ``size`` (bicubic, antialiased, on the CPU), centre crop, ``(x / 255 - mean) / std`` per channel.
    """
    video = frames.unsqueeze(0) if frames.ndim == 4 else frames
    if video.ndim != 5 or video.shape[2] != 3:
        raise ValueError(f"frames must be [T, 3, H, W] or [B, T, 3, H, W]; these are {list(frames.shape)}")
    if video.dtype != torch.uint8:
        raise ValueError(f"frames must be uint8 values 0..255; these are {frames.dtype}")
    b, t, _, height, width = video.shape
    short, long = min(height, width), max(height, width)
    side = int(size * long / short)
    new = (size, side) if height <= width else (side, size)
    x = video.flatten(0, 1).cpu()
    if new != (height, width):
        x = x.contiguous(memory_format=torch.channels_last)
        x = interpolate(x, size=new, mode="bicubic", antialias=True, align_corners=False)
    top, left = round((new[0] - size) / 2.0), round((new[1] - size) / 2.0)
    x = x[:, :, top : top + size, left : left + size]
    x = x.contiguous().view(b, t, 3, size, size).transpose(1, 2)
    shape = (1, 3, 1, 1, 1)
    return (x.float() / 255.0 - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)


def axis_channels(channels: int) -> int:
    """How many of ``channels`` one axis has."""
    return 2 * (channels // AXES // 2)


def _angles(positions: Tensor, channels: int, dtype: torch.dtype) -> tuple[Tensor, torch.dtype]:
    """Positions ``[N, 3]`` times frequencies: ``[N, 3, channels/2]``, in float32 at least."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    half = channels // 2
    frequencies = THETA ** (-torch.arange(half, dtype=precise, device=positions.device) / half)
    return positions.to(precise).unsqueeze(-1) * frequencies, precise


def rotary_tables(positions: Tensor, *, head_dim: int, layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines ``[N, head_dim]`` for integer positions ``[N, 3]``.

    ``rotary``: both channels of a pair (2i, 2i+1) turn by one angle. ``tiled``: the frequencies are tiled twice
    while adjacent channels are paired, which is no true rotation, and is what such weights were trained with.
    """
    n = axis_channels(head_dim)
    angles, precise = _angles(positions, n, dtype)
    angles = torch.cat((angles, angles), dim=-1) if layout == "tiled" else angles.repeat_interleave(2, dim=-1)
    angles = pad(angles.flatten(-2), (0, head_dim - AXES * n))
    sign = torch.tensor([-1.0, 1.0], dtype=precise, device=positions.device).repeat(head_dim // 2)
    return angles.cos(), angles.sin() * sign


def sincos_embedding(positions: Tensor, *, width: int, dtype: torch.dtype) -> Tensor:
    """Fixed embeddings ``[N, width]`` of integer positions ``[N, 3]``, for encoders without rotary positions."""
    n = axis_channels(width)
    angles, _ = _angles(positions, n, dtype)
    waves = torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return pad(waves, (0, width - AXES * n)).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x*cos + swap(x)*sin``, the channels of every pair exchanged in ``swap``; in the tables' precision."""
    pairs = x.view(*x.shape[:-1], -1, 2)
    swapped = torch.stack((pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def block_causal_mask(frames: Tensor, dtype: torch.dtype) -> Tensor:
    """``[1, 1, L, L]`` to add to scores: a patch of frame i sees frame j iff j <= i, [CLS] sees all, none sees it."""
    n = frames.shape[0]
    seen = pad(frames.unsqueeze(0) <= frames.unsqueeze(1), (1, 0, 0, 0), value=False)
    seen = pad(seen, (0, 0, 1, 0), value=True)
    mask = torch.zeros(1, 1, 1 + n, 1 + n, dtype=dtype, device=frames.device)
    return mask.masked_fill(~seen, float("-inf"))


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """``[B, L, D]`` -> ``[B, L, D]``; tables ``[L, 1, 1, d]``."""
        b, length, width = x.shape
        qkv = self.qkv(x).view(b, length, 3, self.num_heads, width // self.num_heads)
        qk = qkv[:, :, :2] if tables is None else rotate(qkv[:, :, :2], *tables)
        q, k, v = (part.transpose(1, 2) for part in (qk[:, :, 0], qk[:, :, 1], qkv[:, :, 2]))
        out: Tensor = scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        projected: Tensor = self.proj(out)
        return projected


class Mlp(nn.Module):
    """Linear, exact GELU, Linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` -> ``[..., D]``."""
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    """A pre-LayerNorm Transformer block."""

    def __init__(self, width: int, num_heads: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """``[B, L, D]`` -> ``[B, L, D]``."""
        x = x + self.attn(self.norm1(x), tables, mask)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchEmbed(nn.Module):
    """One Linear over flattened patches, kept in the shape of the convolution that it equals."""

    def __init__(self, width: int, patch_size: int, tubelet_size: int) -> None:
        super().__init__()
        kernel = (tubelet_size, patch_size, patch_size)
        self.proj = nn.Conv3d(3, width, kernel_size=kernel, stride=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        """``[..., 3 * tubelet * patch * patch]`` -> ``[..., D]``."""
        return linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class VideoEncoder(nn.Module):
    """``[CLS]`` and one token per patch of every ``tubelet_size`` frames, through pre-LayerNorm blocks."""

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        num_heads: int,
        mlp_width: int,
        patch_size: int,
        tubelet_size: int,
        use_rope: bool,
        rope_layout: str,
        attn_mode: str,
        eps: float,
    ) -> None:
        super().__init__()
        if rope_layout not in ("tiled", "rotary") or attn_mode not in ("full", "block_causal"):
            raise ValueError(f"unknown rope_layout {rope_layout!r} or attn_mode {attn_mode!r}")
        self.num_heads, self.patch_size, self.tubelet_size = num_heads, patch_size, tubelet_size
        self.use_rope, self.rope_layout, self.attn_mode = use_rope, rope_layout, attn_mode
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.patch_embed = PatchEmbed(width, patch_size, tubelet_size)
        self.blocks = nn.ModuleList(Block(width, num_heads, mlp_width, eps) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, video: Tensor) -> Tensor:
        """Normalised video ``[B, 3, T, H, W]`` -> ``[B, 1+N, D]``: [CLS], then patches frame by frame, row by row.

        T, H and W may differ from training's; they must be multiples of the tubelet and the patch.
        """
        if video.ndim != 5 or video.shape[1] != 3 or not video.is_floating_point():
            raise ValueError(f"video must be floating [B, 3, T, H, W]; this is {list(video.shape)}, {video.dtype}")
        b, _, t, height, width = video.shape
        patch, tubelet = self.patch_size, self.tubelet_size
        if t % tubelet or height % patch or width % patch:
            raise ValueError(f"{t} x {height} x {width} is not a multiple of {tubelet} x {patch} x {patch}")
        grid = (t // tubelet, height // patch, width // patch)
        blocks = video.reshape(b, 3, grid[0], tubelet, grid[1], patch, grid[2], patch)
        patches = blocks.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, grid[0] * grid[1] * grid[2], -1)
        dtype = self.cls_token.dtype
        tokens = self.patch_embed(patches.to(dtype)).to(dtype)
        axes = torch.meshgrid(*(torch.arange(n, device=video.device) for n in grid), indexing="ij")
        positions = torch.stack([axis.reshape(-1) for axis in axes], dim=-1)
        if not self.use_rope:
            tokens = tokens + sincos_embedding(positions, width=tokens.shape[-1], dtype=dtype)
        x = torch.cat((self.cls_token.expand(b, 1, -1), tokens), dim=1)
        tables = self._tables(positions, x.shape[-1] // self.num_heads, dtype)
        mask = None
        if self.attn_mode == "block_causal":
            autocast = torch.is_autocast_enabled(x.device.type) and dtype != torch.float64
            mask = block_causal_mask(positions[:, 0], torch.get_autocast_dtype(x.device.type) if autocast else dtype)
        for block in self.blocks:
            x = block(x, tables, mask)
        out: Tensor = self.norm(x)
        return out

    def _tables(self, positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if not self.use_rope:
            return None
        # [CLS] stands at (0, 0, 0), where every cosine is 1 and every sine 0: it is not turned.
        with_cls = pad(positions, (0, 0, 1, 0))
        cos, sin = rotary_tables(with_cls, head_dim=head_dim, layout=self.rope_layout, dtype=dtype)
        return cos[:, None, None], sin[:, None, None]
