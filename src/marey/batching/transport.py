"""Transport: samples of unequal length in one batch, with everything that says where each one ends.

Legend: B samples, C latent channels, T temporal capacity in latent frames, H and W the latent canvas, L text
capacity in tokens, D text channels.

Latents and texts are padded with zeros for transport alone; what the heavy layers see is decided by the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from marey.core.errors import UserError
from marey.core.latents import Identity, LatentSample

Mode = Literal["strict", "padded", "bucket", "packed"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentBatch:
    """B samples in transport. Lengths are Python integers, so that planning never waits for a device.

    The tensors are on one device; ``to`` and ``pin_memory`` move them and leave the rest.
    """

    latents: Tensor
    """float32 (float64 if all samples are) ``[B, C, T, H, W]``, 0 beyond a sample's valid frames."""
    frame_mask: Tensor
    """bool ``[B, T]``: valid frames."""
    future_mask: Tensor
    """bool ``[B, T]``: valid frames that are not prefix."""
    frame_positions: Tensor
    """int64 ``[B, T]``: each sample's own temporal positions, 0 beyond its valid frames."""
    lengths: tuple[int, ...]
    """Valid frames of each sample, 1..T."""
    prefixes: tuple[int, ...]
    """Prefix frames of each sample, fewer than its valid frames."""
    identities: tuple[Identity, ...]
    draws: tuple[tuple[int, int, int], ...]
    """(epoch, position, repeat) of the draw that brought each sample."""
    text: Tensor | None = None
    """floating ``[B, L, D]``, 0 beyond a sample's own text."""
    text_lengths: tuple[int, ...] | None = None
    condition: Tensor | None = None
    """floating ``[B, C, 1, H, W]``: the clean frame before the first one."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """T, the temporal capacity in latent frames."""
        return self.latents.shape[2]

    def _map(self, change: Callable[[Tensor], Tensor]) -> LatentBatch:
        return replace(
            self,
            latents=change(self.latents),
            frame_mask=change(self.frame_mask),
            future_mask=change(self.future_mask),
            frame_positions=change(self.frame_positions),
            text=None if self.text is None else change(self.text),
            condition=None if self.condition is None else change(self.condition),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LatentBatch:
        """The batch with its tensors on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> LatentBatch:
        """The batch with its tensors in page-locked memory (what a loader does before a copy to a GPU)."""
        return self._map(Tensor.pin_memory)

    def part(self, start: int, stop: int) -> LatentBatch:
        """Samples ``start..stop-1`` in order, capacity unchanged (views, nothing is copied)."""
        cut = self._map(lambda tensor: tensor[start:stop])
        return replace(
            cut,
            lengths=self.lengths[start:stop],
            prefixes=self.prefixes[start:stop],
            identities=self.identities[start:stop],
            draws=self.draws[start:stop],
            text_lengths=None if self.text_lengths is None else self.text_lengths[start:stop],
        )


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"


def _refuse_unequal_shapes(samples: Sequence[LatentSample], *, mode: Mode) -> None:
    first = samples[0]
    for other in samples[1:]:
        mine, its = first.video_latents.shape, other.video_latents.shape
        if mode == "strict" and mine != its:
            raise UserError(
                f"strict batching stacks samples as they are, but {first.identity} has latents "
                f"{_shape(first.video_latents)} and {other.identity} has {_shape(other.video_latents)}: set "
                "data.batching.mode to padded, bucket or packed, or data.train_batch_size=1"
            )
        if mine[0] != its[0]:
            raise UserError(
                f"samples of one batch must have the same channels, but {first.identity} has {mine[0]} and "
                f"{other.identity} has {its[0]}: encode both sources with one codec"
            )
        if mine[2:] != its[2:]:
            raise UserError(
                f"samples of one batch must have the same canvas, but {first.identity} has H x W "
                f"{mine[2]} x {mine[3]} and {other.identity} has {its[2]} x {its[3]}: set "
                "data.shape_bucketed_batching=true (it needs height and width in the manifest), or "
                "data.train_batch_size=1"
            )


