"""How facts are put into lines for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def aligned(rows: Iterable[tuple[str, str]], *, indent: int = 0) -> list[str]:
    """``name   text``, names padded to one width; empty texts are left out."""
    kept = [(name, text) for name, text in rows if text]
    width = max((len(name) for name, _ in kept), default=0) + 2
    return [f"{' ' * indent}{name:<{width}}{text}".rstrip() for name, text in kept]


def count(number: int, one: str, many: str | None = None) -> str:
    """``1 video``, ``1,200 videos``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size(number: float) -> str:
    """Bytes as ``3.2 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def short(value: float) -> str:
    """A number without trailing zeros: ``15``, ``29.97``."""
    return f"{value:.6g}"


def dig(tree: Any, *keys: str) -> Any:
    """``tree[k1][k2]...``, or None where a level is missing or no dictionary."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
