"""Pictures of what an encoder learnt, as parts of a page: patch colours, a patch followed, [CLS]'s gaze, neighbours.

Every caption says how its picture was computed. Legend: G positions along time, h and w rows and columns of patches.
"""

from __future__ import annotations

from html import escape

import torch

from marey.evaluation import page as html
from marey.evaluation.feature_maps import (
    Place,
    against_most,
    feature_colours,
    for_show,
    heat,
    marked,
    odd_patch,
    over_frames,
    similarity,
)
from marey.evaluation.gathering import Gathered, Pictured
from marey.evaluation.neighbours import nearest_clips
from marey.evaluation.pictures import Pixels, data_uri, film
from marey.evaluation.probe import PRETRAINED, RANDOM

SIDE, FRAMES, HEAD_SIDE = 128, 8, 64
"""Pixels of a frame for show, the most frames of a clip for show, and pixels of a frame of one head."""
COLOURED, HEATED = 0.8, 0.78
"""Share of a map in the blend with the frame's grey."""
NEIGHBOURS = 5
QUALITY = 84
CLIP, ASKED = "the clip", "asked about"


def feature_parts(gathered: Gathered) -> str:
    """All four parts."""
    return "\n".join(
        (
            colour_part(gathered),
            similarity_part(gathered),
            gaze_part(gathered),
            neighbour_part(gathered),
        )
    )


def colour_part(gathered: Gathered) -> str:
    """Principal components of the patch outputs as colours over the frames, one basis for all clips of an encoder."""
    if not gathered.pictured:
        return ""
    names = list(gathered.pictured[0].looks)
    shares = {}
    maps: dict[str, Pixels] = {}
    for name in names:
        coloured = feature_colours(torch.cat([item.looks[name].patches for item in gathered.pictured]))
        maps[name], shares[name] = coloured.frames, coloured.share
    studies = [
        _study(
            gathered,
            item,
            {CLIP: item.frames} | {name: over_frames(item.frames, maps[name][i], share=COLOURED) for name in names},
        )
        for i, item in enumerate(gathered.pictured)
    ]
    carried = ", ".join(f"{share:.0%} of the variance with {_with(name)}" for name, share in shares.items())
    return html.part(
        "What its patches mean",
        intro="Each square is one patch, in the colour of its feature: patches that the encoder "
        "finds alike are coloured alike, within a frame, through time and from clip to clip.",
        body_html="".join(studies)
        + html.how(
            f"The encoder sees the whole clip, nothing dropped. The outputs of all patches of these "
            f"{len(gathered.pictured)} clips, after the last LayerNorm, are projected on their first three principal "
            f"components, which carry {carried}; these become red, green and blue, 1% at each end clipped, laid over "
            "the grey frame. Every encoder has its own basis, so colours compare along a row of pictures and not "
            "between encoders."
        ),
    )


def similarity_part(gathered: Gathered, *, place: Place | None = None) -> str:
    """One patch of each clip followed through time. place: which; None takes the odd one of the first frame."""
    if not gathered.pictured:
        return ""
    studies = []
    for item in gathered.pictured:
        first = next(iter(item.looks.values())).patches[0]
        grid = (first.shape[0], first.shape[1], first.shape[2])
        at = odd_patch(first) if place is None else place
        layers = {ASKED: marked(item.frames, at, grid)}
        for name, looked in item.looks.items():
            values = similarity(looked.patches[0], at)
            layers[name] = marked(over_frames(item.frames, heat(values), share=HEATED), at, grid)
        studies.append(_study(gathered, item, layers))
    chosen = "is the one of the first frame that is least like the clip's mean" if place is None else "was asked for"
    return html.part(
        "One patch, followed through time",
        intro="The patch in the white frame is asked about: how like it is every other patch, in this frame and in "
        "those that follow? Bright is alike. An encoder that knows what moves keeps the light on the moving thing.",
        body_html="".join(studies)
        + html.how(
            f"The patch {chosen}, by the first encoder's features; the same patch is asked of every encoder. Shown "
            "is the cosine similarity of its output, after the last LayerNorm, with each patch's, the mean over the "
            "clip's patches taken off both: dark is 0 or less, the lightest is 1, the same scale in every picture."
        ),
    )


