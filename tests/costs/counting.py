"""Counting what is computed rather than how long it takes: layer calls and their rows, attention pairs, elements.

The counts are taken where torch and the decoders are called, so that they hold whatever the code above is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class Product(NamedTuple):
    """One call of a Linear, or of a part of one."""

    rows: int
    outputs: int


class Attended(NamedTuple):
    """One attention call, heads left out."""

    sequences: int
    queries: int
    keys: int

    @property
    def pairs(self) -> int:
        """Query-key pairs that it computes."""
        return self.sequences * self.queries * self.keys


class Calls(TorchDispatchMode):
    """While entered: every use of a weight of ``module`` in a Linear, by the weight's name, and every attention call.

    A part of a weight counts under the weight's name, with its own number of outputs. The second run of what is
    recomputed in a backward pass counts again; the gradients' own products do not.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._names = {p.untyped_storage().data_ptr(): name for name, p in module.named_parameters()}
        self.products: dict[str, list[Product]] = {}
        self.attended: list[Attended] = []

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket.__name__
        if operation == "addmm":  # all our layers have a bias; the products of a backward pass have none
            _, x, weight = args
            name = self._names[weight.untyped_storage().data_ptr()]
            self.products.setdefault(name, []).append(Product(x.shape[0], weight.shape[1]))
        elif operation.startswith("_scaled_dot_product") and not operation.endswith("backward"):
            q, k = args[:2]
            self.attended.append(Attended(q.shape[0], q.shape[-2], k.shape[-2]))
        return func(*args, **(kwargs or {}))

    @property
    def pairs(self) -> int:
        """Query-key pairs of all calls."""
        return sum(call.pairs for call in self.attended)


class Elements(TorchDispatchMode):
    """While entered: elements that each of ``operations`` (``"cos"``) produced, and the calls it took."""

    def __init__(self, *operations: str) -> None:
        super().__init__()
        self._operations = operations
        self.counts: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self._operations:
            self.counts[name] += out.numel()
            self.calls[name] += 1
        return out


def product_flops(step: Callable[[], torch.Tensor]) -> int:
    """FLOPs of the matrix products of ``step`` and its backward pass, a multiply-add being two.

    Attention runs on the kernel that is made of plain products: the fused ones score the pairs once more in the
    backward pass, and the CPU's is not known to torch's counter.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step().backward()
    return int(counter.get_total_flops())
