"""Flow matching (Lipman et al. 2023, arXiv 2210.02747; straight paths) with one noise level for every frame.

Legend: B samples, C channels, T latent frames, H and W the latent canvas.

A noised frame is ``(1 - s) x + s e`` and its velocity ``e - x``; s = 0 is clean, s = 1 is noise, and the model is
told ``1000 s``. Levels are linear from 1 to 0, the end excluded, and shifted towards noise.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, distributed

from marey.batching.transport import LatentBatch
from marey.core.errors import UserError
from marey.core.keys import derive

NoiseLayout = Literal["collated", "per_sample"]
TIME_SCALE = 1000.0
"""Model time of pure noise."""


@dataclass(frozen=True)
class FlowSchedule:
    """The grid of noise levels: ``s' = shift*s / (1 + (shift-1)*s)`` of ``levels`` linear ones."""

    levels: int = 1000
    shift: float = 5.0

    def _shifted(self, linear: Tensor) -> Tensor:
        return self.shift * linear / (1 + (self.shift - 1) * linear)

    def grid(self) -> Tensor:
        """float64 ``[levels]``, descending from 1, 0 excluded."""
        return self._shifted(1 - torch.arange(self.levels, dtype=torch.float64) / self.levels)

    def sampling_grid(self, steps: int) -> Tensor:
        """float64 ``[steps + 1]``: the levels that a sampler visits, from 1 to 0, both included."""
        return self._shifted(1 - torch.arange(steps + 1, dtype=torch.float64) / steps)

    def levels_at(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Levels s of grid indices, any shape."""
        return self.grid().to(dtype).to(index.device)[index]


def per_frame(x: Tensor) -> Tensor:
    """``[B, T]`` -> ``[B, 1, T, 1, 1]``, to be broadcast over latents."""
    return x[:, None, :, None, None]


def noised(clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """``(1 - s) x + s e`` for latents ``[B, C, T, H, W]`` and levels ``[B, T]``."""
    s = per_frame(level)
    return (1 - s) * clean + s * noise


def velocity(clean: Tensor, noise: Tensor) -> Tensor:
    """``e - x``, which carries a noised frame along its straight path, from data to noise."""
    return noise - clean


def identity_key(batch: LatentBatch, sample: int) -> int:
    """A 62-bit number that belongs to the window a sample is, whatever draw brought it."""
    identity = batch.identities[sample]
    text = "\0".join((identity.source, identity.clip_id, identity.physical_key, str(identity.start)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def sample_seed(batch: LatentBatch, sample: int, *, seed: int, purpose: str) -> int:
    """The seed of one appearance of one sample in a run: batch-mates, partition and order do not enter it."""
    return derive(seed, purpose, identity_key(batch, sample), *batch.draws[sample])


def current_rank() -> int:
    """This process's rank, 0 outside a process group."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class FlowDraws:
    """The random tensors of one step, drawn one after another at the batch's collated capacity.

    ``collated``: one generator for the whole batch, keyed by micro-step and rank. Every tensor covers the capacity,
    padding included, so modes that lay out the same batch differently draw the same numbers; other batch-mates, or
    another capacity, draw others. ``per_sample``: one generator for each sample, keyed by its identity and draw, and
    only for its valid frames (0 elsewhere): neither batch-mates nor capacity nor partition enter.

    Generators live on the batch's device. Numbers are float32, cast to the latents' dtype.
    """

    of_windows: bool
    """Whether the draws belong to the windows alone, whatever draw brought them (:meth:`fixed`)."""

    def __init__(self, batch: LatentBatch, *, layout: NoiseLayout, seed: int, micro_step: int) -> None:
        self.of_windows = False
        self._batch = batch
        self._device = batch.latents.device
        if layout == "collated":
            seeds = [derive(seed, "flow-collated", micro_step, current_rank())]
        else:
            seeds = [sample_seed(batch, b, seed=seed, purpose="flow-sample") for b in range(len(batch))]
        self._start(seeds, collated=layout == "collated")

    @classmethod
    def fixed(cls, batch: LatentBatch, *, seed: int) -> FlowDraws:
        """Draws that belong to the windows alone, equal in every epoch: for validation."""
        draws = cls.__new__(cls)
        draws.of_windows = True
        draws._batch, draws._device = batch, batch.latents.device
        keys = [derive(seed, "flow-validation", identity_key(batch, b)) for b in range(len(batch))]
        draws._start(keys, collated=False)
        return draws

    def _start(self, seeds: list[int], *, collated: bool) -> None:
        self._collated = collated
        self._generators = [torch.Generator(device=self._device).manual_seed(seed) for seed in seeds]

    def states(self) -> list[Tensor]:
        """State of every generator (one, or one for each sample), uint8."""
        return [generator.get_state() for generator in self._generators]

    def normal(self, *, extra: int = 0) -> Tensor:
        """Standard normal ``[B, C, extra + T, H, W]``; ``extra`` frames stand before the first one."""
        b, c, t, h, w = self._batch.latents.shape
        shape, dtype = (b, c, extra + t, h, w), self._batch.latents.dtype
        if self._collated:
            return torch.randn(shape, generator=self._generators[0], device=self._device).to(dtype)
        out = torch.zeros(shape, device=self._device)
        for row, frames, generator in zip(out, self._batch.lengths, self._generators, strict=True):
            own = (c, extra + frames, h, w)
            row[:, : extra + frames] = torch.randn(own, generator=generator, device=self._device)
        return out.to(dtype)

    def integers(self, high: int) -> Tensor:
        """Uniform int64 ``[B, T]`` in ``0..high-1``."""
        b, t = self._batch.frame_mask.shape
        if self._collated:
            return torch.randint(high, (b, t), generator=self._generators[0], device=self._device)
        out = torch.zeros((b, t), dtype=torch.int64, device=self._device)
        for row, frames, generator in zip(out, self._batch.lengths, self._generators, strict=True):
            row[:frames] = torch.randint(high, (frames,), generator=generator, device=self._device)
        return out


def refuse_odd_geometry(batch: LatentBatch, *, patch_t: int) -> None:
    """A temporal patch has one noise level, so it may not hold both prefix and future, nor padding.

    Raises ``UserError`` naming a sample whose frames, or an alignment whose capacity, temporal patches do not divide.
    """
    if patch_t == 1:
        return
    if batch.capacity % patch_t:
        raise UserError(
            f"a batch padded to {batch.capacity} frames cannot be cut into temporal patches of {patch_t}: choose "
            f"data.batching.pad_to_multiple_of as a multiple of {patch_t}, or model.patch_t=1"
        )
    for identity, prefix, frames in zip(batch.identities, batch.prefixes, batch.lengths, strict=True):
        if prefix % patch_t or frames % patch_t:
            raise UserError(
                f"{identity} has {prefix} prefix and {frames - prefix} future frames, which temporal patches of "
                f"{patch_t} frames cannot hold: choose buckets of multiples of {patch_t}, or model.patch_t=1"
            )
