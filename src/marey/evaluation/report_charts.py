"""The curves of a run as parts of its page. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from marey.evaluation import page as html
from marey.evaluation.charts import Line, line_chart
from marey.evaluation.curves import Numbers, last_finite, thinned

Columns = Mapping[str, Numbers]
RANKS = ("train/embedding_rank", "train/feature_rank")
SPREADS = ("train/embedding_std", "train/feature_std")
COLLAPSED = 2.0
"""An effective rank below this is a collapse."""
_NAMES = {
    "train/embedding_rank": "embeddings",
    "train/feature_rank": "features",
    "train/embedding_std": "embeddings",
    "train/feature_std": "features",
}
_PARTS = {
    "train/invariance": ("mean squared distance", "Invariance: how far the views of a clip are from its global view."),
    "train/sigreg": ("statistic", "SIGReg: how far the cloud of embeddings is from a round Gaussian."),
    "train/flow": ("mean squared error", "Flow matching: error of the predicted velocity."),
}
_PROBES = {
    "probe/knn": ("accuracy", "Nearest-neighbour accuracy on the small labelled set, during training."),
    "probe/rank": ("effective rank", "Effective rank (RankMe) of the small set's features."),
    "probe/sigreg": ("statistic", "SIGReg's statistic of the small set's embeddings, always the same directions."),
}


@dataclass(frozen=True)
class Chart:
    """One figure: columns drawn together."""

    columns: Sequence[str]
    y_label: str
    caption: str
    from_zero: bool = False


def learning_section(columns: Columns, validation: Columns | None, *, marks: Sequence[float]) -> str:
    """Loss, its parts, signs of collapse, the learning rate and what was probed on the way."""
    parts = [name for name in columns if name.startswith("train/") and name not in ("train/loss", *RANKS, *SPREADS)]
    if len(parts) == 1 and _same(columns[parts[0]], columns.get("train/loss")):
        parts = []
    charts = [
        Chart(
            ["train/loss"],
            "loss",
            "The loss on training data" + (", and on validation data (dots)." if validation else "."),
        ),
        *(
            Chart([name], *_PARTS.get(name, ("value", f"{name.removeprefix('train/')}, a part of the loss.")))
            for name in parts
        ),
        Chart(
            RANKS, "effective rank", "Effective dimensions in use (RankMe). A collapsed encoder falls towards 1.", True
        ),
        Chart(SPREADS, "standard deviation", "Spread over clips, averaged over dimensions; 0 when collapsed.", True),
        *(Chart([name], *words) for name, words in _PROBES.items()),
        Chart(["lr"], "learning rate", "Learning rate of each step.", True),
    ]
    dots = {}
    if validation and "val/loss" in validation and "step" in validation:
        dots["train/loss"] = Line(
            "validation", validation["step"].tolist(), validation["val/loss"].tolist(), "series-2", dots=True
        )
    figures = [figure for chart in charts if (figure := _figure(chart, columns, marks, dots))]
    rank = last_finite(columns[RANKS[0]]) if RANKS[0] in columns else math.nan
    warnings = [
        html.note(f"The effective rank of the embeddings ended at {rank:.2f}: the encoder collapsed.")
        if rank < COLLAPSED
        else "",
    ]
    return html.section(
        "Training",
        intro=_thinning(columns, marks),
        body_html="".join(warnings) + html.row(figures, kind="charts"),
    )


def machine_section(columns: Columns, *, marks: Sequence[float]) -> str:
    """Rates, waiting for data, padding."""
    derived = dict(columns)
    waiting = waiting_share(columns)
    if waiting is not None:
        derived["waiting"] = waiting
    rates = [name for name in columns if name.endswith("_per_second")]
    charts = [
        *(
            Chart(
                [name],
                "per second",
                f"{name.removesuffix('_per_second').capitalize()} per second, over all ranks.",
                True,
            )
            for name in rates
        ),
        Chart(["waiting"], "share of time", "Share of the time in which a rank waited for data.", True),
        Chart(["padding_share"], "share of tokens", "Padding among what the heavy layers saw.", True),
        Chart(
            ["attention_utilisation"],
            "share",
            "Attention scores computed that belong to two tokens of one sample.",
            True,
        ),
    ]
    level, figures = [], []
    for chart in charts:
        name = chart.columns[0]
        values = derived.get(name)
        if name in ("padding_share", "attention_utilisation") and values is not None and _level(values):
            words = "padding" if name == "padding_share" else "attention put to use"
            level.append(f"{words} {last_finite(values):.0%} throughout")
            continue
        figures.append(_figure(chart, derived, marks, {}))
    skipped = float(np.nansum(columns["skipped_steps"])) if "skipped_steps" in columns else 0.0
    if skipped:
        level.append(f"{skipped:,.0f} optimizer steps were not finite and made no update")
    intro = f"{'; '.join(level).capitalize()}." if level else ""
    shown = [figure for figure in figures if figure]
    return html.section("Speed", intro=intro, body_html=html.row(shown, kind="charts")) if shown or intro else ""


def waiting_share(columns: Columns) -> Numbers | None:
    """Seconds waited for data by seconds trained, row by row, 0..1; None where the run did not measure them."""
    if "wall_seconds" not in columns or "data_wait_seconds" not in columns:
        return None
    spent = np.diff(columns["wall_seconds"], prepend=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(spent > 0, columns["data_wait_seconds"] / spent, math.nan)
    return np.clip(share, 0.0, 1.0)


def _figure(chart: Chart, columns: Columns, marks: Sequence[float], dots: Mapping[str, Line]) -> str:
    lines: list[Line] = []
    for name in chart.columns:
        if name not in columns or "step" not in columns or not np.isfinite(columns[name]).any():
            continue
        x, y = columns["step"], columns[name]
        if name.startswith("probe/"):  # measured now and then: the rows between are no gaps
            x, y = x[np.isfinite(y)], y[np.isfinite(y)]
        curve = thinned(x, y)
        band = None if curve.low is None or curve.high is None else (curve.low.tolist(), curve.high.tolist())
        lines.append(
            Line(
                _NAMES.get(name, name.removeprefix("train/").replace("_", " ")),
                curve.x.tolist(),
                curve.y.tolist(),
                "series-1" if not lines else "series-2",
                band,
            )
        )
    if not lines or not any(math.isfinite(y) for line in lines for y in line.y):
        return ""
    lines += [dots[name] for name in chart.columns if name in dots]
    svg = line_chart(
        lines,
        title=chart.caption,
        x_label="optimizer step",
        y_label=chart.y_label,
        from_zero=chart.from_zero,
        marks=marks,
    )
    return html.figure(body_html=svg, caption=chart.caption)


def _thinning(columns: Columns, marks: Sequence[float]) -> str:
    rows = len(columns.get("step", ()))
    curve = thinned(columns["step"], columns["step"]) if "step" in columns else None
    words = []
    if curve is not None and curve.low is not None:
        words.append(
            f"Each point is the mean of {-(-rows // len(curve.y)):,} of the {rows:,} logged rows; the band behind it "
            "spans their extremes."
        )
    if marks:
        words.append("Dotted upright lines: where a sitting ended and another went on.")
    return " ".join(words)


def _same(a: Numbers, b: Numbers | None) -> bool:
    return b is not None and bool(np.allclose(a, b, rtol=1e-3, equal_nan=True))


def _level(values: Numbers) -> bool:
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and float(finite.max() - finite.min()) < 5e-3
