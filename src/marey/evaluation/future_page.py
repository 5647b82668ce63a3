"""The part of the demonstration's page that shows predicted futures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marey.core.progress import duration
from marey.evaluation import page as html
from marey.evaluation.charts import Line, line_chart


@dataclass(frozen=True)
class Film:
    """An animated picture: a ``data:`` address and what it shows."""

    uri: str
    still: str
    """its last moment, for readers who ask for less motion"""
    caption: str


@dataclass(frozen=True)
class Future:
    """What a causal predictor made of clips it had not seen."""

    films: Sequence[Film]
    errors: Mapping[str, float]
    """mean squared error of the latents over all ``clips``, by what guessed them; the prediction first"""
    by_frame: Mapping[str, Sequence[float]]
    """the same of each predicted frame"""
    clips: int
    known: int
    predicted: int
    """latent frames given and predicted"""
    held_out: bool
    steps: int
    seconds: float
    padding: float
    """share of what the heavy layers saw that was padding"""
    metrics: Mapping[str, Sequence[float]]
    """the run's ``metrics.csv`` by column"""


def future_figures(films: Sequence[Film], errors: Mapping[str, float], *, clips: int) -> str:
    """The films side by side, and the errors (mean over ``clips``) by what guessed; the still image must be there."""
    figures = [
        html.figure(
            body_html=html.animated(
                film.uri, still=film.still, alt=f"what followed, beside its prediction; {film.caption}"
            ),
            caption=film.caption,
        )
        for film in films
    ]
    still = errors["still image"]
    rows = [
        [name, f"<strong>{error:.4g}</strong>", f"{error / still:.2f}" if still > 0 else "-"]
        for name, error in errors.items()
    ]
    return (
        html.row(figures, kind="charts films")
        + html.table(
            ["guess", "mean squared error", "against a still image"],
            rows,
            caption=f"Error of the predicted latents, mean over {clips} clips",
        )
        + "<p>The still image holds the last given frame. Copy last guesses each frame to be the true one before "
        "it: it sees the future up to then, which the prediction does not.</p>"
    )


def future_intro(*, model: str, known: int, predicted: int, seen: str) -> str:
    """What the films show, and which clips they are."""
    return (
        f"{model} is given the first {known} frames of a clip and predicts the next {predicted}, starting from noise. "
        "Left, what really followed; right, the prediction. The bar beneath is grey while frames are given and red "
        f"once they are predicted. The clips, {seen}, were drawn by the seed."
    )


def future_section(future: Future) -> str:
    """Films, errors and the curve."""
    seen = "that training never saw" if future.held_out else "of videos that training saw too, for want of others"
    chart = html.figure(
        body_html=line_chart(
            [Line("flow loss", future.metrics["step"], future.metrics["train/loss"])],
            title="Flow-matching loss on training clips",
            x_label="optimizer step",
            y_label="loss",
            from_zero=True,
        ),
        caption=f"{future.steps:,} optimizer steps in {duration(future.seconds)}; clips of unequal length are "
        f"packed, so {future.padding:.0%} of what the heavy layers saw was padding.",
    )
    lines = [
        Line(name, list(range(1, len(values) + 1)), values, colour=colour)
        for (name, values), colour in zip(future.by_frame.items(), ("series-1", "series-2", "series-3"), strict=False)
    ]
    growth = html.figure(
        body_html=line_chart(
            lines,
            title="Error of each predicted frame",
            x_label="predicted frame",
            y_label="mean squared error",
            from_zero=True,
        ),
        caption="Error frame by frame: the further ahead, the harder.",
    )
    return html.section(
        "What it expects to happen next",
        intro=future_intro(model="A second, causal model", known=future.known, predicted=future.predicted, seen=seen),
        body_html=future_figures(future.films, future.errors, clips=future.clips)
        + html.row([growth, chart], kind="charts"),
    )