def _present(samples: Sequence[LatentSample], name: str, advice: str) -> bool:
    """Whether all samples have the optional tensor ``name``; refused when only some do."""
    having = [sample for sample in samples if getattr(sample, name) is not None]
    if having and len(having) < len(samples):
        lacking = next(sample for sample in samples if getattr(sample, name) is None)
        raise UserError(
            f"{name} must be present in every sample of a microbatch or in none, but {having[0].identity} has it "
            f"and {lacking.identity} has not: {advice}"
        )
    return bool(having)


def refuse_nonfinite(sample: LatentSample) -> None:
    """Refuse a sample with NaN or Inf in any of its tensors, by name."""
    for name in ("video_latents", "text", "condition_latent"):
        tensor = getattr(sample, name)
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise UserError(
                f"{name} of {sample.identity} holds {bad} values that are NaN or infinite: encode this clip again, "
                "or remove its row from the manifest"
            )


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """float64 where all are, else float32: stored half precision is a storage format, not a computing one."""
    return torch.float64 if all(t.dtype == torch.float64 for t in tensors) else torch.float32


def _pad_texts(texts: Sequence[Tensor], identities: Sequence[Identity]) -> Tensor:
    widths = [text.shape[1] for text in texts]
    for identity, width in zip(identities, widths, strict=True):
        if width != widths[0]:
            raise UserError(
                f"texts of one batch must have the same channels, but {identities[0]} has {widths[0]} and {identity} "
                f"has {width}: embed the texts of all sources with one text encoder"
            )
    padded = torch.zeros(len(texts), max(len(t) for t in texts), widths[0], dtype=_common_dtype(texts))
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded


def collate(samples: Sequence[LatentSample], *, mode: Mode, pad_to_multiple_of: int = 1) -> LatentBatch:
    """Put samples, in their order, into one batch.

    ``mode`` strict demands equal shapes and pads nothing; the others pad in time to the longest sample, rounded up
    to ``pad_to_multiple_of`` latent frames. Raises ``UserError``, naming samples, for unequal shapes that the mode
    cannot hold, for optional tensors that only some samples have, and for NaN or Inf anywhere.
    """
    assert samples
    for sample in samples:
        refuse_nonfinite(sample)
    _refuse_unequal_shapes(samples, mode=mode)
    has_text = _present(
        samples, "text", "give every clip a text, or set data.text_conditioning=disabled for the whole run"
    )
    has_condition = _present(
        samples, "condition_latent", "read every window of a batch with its condition frame, or none"
    )

    lengths = tuple(sample.valid_frames for sample in samples)
    prefixes = tuple(sample.prefix_frames for sample in samples)
    capacity = max(lengths)
    if mode != "strict":
        capacity = -(-capacity // pad_to_multiple_of) * pad_to_multiple_of
    channels, _, height, width = samples[0].video_latents.shape
    latents = torch.zeros(
        (len(samples), channels, capacity, height, width),
        dtype=_common_dtype([sample.video_latents for sample in samples]),
    )
    positions = torch.zeros((len(samples), capacity), dtype=torch.int64)
    for b, sample in enumerate(samples):
        latents[b, :, : lengths[b]] = sample.video_latents
        positions[b, : lengths[b]] = sample.frame_positions
    time = torch.arange(capacity)
    frame_mask = time < torch.tensor(lengths).unsqueeze(1)
    texts = [sample.text for sample in samples if sample.text is not None]
    conditions = [sample.condition_latent for sample in samples if sample.condition_latent is not None]
    identities = tuple(sample.identity for sample in samples)
    return LatentBatch(
        latents=latents,
        frame_mask=frame_mask,
        future_mask=frame_mask & (time >= torch.tensor(prefixes).unsqueeze(1)),
        frame_positions=positions,
        lengths=lengths,
        prefixes=prefixes,
        identities=identities,
        draws=tuple((sample.epoch, sample.position, sample.repeat) for sample in samples),
        text=_pad_texts(texts, identities) if has_text else None,
        text_lengths=tuple(len(text) for text in texts) if has_text else None,
        condition=torch.stack(conditions).to(latents.dtype) if has_condition else None,
    )
