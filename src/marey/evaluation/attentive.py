"""The attentive probe: one learned query reads all patch tokens of a clip; several probes side by side.

Legend: B clips of a batch, N tokens of a clip, D features of a token, S probes, H heads, d = D/H, K classes.

The probe is V-JEPA's (Bardes et al. 2024, arXiv 2404.08471): multi-head cross-attention of a learned query over the
tokens, the query added back, a residual MLP with one GELU, LayerNorm, and a linear layer. Instead of a LayerNorm over
each token, every channel is standardised by the training tokens, so that a patch without contrast stays without.

With one query, keys and values of single tokens are never needed: a score ``(W_k x) . q`` is ``x . (W_k^T q)``, and a
weighted sum of values is ``W_v`` of the weighted sum of tokens. That is 4 H D operations a token instead of 4 D^2, and
one pass over the features serves all S probes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from marey.core.keys import torch_generator

MAX_HEADS, MIN_HEAD_WIDTH = 16, 32
MLP_RATIO = 4
QUERY_STD = 0.02


def head_count(width: int) -> int:
    """The most heads, up to 16, that divide ``width`` into at least 32 channels each; else 1."""
    return max((h for h in range(1, MAX_HEADS + 1) if width % h == 0 and width // h >= MIN_HEAD_WIDTH), default=1)


class AttentiveProbes(nn.Module):
    """S probes with the same start, a pure function of ``seed``; every parameter is ``[S, ...]``, so that what one
    learns does not depend on its neighbours.

    mean, inverse: ``[D]``, of the training tokens: their mean, and one over their standard deviation (0 for a channel
    that never varies, which is then ignored).
    """

    mean: Tensor
    inverse: Tensor

    def __init__(self, *, probes: int, classes: int, mean: Tensor, inverse: Tensor, seed: int) -> None:
        super().__init__()
        width = mean.shape[0]
        self.heads = head_count(width)
        head_width = width // self.heads
        generator = torch_generator(seed, "probe-attentive-start")

        def drawn(*shape: int, std: float) -> nn.Parameter:
            one = torch.randn(*shape, generator=generator) * std
            return nn.Parameter(one.expand(probes, *shape).clone())

        def filled(*shape: int, value: float = 0.0) -> nn.Parameter:
            return nn.Parameter(torch.full((probes, *shape), value))

        plain = 1 / math.sqrt(width)
        self.query = drawn(width, std=QUERY_STD)
        self.to_query, self.to_query_bias = drawn(width, width, std=plain), filled(width)
        self.to_key = drawn(self.heads, width, head_width, std=plain)
        self.to_value, self.to_value_bias = drawn(self.heads, width, head_width, std=plain), filled(width)
        self.out, self.out_bias = drawn(width, width, std=plain), filled(width)
        self.norm1, self.norm1_bias = filled(width, value=1.0), filled(width)
        self.fc1, self.fc1_bias = drawn(width, MLP_RATIO * width, std=plain), filled(MLP_RATIO * width)
        self.fc2 = drawn(MLP_RATIO * width, width, std=1 / math.sqrt(MLP_RATIO * width))
        self.fc2_bias = filled(width)
        self.norm2, self.norm2_bias = filled(width, value=1.0), filled(width)
        self.classify, self.classify_bias = filled(width, classes), filled(classes)
        self.register_buffer("mean", mean.float())
        self.register_buffer("inverse", inverse.float())

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[B, N, D]`` -> logits ``[S, B, K]``."""
        (batch, _, width), probes, heads = x.shape, self.query.shape[0], self.heads
        head_width = width // heads
        query = _affine(self.query.unsqueeze(1), self.to_query, self.to_query_bias)  # [S, 1, D]
        asked = self.to_key @ query.view(probes, heads, head_width, 1)  # [S, H, D, 1]
        # Standardising is folded into what is asked (a shift changes no softmax) and into what was gathered.
        asked = asked.view(probes * heads, width) * self.inverse / math.sqrt(head_width)
        weight = (x @ asked.T).transpose(1, 2).softmax(dim=-1)  # [B, S*H, N]
        gathered = (weight @ x - self.mean) * self.inverse  # [B, S*H, D]
        by_head = gathered.view(batch, probes, heads, width).permute(1, 2, 0, 3)  # [S, H, B, D]
        values = (by_head @ self.to_value).transpose(1, 2).flatten(2) + self.to_value_bias.unsqueeze(1)  # [S, B, D]
        y = self.query.unsqueeze(1) + _affine(values, self.out, self.out_bias)
        inner = gelu(_affine(_norm(y, self.norm1, self.norm1_bias), self.fc1, self.fc1_bias))
        y = y + _affine(inner, self.fc2, self.fc2_bias)
        return _affine(_norm(y, self.norm2, self.norm2_bias), self.classify, self.classify_bias)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``[S, B, in]``, ``[S, in, out]``, ``[S, out]`` -> ``[S, B, out]``."""
    return torch.baddbmm(bias.unsqueeze(1), x, weight)


def _norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:]) * gain.unsqueeze(1) + bias.unsqueeze(1)
