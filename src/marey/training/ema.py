"""An exponential moving average of the weights: saved beside them, no target, never in the loss.

One update every ``update_every`` optimizer steps uses ``decay ** update_every``, so that ``decay`` means the
same per step whatever the interval (``compensate``). The plain rule uses ``decay`` itself at each update: at
.9999 every 32 steps, 97% of the copy is still the random initialisation after 10,000 steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from marey.config.schema import EmaConfig
from marey.core.average import average_key as average_key
from marey.core.errors import UserError
from marey.training.local import local

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def effective_decay(config: EmaConfig) -> float:
    """What one update multiplies the copy by."""
    return config.decay**config.update_every if config.compensate else config.decay


def describe_rule(config: EmaConfig) -> str:
    """One sentence: which rule this run's average follows."""
    if not config.enabled:
        return "off (ema.enabled=false)"
    one = (
        f"one update multiplies by {config.decay} ** {config.update_every} = {effective_decay(config):.6g} "
        "(compensated)"
        if config.compensate
        else f"one update multiplies by {config.decay} (plain rule, ema.compensate=false)"
    )
    start = f", following from step {config.start_step}" if config.start_step else ""
    return f"every {config.update_every} optimizer steps, {one}{start}; {config.dtype}"


class Ema:
    """The averaged copy of some top-level modules of ``module``: parameters and buffers, by state-dict name.

    Up to optimizer step ``start_step`` the copy equals the weights; after it, it follows them every
    ``update_every`` steps counted from there. Floating tensors are averaged in the configured dtype, integer
    ones copied. The copy of a sharded tensor is sharded like it.
    """

    def __init__(self, module: nn.Module, config: EmaConfig) -> None:
        self.config = config
        self.updates = 0
        missing = [name for name in config.include if not hasattr(module, name)]
        if missing or not config.include:
            known = ", ".join(name for name, _ in module.named_children())
            raise UserError(
                f"ema.include={config.include} must name top-level modules of the model; choose from {known}"
            )
        self._dtype = DTYPES[config.dtype]
        self.copy = {name: self._stored(value) for name, value in self._source(module).items()}

    def after_step(self, module: nn.Module, step: int) -> bool:
        """Take note of the ``step``-th completed optimizer step (from 1); True when the copy was updated."""
        since = step - self.config.start_step
        if since <= 0:
            self._move(module, decay=0.0)
            return False
        if since % self.config.update_every:
            return False
        self._move(module, decay=effective_decay(self.config))
        self.updates += 1
        return True

    @torch.no_grad()
    def _move(self, module: nn.Module, *, decay: float) -> None:
        source = {name: local(value) for name, value in self._source(module).items()}
        copy = {name: local(value) for name, value in self.copy.items()}
        floating = [name for name, value in copy.items() if value.is_floating_point()]
        ours = [copy[name] for name in floating]
        theirs = [source[name].to(self._dtype) for name in floating]
        # ours + (theirs - ours) * (1 - decay); an exact copy where decay is 0
        if decay == 0.0:
            torch._foreach_copy_(ours, theirs)
        else:
            torch._foreach_lerp_(ours, theirs, 1.0 - decay)
        for name, value in copy.items():
            if not value.is_floating_point():
                value.copy_(source[name])

    def to(self, device: torch.device) -> None:
        """Move the copy to where the weights are."""
        self.copy = {name: value.to(device) for name, value in self.copy.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The copy's tensors, by the names the weights have in ``state_dict`` (no copies are made)."""
        return dict(self.copy)

    def load(self, tensors: Mapping[str, Tensor], *, updates: int) -> None:
        """Restore the copy and the count of updates.

        Raises:
            UserError: names or shapes that do not belong to this model.
        """
        if tensors.keys() != self.copy.keys():
            differing = sorted(tensors.keys() ^ self.copy.keys())[:3]
            raise UserError(
                f"the checkpoint's averaged weights do not belong to this model (they differ in "
                f"{', '.join(differing)}); resume with the configuration the checkpoint was made with"
            )
        for name, value in self.copy.items():
            if value.shape != tensors[name].shape:
                raise UserError(
                    f"the checkpoint's averaged {name} has shape {list(tensors[name].shape)} where this model "
                    f"has {list(value.shape)}; resume with the configuration the checkpoint was made with"
                )
            value.copy_(tensors[name])
        self.updates = updates

    def describe(self) -> dict[str, Any]:
        """Plain values for checkpoint and receipt."""
        return {
            "enabled": True,
            "updates": self.updates,
            "decay": self.config.decay,
            "update_every": self.config.update_every,
            "compensate": self.config.compensate,
            "start_step": self.config.start_step,
            "dtype": self.config.dtype,
            "rule": describe_rule(self.config),
        }

    def _source(self, module: nn.Module) -> dict[str, Tensor]:
        prefixes = tuple(f"{name}." for name in self.config.include)
        return {name: value for name, value in module.state_dict().items() if name.startswith(prefixes)}

    def _stored(self, value: Tensor) -> Tensor:
        return value.detach().to(self._dtype if value.is_floating_point() else value.dtype, copy=True)
