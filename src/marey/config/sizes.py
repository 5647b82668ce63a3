"""The encoder family's sizes, where the plan can read them without torch."""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    """Width, depth and heads of a vision transformer."""

    width: int
    depth: int
    heads: int


SIZES = {
    "vit_nano": Size(128, 4, 4),  # the demo's; the others are the field's standard family
    "vit_tiny": Size(192, 12, 3),
    "vit_small": Size(384, 12, 6),
    "vit_base": Size(768, 12, 12),
    "vit_large": Size(1024, 24, 16),
    "vit_huge": Size(1280, 32, 16),
    "vit_giant": Size(1408, 40, 16),
}
