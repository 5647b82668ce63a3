"""The demonstration as one page: result, clips, what the encoder sees, curves, probes, neighbours, receipt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from marey.evaluation import page as html
from marey.evaluation.charts import Line, line_chart
from marey.evaluation.future_page import Future, future_section
from marey.evaluation.measure import ProbeResult, Score
from marey.evaluation.pictures import Pixels, data_uri, film, plate
from marey.evaluation.probe import PRETRAINED
from marey.evaluation.seen import Seen

Metrics = Mapping[str, Sequence[float]]
EXPOSED = 3
"""One frame in so many is exposed on a plate: closer ones would run together."""


@dataclass(frozen=True)
class Picture:
    """A clip for the page. frames: uint8 ``[T, H, W, 3]``."""

    frames: Pixels
    caption: str
    label: str = ""
    """What makes two clips alike to a person; empty where nobody said."""


@dataclass(frozen=True)
class Neighbours:
    """A held-out clip and what each encoder finds nearest to it."""

    query: Picture
    found: Mapping[str, Sequence[Picture]]


@dataclass(frozen=True)
class Story:
    """All that the page says. Empty parts are left out."""

    title: str
    lede: str
    clips: Sequence[Picture]
    seen: Seen
    drop_rate: float
    metrics: Metrics
    sigreg_weight: float
    probes: Sequence[ProbeResult]
    neighbours: Sequence[Neighbours]
    receipt: Mapping[str, str]
    commands: Sequence[tuple[str, str]]
    notes: Sequence[str] = field(default_factory=list)
    future: Future | None = None
    inside_html: str = ""
    """What the encoder makes of patches, in parts of a page"""


def render(story: Story) -> str:
    """The whole document."""
    parts = [
        _clips(story.clips),
        _seen(story.seen, story.drop_rate),
        _curves(story.metrics, story.sigreg_weight),
        _probes(story.probes),
        _neighbours(story.neighbours),
        "" if story.future is None else future_section(story.future),
        _inside(story.inside_html),
        _receipt(story.receipt, story.notes),
        html.section("Do it on your own videos", body_html=html.commands(story.commands)),
    ]
    return html.page(
        title=story.title,
        lede=story.lede,
        body_html="\n".join(parts),
        footer="Made by marey demo. This page stands alone: it loads nothing and sends nothing.",
    )


def _clips(clips: Sequence[Picture]) -> str:
    figures = []
    for clip in clips:
        strip = html.moving(data_uri(film(clip.frames)), frames=len(clip.frames), alt=f"{clip.caption}, moving")
        still = html.image(
            data_uri(plate(clip.frames, every=EXPOSED)), alt=f"{clip.caption}, several moments on one plate"
        )
        figures.append(html.figure(body_html=html.row([strip, still], kind="pair"), caption=clip.caption))
    return html.section(
        "The clips",
        intro="Left, the clip as it plays. Right, several of its moments on one plate, as Étienne-Jules Marey "
        "photographed motion in 1882. Captions are for you: training never reads them.",
        body_html=html.row(figures, kind="clips"),
    )


def _seen(seen: Seen, drop_rate: float) -> str:
    figures = [
        html.figure(
            body_html=html.image(data_uri(film(seen.whole[..., :3])), alt="a film strip of one global view"),
            caption=f"The global view: {seen.tokens:,} patches in {len(seen.whole)} frames.",
        ),
        html.figure(
            body_html=html.image(data_uri(film(seen.kept)), alt="the same strip, most patches missing", kind="holes"),
            caption=f"What reaches the encoder of it: {seen.kept_tokens:,} patches. The others are never cut out, "
            "shipped or embedded, so they cost nothing.",
        ),
    ]
    locals_ = [
        html.figure(
            body_html=html.image(data_uri(film(view)), alt="a local view, most patches missing", kind="holes"),
            caption=f"A local view: {seen.kept_local_tokens} of {seen.local_tokens} patches.",
        )
        for view in seen.locals_
    ]
    return html.section(
        "What the encoder sees",
        intro=f"In training, {drop_rate:.0%} of every view is dropped at random. The encoder must place all views of "
        "a clip at the same point, from the few patches that are left; an evaluation shows it everything.",
        body_html=html.row(figures, kind="strips") + (html.row(locals_, kind="strips locals") if locals_ else ""),
    )


def _curves(metrics: Metrics, weight: float) -> str:
    steps = metrics["step"]
    charts = [
        (
            [Line("loss", steps, metrics["train/loss"])],
            "loss",
            f"Loss = invariance + {weight:g} x SIGReg, on training clips.",
        ),
        (
            [Line("invariance", steps, metrics["train/invariance"])],
            "mean squared distance",
            "Invariance: how far the views of a clip are from its global view.",
        ),
        (
            [Line("SIGReg", steps, metrics["train/sigreg"])],
            "statistic",
            "SIGReg: how far the cloud of embeddings is from a round Gaussian.",
        ),
        (
            [Line("rank", steps, metrics["train/embedding_rank"])],
            "effective rank",
            "Effective dimensions in use (RankMe). A collapsed encoder falls towards 1.",
        ),
    ]
    figures = [
        html.figure(
            body_html=line_chart(
                lines, title=caption, x_label="optimizer step", y_label=label, from_zero=lines[0].name == "rank"
            ),
            caption=caption,
        )
        for lines, label, caption in charts
    ]
    return html.section("Training", body_html=html.row(figures, kind="charts"))


def _probes(probes: Sequence[ProbeResult]) -> str:
    if not probes:
        return ""
    tables = []
    for result in probes:
        rows = []
        for name, scores in result.encoders.items():
            colour = "series-1" if name == PRETRAINED else "series-2"
            rows.append([name, _cell(scores.knn, colour), _cell(scores.linear, colour)])
        chance = _cell(result.chance, "series-3")
        rows.append(["always the commonest class", chance, chance])
        tables.append(
            html.table(
                ["encoder", "nearest neighbours", "linear layer"],
                rows,
                caption=f"{result.label.capitalize()}: {len(result.classes)} classes, accuracy on "
                f"{result.test_videos:,} held-out videos",
            )
        )
    first = probes[0]
    return html.section(
        "What it learned",
        intro=f"The encoder is frozen. A probe learns from the features of {first.train_videos:,} labelled videos and "
        f"is asked about {first.test_videos:,} that neither it nor the encoder has seen. Small figures are 95% "
        "intervals. The same encoder with the random weights it started from stands beside it, because random "
        "features are worth something too.",
        body_html="".join(tables),
    )


def _cell(score: Score, colour: str) -> str:
    return html.accuracy_cell(score.accuracy, score.low, score.high, colour=colour)


def _neighbours(sets: Sequence[Neighbours]) -> str:
    if not sets:
        return ""
    marked = " Those that share its label are marked." if any(item.query.label for item in sets) else ""
    blocks = []
    for item in sets:
        lines = []
        for name, pictures in item.found.items():
            cells = [_thumbnail(picture, asked=item.query) for picture in pictures]
            lines.append(f'<div><p class="who">nearest, {name}</p>{html.row(cells, kind="line")}</div>')
        query = html.figure(
            body_html=html.image(
                data_uri(plate(item.query.frames, every=EXPOSED)), alt=f"the clip asked about: {item.query.caption}"
            ),
            caption=f"asked: {item.query.caption}",
            kind="query",
        )
        blocks.append(f'<div class="set">{query}<div class="found">{"".join(lines)}</div></div>')
    return html.section(
        "What it finds alike",
        intro="For each clip on the left, the clips of other videos whose features point most nearly the same way. "
        "The clips asked about were drawn by the seed, not chosen." + marked,
        body_html=html.row(blocks, kind="neighbours"),
    )


def _thumbnail(picture: Picture, *, asked: Picture) -> str:
    same = bool(picture.label) and picture.label == asked.label
    text = f"{picture.label} ✓" if same else picture.label or picture.caption
    told = "the same label" if same else "another label" if picture.label and asked.label else ""
    alt = f"{picture.caption}, {told}" if told else picture.caption
    still = html.image(data_uri(plate(picture.frames, every=EXPOSED)), alt=alt)
    return html.figure(body_html=still, caption=text, kind="same" if same else "")


def _inside(parts_html: str) -> str:
    if not parts_html:
        return ""
    return html.section(
        "A look inside",
        intro="The clips asked about above, patch by patch, beside the same encoder with the random weights it started "
        "from: what both show comes from the architecture and the pixels, what only the first shows was learned.",
        body_html=parts_html,
    )


def _receipt(receipt: Mapping[str, str], notes: Sequence[str]) -> str:
    remarks = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return html.section(
        "The receipt",
        intro="What experiment this was, from the run's own record.",
        body_html=html.facts(receipt) + remarks,
    )
