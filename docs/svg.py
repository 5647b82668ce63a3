"""A drawing as SVG text: no fonts and no scripts of its own, light and dark as the reader's system is."""

from __future__ import annotations

from html import escape

STYLE = """\
svg { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; --ink: #1c2330; --soft: #5b6474; \
--paper: #ffffff; --line: #c9ced8; --empty: #eef0f4; --c0: #2f6fc4; --c1: #d9822b; --c2: #2e9467; --c3: #8a55c2 }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e9ef; --soft: #a2abba; --paper: #1e222b; --line: #4a5262; \
--empty: #2b313c; --c0: #6ea8f0; --c1: #f0a65a; --c2: #5cc596; --c3: #b98cf0 } }
text { fill: var(--ink) } .soft { fill: var(--soft); font-size: 14px } .head { font-weight: 600 }
.paper { fill: var(--paper) } .empty { fill: var(--empty) } .c0 { fill: var(--c0) } .c1 { fill: var(--c1) }
.c2 { fill: var(--c2) } .c3 { fill: var(--c3) } .late { fill-opacity: .5 } .pale { fill-opacity: .18 }
.frame { fill: none; stroke: var(--line) } .grid { stroke: var(--paper); stroke-width: 1.5 }
"""


class Drawing:
    """Shapes in the order in which they are painted. Lengths are in units of the view box, about CSS pixels."""

    def __init__(self, *, width: int, title: str, description: str) -> None:
        self.width, self.title, self.description = width, title, description
        self.bottom = 0.0
        self._shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A rectangle; ``kind`` names the classes of its colour."""
        self.bottom = max(self.bottom, y + height)
        self._shapes.append(f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> None:
        """One line, its base line at ``y``."""
        self.bottom = max(self.bottom, y + 5)
        named = f' class="{kind}"' if kind else ""
        placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._shapes.append(f'<text{named} x="{_n(x)}" y="{_n(y)}"{placed}>{escape(words)}</text>')

    def grid(self, x: float, y: float, side: float, cells: int) -> None:
        """Lines between the cells of a square."""
        steps = [side * i / cells for i in range(1, cells)]
        across = [f"M{_n(x + step)} {_n(y)}v{_n(side)}M{_n(x)} {_n(y + step)}h{_n(side)}" for step in steps]
        self._shapes.append(f'<path class="grid" d="{"".join(across)}"/>')

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """Coloured squares with words, side by side; ``y`` is the base line."""
        for kind, words in entries:
            self.rect(x, y - 11, 12, 12, kind)
            self.text(x + 17, y, words, "soft")
            x += 17 + 7.4 * len(words) + 18

    def svg(self) -> str:
        """The whole file."""
        height = int(self.bottom + 12)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" width="{self.width}" '
                f'height="{height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(self.description)}</desc>",
                f"<style>\n{STYLE}</style>",
                f'<rect class="paper" width="{self.width}" height="{height}" rx="8"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def wrapped(words: str, width: int) -> list[str]:
    """Lines of at most ``width`` characters."""
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def blocks(mask: list[list[bool]]) -> list[tuple[int, int, int, int]]:
    """The true cells of a matrix as rectangles (row, column, rows, columns)."""
    found: list[tuple[int, int, int, int]] = []
    open_: dict[tuple[int, int], int] = {}
    for row in range(len(mask) + 1):
        runs = set() if row == len(mask) else _runs(mask[row])
        for run in [run for run in open_ if run not in runs]:
            first = open_.pop(run)
            found.append((first, run[0], row - first, run[1]))
        for run in runs:
            open_.setdefault(run, row)
    return sorted(found)


def _runs(row: list[bool]) -> set[tuple[int, int]]:
    starts = [i for i, value in enumerate(row) if value and (i == 0 or not row[i - 1])]
    return {(start, next((i for i in range(start, len(row)) if not row[i]), len(row)) - start) for start in starts}
