"""Initial weights as a pure function of (seed, parameter name): global random state is not touched."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from marey.core.keys import torch_generator

M = TypeVar("M", bound=nn.Module)


def make(build: Callable[[], M], *, prefix: str, seed: int, draw: Callable[[str, Tensor, torch.Generator], None]) -> M:
    """Build a module without PyTorch's own initialisation, then fill every parameter by ``draw(name, values,
    g)``.

    ``values`` is a float32 CPU tensor of the parameter's shape, holding zeros, to be filled in place; ``g``
    is a generator keyed (seed, "init", hash of ``prefix + name``), so adding, removing or reordering
    parameters changes no other parameter. The module lives on the default device and has the default dtype;
    on the ``meta`` device nothing is drawn. Buffers must be filled by the caller: here they hold whatever
    memory held.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        module = build()
    if device.type == "meta":
        return module
    module.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            draw(name, values, torch_generator(seed, "init", zlib.crc32(f"{prefix}{name}".encode())))
            parameter.copy_(values)
    return module
