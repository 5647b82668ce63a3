"""This rank's part of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The shard that this rank holds of a sharded tensor, without a copy; any other tensor itself. No gradient."""
    # Asked by name: importing torch.distributed.tensor costs every unsharded run most of a second.
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part
