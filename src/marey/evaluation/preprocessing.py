"""The one description of what the encoder expects, read from the checkpoint and applied everywhere.

Legend: B clips, T frames, H and W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from marey.core.errors import UserError

LAYOUT = "B,C,T,H,W"


@dataclass(frozen=True)
class Preprocessing:
    """What turns stored frames into the encoder's input; it travels with the checkpoint."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_frames: int
    frame_stride: int
    """Stored frames between two frames of a clip."""
    rate: float | None
    """Stored frames per second in training; None where the training data did not say."""
    img_size: int
    patch_size: int
    tubelet_size: int

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, where: str) -> Preprocessing:
        """Checked; UserError naming ``where`` for a description this version cannot honour."""
        if raw.get("format") != 1 or raw.get("layout") != LAYOUT:
            raise UserError(
                f"{where} describes its preprocessing as format {raw.get('format')!r}, layout "
                f"{raw.get('layout')!r}, and this version knows format 1, layout {LAYOUT!r}; update Marey"
            )
        try:
            rate = raw.get("rate")
            return cls(
                mean=tuple(float(x) for x in raw["mean"]),
                std=tuple(float(x) for x in raw["std"]),
                num_frames=int(raw["num_frames"]),
                frame_stride=int(raw["frame_stride"]),
                rate=None if rate is None else float(rate),
                img_size=int(raw["img_size"]),
                patch_size=int(raw["patch_size"]),
                tubelet_size=int(raw["tubelet_size"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{where} describes its preprocessing incompletely ({error!r}); give another checkpoint"
            ) from error

    def normalize(self, video: torch.Tensor) -> torch.Tensor:
        """uint8 ``[B, 3, T, H, W]`` -> float32 of the same shape, ``(x / 255 - mean) / std`` per channel.

        Raises UserError when the axes are not in that order or the values are not bytes, so that a clip given
        as ``[B, T, C, H, W]`` is named instead of quietly producing poor features.
        """
        expected = (3, self.num_frames, self.img_size, self.img_size)
        if video.dtype != torch.uint8:
            raise UserError(f"clips must be uint8 values 0..255, before normalisation; these are {video.dtype}")
        if video.ndim != 5 or tuple(video.shape[1:]) != expected:
            swapped = video.ndim == 5 and video.shape[2] == 3
            hint = "; this looks like B,T,C,H,W" if swapped else ""
            raise UserError(
                f"clips must be [B, {', '.join(map(str, expected))}] in the order {LAYOUT}; "
                f"these are {list(video.shape)}{hint}"
            )
        mean = torch.tensor(self.mean, device=video.device).view(1, 3, 1, 1, 1)
        std = torch.tensor(self.std, device=video.device).view(1, 3, 1, 1, 1)
        return (video.float() / 255.0 - mean) / std
