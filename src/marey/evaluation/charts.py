"""Small line charts as inline SVG, coloured by the page's CSS variables: they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 66, 24, 14, 44


@dataclass(frozen=True)
class Line:
    """One curve. colour: the name of a CSS variable without its dashes, for example ``series-1``."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "series-1"
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """Lowest and highest of what each point stands for, drawn behind the curve."""
    dots: bool = False
    """Points alone, no line between them."""


def ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten) that cover ``low..high``."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"a chart needs finite limits, not {low}..{high}")
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):  # level, as far as a chart can show
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    decimals = max(0, 1 - math.floor(math.log10(step)))
    return [round(i * step, decimals) for i in range(first, last + 1)]


def number(value: float) -> str:
    """Short text for a tick or a caption: no trailing zeros, ``1,500``, ``30k``, ``2M``, ``5e-4``."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e12 or size < 1e-2:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for power, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= power:
            return f"{value / (1e3 if unit == 'k' else power):.4g}{unit}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
    reference: tuple[float, str] | None = None,
    marks: Sequence[float] = (),
) -> str:
    """An ``<svg>`` with axes, labels and a text alternative; points that are not finite leave a gap.

    reference: a horizontal line at a value, with its caption. marks: upright lines at these x, where they fall
    within the curves. Raises ValueError when no point is finite.
    """
    points = [
        (x, y) for line in lines for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)
    ]
    if not points:
        raise ValueError(f"chart {title!r}: no finite point to draw")
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    for line in lines:
        ys += [y for side in line.band or () for y in side if math.isfinite(y)]
    if reference is not None:
        ys = [*ys, reference[0]]
    x_ticks = ticks(min(xs), max(xs))
    x_low, x_high = (min(xs), max(xs)) if max(xs) > min(xs) else (x_ticks[0], x_ticks[-1])
    if all(float(x).is_integer() for x in xs):  # there is no half step
        x_ticks = [value for value in x_ticks if value.is_integer()]
    y_ticks = ticks(min(0.0, *ys) if from_zero else min(ys), max(ys))
    if min(ys) >= 0:  # room around a level curve is not room below nothing
        y_ticks = [value for value in y_ticks if value >= 0]
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place_x(value: float) -> float:
        return LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def place_y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(_spoken(lines, title), quote=True)}">'
    ]
    for value in y_ticks:
        y = place_y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in x_ticks:
        if x_low <= value <= x_high:
            x = place_x(value)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="label" transform="translate(11 {middle:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    if reference is not None:
        y = place_y(reference[0])
        parts.append(f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{y - 6:.1f}" text-anchor="end">{escape(reference[1])}</text>')
    for value in marks:
        if x_low < value < x_high:
            x = place_x(value)
            parts.append(f'<line class="mark-line" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for line in lines:
        for area in _areas(line):
            outline = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in area)
            parts.append(f'<polygon class="band" points="{outline}" style="fill:var(--{line.colour})"/>')
        for run in _runs(line):
            path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in run)
            if len(run) == 1 or line.dots:
                parts += [
                    f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3" style="fill:var(--{line.colour})"/>'
                    for x, y in run
                ]
            else:
                parts.append(f'<polyline class="curve" points="{path}" style="stroke:var(--{line.colour})"/>')
    parts.append("</svg>")
    if len(lines) > 1:
        items = "".join(
            f'<span><i style="background:var(--{line.colour})"></i>{escape(line.name)}</span>' for line in lines
        )
        parts.append(f'<p class="legend">{items}</p>')
    return "".join(parts)


def _runs(line: Line) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _areas(line: Line) -> list[list[tuple[float, float]]]:
    """The band of each unbroken stretch, once around."""
    if line.band is None:
        return []
    areas: list[list[tuple[float, float]]] = []
    upper: list[tuple[float, float]] = []
    lower: list[tuple[float, float]] = []
    for x, low, high in zip([*line.x, math.nan], [*line.band[0], math.nan], [*line.band[1], math.nan], strict=True):
        if all(map(math.isfinite, (x, low, high))):
            upper.append((x, high))
            lower.append((x, low))
            continue
        if len(upper) > 1:
            areas.append([*upper, *reversed(lower)])
        upper, lower = [], []
    return areas


def _spoken(lines: Sequence[Line], title: str) -> str:
    ends = []
    for line in lines:
        finite = [y for y in line.y if math.isfinite(y)]
        if finite:
            ends.append(f"{line.name} from {number(finite[0])} to {number(finite[-1])}")
    return f"{title}: {'; '.join(ends)}"