def gaze_part(gathered: Gathered) -> str:
    """Where [CLS] looks in the last block: the mean over heads, and each head small."""
    if not gathered.pictured:
        return ""
    studies, shares = [], []
    for item in gathered.pictured:
        layers = {CLIP: item.frames}
        for name, looked in item.looks.items():
            mean = against_most(looked.attention[0].mean(dim=0))
            layers[name] = over_frames(item.frames, heat(mean), share=HEATED)
        first_name, first = next(iter(item.looks.items()))
        shares.append(float(first.to_itself.mean()))
        heads = [
            _panel(
                for_show(
                    over_frames(item.frames, heat(against_most(weights)), share=HEATED), side=HEAD_SIDE, most=FRAMES
                ),
                f"head {number}",
            )
            for number, weights in enumerate(first.attention[0], start=1)
        ]
        small = f'<p class="who">each head, {escape(first_name)}</p>{html.row(heads, kind="heads")}'
        studies.append(_study(gathered, item, layers, more_html=small))
    itself = sum(shares) / len(shares)
    return html.part(
        "Where the summary looks",
        intro="One token, [CLS], stands for the whole clip. These are the patches from which it gathers in the last "
        "layer.",
        body_html="".join(studies)
        + html.how(
            "Softmax weights of the [CLS] query over the patches in the last block, averaged over heads, and below for "
            "each head by itself. The lightest patch of a picture is the clip's largest weight, so pictures compare in "
            f"shape and not in amount. With {_with(next(iter(gathered.summaries)))}, [CLS] keeps {itself:.0%} of its "
            "weight for itself, which is not shown."
        ),
    )


def neighbour_part(gathered: Gathered) -> str:
    """For each pictured clip, the clips of other videos whose [CLS] outputs are nearest."""
    total = len(gathered.thumbs)
    rows = [item.row for item in gathered.pictured]
    near = {
        name: nearest_clips(
            values[rows],
            values,
            count=NEIGHBOURS,
            query_videos=[gathered.videos[row] for row in rows],
            base_videos=gathered.videos,
        )
        for name, values in gathered.summaries.items()
    }
    sets = []
    for place, row in enumerate(rows):
        lines = []
        for name, table in near.items():
            cells = [_neighbour(gathered, row, other) for other in table[place].tolist() if other >= 0]
            if cells:
                lines.append(f'<div><p class="who">nearest, {escape(name)}</p>{html.row(cells, kind="line")}</div>')
        if lines:
            asked = html.figure(
                body_html=_moving(gathered.thumbs[row], f"the clip asked about: {_said(gathered, row)}"),
                caption=f"asked: {_said(gathered, row)}",
                kind="query",
            )
            sets.append(f'<div class="set">{asked}<div class="found">{"".join(lines)}</div></div>')
    if not sets:
        return ""
    unlabelled = sum(not label for label in gathered.labels)
    marks = " Those that share its label are marked; training never read it." if unlabelled < total else ""
    if marks and unlabelled:
        marks += f" {unlabelled:,} of the {total:,} clips have no label: they are named by their file and never marked."
    apart = (
        "All clips are of one file, so only its other episodes can be neighbours: they may show the same scene."
        if gathered.one_video
        else "Clips of the video asked about are left out, so that none is found for being the same footage."
    )
    return html.part(
        "What it finds alike",
        intro=f"For each clip on the left, the nearest of {total - 1:,} other clips.{marks}",
        body_html=html.row(sets, kind="neighbours")
        + html.how(
            f"Cosine similarity of [CLS] outputs among {total:,} clips drawn by the seed. {apart} With random weights, "
            "likeness is mostly that of colours and brightness."
        ),
    )


def _neighbour(gathered: Gathered, asked: int, row: int) -> str:
    mine, theirs = gathered.labels[asked], gathered.labels[row]
    same = bool(theirs) and mine == theirs
    text = (f"{theirs} ✓" if same else theirs) or gathered.names[row]
    alt = f"{_said(gathered, row)}{', the same label' if same else ', another label' if mine and theirs else ''}"
    return html.figure(body_html=_moving(gathered.thumbs[row], alt), caption=text, kind="same" if same else "")


def _said(gathered: Gathered, row: int) -> str:
    return ", ".join(filter(None, (gathered.labels[row], gathered.names[row])))


def _with(name: str) -> str:
    return {PRETRAINED: "the trained weights", RANDOM: "random weights"}.get(name, name)


def _study(gathered: Gathered, item: Pictured, layers: dict[str, Pixels], *, more_html: str = "") -> str:
    """One clip: each layer as it moves and, to its right, moment by moment."""
    rows = []
    for name, frames in layers.items():
        shown = for_show(frames, side=SIDE, most=FRAMES)
        strip = data_uri(film(shown), quality=QUALITY)
        rows.append(
            f'<div class="layer" style="--frames:{len(shown)}"><p class="who">{escape(name)}</p>'
            + html.moving(strip, frames=len(shown), alt=f"{name}, moving")
            + html.image(strip, alt=f"{name}, moment by moment")
            + "</div>"
        )
    said = escape(_said(gathered, item.row))
    return f'<figure class="study" tabindex="0"><figcaption>{said}</figcaption>{"".join(rows)}{more_html}</figure>'


def _panel(frames: Pixels, name: str) -> str:
    return html.figure(body_html=_moving(frames, f"{name}, moving"), caption=name)


def _moving(frames: Pixels, alt: str) -> str:
    return html.moving(data_uri(film(frames), quality=QUALITY), frames=len(frames), alt=alt)
