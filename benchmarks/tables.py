"""Tables that read well in a terminal and on a page alike."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "\N{EN DASH}"
"""What stands where nothing was measured."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns: text to the left, what starts with a digit or a sign to the right."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(3, *(len(row[i]) for row in table)) for i in range(len(header))]
    right = [all(row[i][:1] in {*"0123456789-+<>.", NONE} for row in table[1:]) for i in range(len(header))]
    lines = [
        "| " + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)) + " |"
        for row in table
    ]
    rule = "|" + "|".join("-" * (w + 1) + ":" if r else "-" * (w + 2) for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def number(value: float | None, digits: int = 3) -> str:
    """To ``digits`` significant digits, never in powers of ten; NONE for None."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    shown = float(f"{value:.{digits}g}")
    text = f"{shown:,.10f}".rstrip("0").rstrip(".")
    return text if abs(shown) >= 1e-9 else f"{value:.1e}"
