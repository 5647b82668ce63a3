"""The matrix products that a training step cannot do without, as a program of its own to time beside the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn


class Product(NamedTuple):
    """One call of a Linear layer: ``[rows, inner]`` by a weight ``[outer, inner]``."""

    rows: int
    inner: int
    outer: int


def block_products(width: int, depth: int, tokens: int) -> list[Product]:
    """qkv, proj, fc1 and fc2 of all blocks of a vision transformer on this many tokens."""
    shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    return [Product(tokens, inner, outer) for inner, outer in shapes] * depth


def recorded_products(model: nn.Module, forward: Callable[[], object]) -> list[Product]:
    """The calls of all Linear layers of ``model`` while ``forward`` runs, in order."""
    calls: list[Product] = []

    def record(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        calls.append(Product(inputs[0].numel() // layer.in_features, layer.in_features, layer.out_features))

    hooks = [m.register_forward_pre_hook(record) for m in model.modules() if isinstance(m, nn.Linear)]
    forward()
    for hook in hooks:
        hook.remove()
    return calls


def make_floor(products: Sequence[Product]) -> Callable[[], None]:
    """All products forward (X W^T), then backward (dY W and dY^T X), into memory allocated here, once per shape."""
    memory = {}
    for product in products:
        if product not in memory:
            x, dy = torch.randn(product.rows, product.inner), torch.randn(product.rows, product.outer)
            w = torch.randn(product.outer, product.inner)
            memory[product] = (x, dy, w, torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w))
    calls = [memory[product] for product in products]

    def floor() -> None:
        for x, _, w, y, _, _ in calls:
            torch.mm(x, w.T, out=y)
        for x, dy, w, _, dx, dw in reversed(calls):
            torch.mm(dy, w, out=dx)
            torch.mm(dy.T, x, out=dw)

    return floor
