"""The video encoder: a Vision Transformer over per-frame patches that embeds only the tokens it is given.

Legend: B videos, N sequences of one group, K patch tokens of a sequence, M tokens of all sequences ([CLS]
included), R sequences of all groups, D width, P = 3*tubelet*patch*patch values of a patch.

Names and shapes of the parameters are those of the published weights, so that a download loads without
conversion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from marey.config.schema import ModelConfig
from marey.config.sizes import SIZES
from marey.core.errors import UserError
from marey.core.pixelstats import normalize_patches
from marey.core.tokens import TokenGroup, grid_positions, grid_shape, patchify
from marey.models.attention import (
    AttnMode,
    Layout,
    compute_dtype,
    plan_attention,
    self_attention,
    summary_attention,
)
from marey.models.init import make
from marey.models.rope import RopeLayout, sincos_embedding

EPS = 1e-6
MLP_RATIO = 4
INIT_STD = 0.02


class Attention(nn.Module):
    """The two Linear layers around attention; what is seen by whom is the layout's."""

    def __init__(self, *, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """``[M, D]`` -> ``[M, D]``."""
        out: Tensor = self.proj(self_attention(self.qkv(x), layout, num_heads=self.num_heads))
        return out

    def summarise(self, x: Tensor, cls_rows: Tensor, layout: Layout) -> Tensor:
        """``[M, D]`` -> ``[R, D]``: the same for the [CLS] tokens alone."""
        width = x.shape[1]
        weight_q, weight_kv = torch.split(self.qkv.weight, [width, 2 * width])
        bias_q, bias_kv = torch.split(self.qkv.bias, [width, 2 * width])
        q = linear(x[cls_rows], weight_q, bias_q)
        kv = linear(x, weight_kv, bias_kv)
        out: Tensor = self.proj(summary_attention(q, kv, layout, num_heads=self.num_heads))
        return out


class Mlp(nn.Module):
    """Linear, exact GELU, Linear."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[M, D]`` -> ``[M, D]``."""
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    """A pre-LayerNorm Transformer block."""

    def __init__(self, *, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.attn = Attention(width=width, num_heads=num_heads)
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.mlp = Mlp(width=width)

    def forward(self, x: Tensor, layout: Layout, cls_rows: Tensor | None = None) -> Tensor:
        """``[M, D]`` -> ``[M, D]``; given ``cls_rows`` (int64 ``[R]``), ``[R, D]``: those tokens' outputs
        alone.
        """
        if cls_rows is None:
            x = x + self.attn(self.norm1(x), layout)
        else:
            x = x[cls_rows] + self.attn.summarise(self.norm1(x), cls_rows, layout)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchEmbed(nn.Module):
    """One Linear over flattened patches, kept in the shape of the convolution that it equals."""

    def __init__(self, *, width: int, patch_size: int, tubelet_size: int) -> None:
        super().__init__()
        kernel = (tubelet_size, patch_size, patch_size)
        self.proj = nn.Conv3d(3, width, kernel_size=kernel, stride=kernel)

    def forward(self, patches: Tensor) -> Tensor:
        """``[..., P]`` -> ``[..., D]``."""
        return linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class VisionTransformer(nn.Module):
    """See the module's page. Made by ``build_encoder``; attributes: embed_dim, depth, num_heads, patch_size,
    tubelet_size.

    Without rotary positions (``use_rope`` false) a fixed sine-cosine embedding of (t, h, w) is added to the
    tokens: it has no parameters, so the weights have the same names and shapes either way.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        depth: int,
        num_heads: int,
        patch_size: int,
        tubelet_size: int,
        use_rope: bool,
        rope_layout: RopeLayout,
        attn_mode: AttnMode,
    ) -> None:
        super().__init__()
        self.embed_dim, self.depth, self.num_heads = embed_dim, depth, num_heads
        self.patch_size, self.tubelet_size = patch_size, tubelet_size
        self.use_rope, self.rope_layout, self.attn_mode = use_rope, rope_layout, attn_mode
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.patch_embed = PatchEmbed(width=embed_dim, patch_size=patch_size, tubelet_size=tubelet_size)
        self.blocks = nn.ModuleList(Block(width=embed_dim, num_heads=num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim, eps=EPS)

    def forward(self, video: Tensor) -> Tensor:
        """Normalised video ``[B, 3, T, H, W]`` (floating) -> all tokens ``[B, 1+N, D]``, [CLS] first, for
        evaluation.

        T, H and W may differ from training's; they must be multiples of the tubelet and the patch. Raises
        UserError for another axis order, for pixels that were not normalised, and for sizes that do not
        divide.
        """
        self._check(video)
        b, _, t, h, w = video.shape
        patches = patchify(video, patch=self.patch_size, tubelet=self.tubelet_size)
        grid = grid_shape(t, h, w, patch=self.patch_size, tubelet=self.tubelet_size)
        positions = grid_positions(grid).to(video.device).unsqueeze(0)
        x, layout = self._tokens([patches], [positions])
        for block in self.blocks:
            x = block(x, layout)
        out: Tensor = self.norm(x)
        return out.view(b, -1, self.embed_dim)

    def encode_groups(self, groups: Sequence[TokenGroup]) -> list[Tensor]:
        """Kept tokens of several kinds of view -> per group ``[N, 1+K, D]``, [CLS] first, after the final
        LayerNorm.

        patches: ``[N, K, P]``, uint8 (normalised here) or floating (normalised already); positions: int64
        ``[N, K, 3]``. Every token-wise layer runs once, on the concatenation of all groups' tokens.
        """
        x, layout = self._tokens([g.patches for g in groups], [g.positions for g in groups])
        for block in self.blocks:
            x = block(x, layout)
        parts = torch.split(self.norm(x), layout.sizes())
        return [part.view(n, length, -1) for part, (n, length) in zip(parts, layout.groups, strict=True)]

    def summarise_groups(self, groups: Sequence[TokenGroup]) -> list[Tensor]:
        """The [CLS] outputs of ``encode_groups`` alone, ``[N, D]`` per group, and only the work they depend
        on.

        In the last block that is every token's key and value, but the query, the output projection and the
        MLP of [CLS] only; so training pays nothing for outputs that the loss never sees.
        """
        x, layout = self._tokens([g.patches for g in groups], [g.positions for g in groups])
        starts, offset = [], 0
        for n, length in layout.groups:
            starts.append(torch.arange(n, device=x.device) * length + offset)
            offset += n * length
        cls_rows = torch.cat(starts)
        for block in self.blocks[:-1]:
            x = block(x, layout)
        x = self.norm(self.blocks[-1](x, layout, cls_rows))
        return list(torch.split(x, [n for n, _ in layout.groups]))

    def _tokens(self, patches: Sequence[Tensor], positions: Sequence[Tensor]) -> tuple[Tensor, Layout]:
        """Embedded tokens of all groups ``[M, D]``, each sequence led by [CLS], and the layout they attend
        by.
        """
        dtype = self.cls_token.dtype
        counts = [p.shape[0] for p in patches]
        flat = [p.flatten(0, 1) for p in patches]
        if all(p.dtype == flat[0].dtype for p in flat):
            flat = [torch.cat(flat)] if len(flat) > 1 else flat
        pixels = [normalize_patches(p, dtype=dtype) if p.dtype == torch.uint8 else p.to(dtype) for p in flat]
        # Under autocast too the residual stream keeps the parameters' precision: it sums 2*depth branches.
        embedded = self.patch_embed(torch.cat(pixels) if len(pixels) > 1 else pixels[0]).to(dtype)
        pieces = []
        for part, where, n in zip(
            torch.split(embedded, [p.shape[0] * p.shape[1] for p in patches]), positions, counts, strict=True
        ):
            tokens = part.view(n, -1, self.embed_dim)
            if not self.use_rope:
                tokens = tokens + sincos_embedding(where, width=self.embed_dim, dtype=dtype)
            pieces.append(torch.cat((self.cls_token.expand(n, 1, -1), tokens), dim=1).flatten(0, 1))
        x = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        layout = plan_attention(
            positions,
            counts,
            head_dim=self.embed_dim // self.num_heads,
            attn_mode=self.attn_mode,
            rope_layout=self.rope_layout if self.use_rope else None,
            dtype=dtype,
            score_dtype=compute_dtype(x),
        )
        return x, layout

    def _check(self, video: Tensor) -> None:
        shape = tuple(video.shape)
        if video.ndim != 5 or shape[1] != 3:
            hint = "move its channel axis to place 1" if video.ndim == 5 and 3 in shape else "give it five axes"
            raise UserError(f"the encoder takes video as (B, 3, T, H, W) and got shape {shape}; {hint}")
        if not video.is_floating_point():
            raise UserError(
                f"the encoder takes normalised floating-point video and got {video.dtype}; "
                "apply marey.core.pixelstats.normalize_video first"
            )
        for axis, size in ((2, self.tubelet_size), (3, self.patch_size), (4, self.patch_size)):
            if shape[axis] == 0 or shape[axis] % size:
                raise UserError(
                    f"video of shape {shape} cannot be cut into tokens: axis {axis} is {shape[axis]}, "
                    f"not a multiple of {size}; crop or resize it"
                )


def _draw(name: str, values: Tensor, generator: torch.Generator) -> None:
    """Initial values of the encoder's parameter ``name``."""
    if name.endswith(".bias"):
        return
    if ".norm" in name or name.startswith("norm"):
        values.fill_(1.0)
        return
    # Cut at +-2 in absolute terms, a hundred standard deviations out: the field's habit, in effect a normal.
    nn.init.trunc_normal_(values, std=INIT_STD, generator=generator)
    if name.endswith(("attn.proj.weight", "mlp.fc2.weight")):
        layer = int(name.split(".")[1]) + 1
        # Each of the 2*depth residual branches adds variance; scaled, the sum stays flat with depth.
        values.div_(math.sqrt(2 * layer))


def build_encoder(model: ModelConfig, *, seed: int) -> VisionTransformer:
    """The encoder of a configuration, its weights a pure function of (seed, parameter name).

    Weights of Linear and patch kernels and [CLS]: truncated normal of standard deviation .02; the
    attention-output and second MLP weights of layer l (from 1) divided by sqrt(2l); biases 0, LayerNorm 1 and
    0.
    """
    width, depth, heads = SIZES[model.name]
    return make(
        lambda: VisionTransformer(
            embed_dim=width,
            depth=depth,
            num_heads=heads,
            patch_size=model.patch_size,
            tubelet_size=model.tubelet_size,
            use_rope=model.use_rope,
            rope_layout=model.rope_layout,
            attn_mode=model.attn_mode,
        ),
        prefix="encoder.",
        seed=seed,
        draw=_draw,
    )
