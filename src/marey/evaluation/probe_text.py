"""A probe's result for a terminal."""

from __future__ import annotations

from marey.evaluation.measure import FewLabels, Gain, ProbeResult, Score, Spread

KINDS = ("knn", "linear", "attentive")
HEADS = {"knn": "kNN", "linear": "linear", "attentive": "attentive"}
NAME_WIDTH, CELL_WIDTH = 16, 24


def result_lines(result: ProbeResult, *, split: str) -> list[str]:
    """A probe as aligned tables and one sentence of what it comes to."""
    kinds = [kind for kind in KINDS if all(getattr(own, kind) is not None for own in result.encoders.values())]
    lines = [
        f"{result.label}: {len(result.classes)} classes, {result.train_videos} videos to learn from "
        f"({result.train_clips} clips), {result.test_videos} held out ({split}); accuracy per video, "
        "95% interval",
        _row("", [HEADS[kind] for kind in kinds]),
    ]
    for name, scores in result.encoders.items():
        lines.append(_row(name, [_cell(getattr(scores, kind)) for kind in kinds]))
    lines.append(_row("majority class", [_cell(result.chance)]))
    first = next(iter(result.encoders))
    told = kinds[-1] if kinds[-1] == "attentive" else "linear"
    for other, gains in result.against.items():
        lines.append(f"  {told}, {first} minus {other}: {_gain(gains[told])}")
    for few in result.few_labels:
        lines += _few_lines(few, kinds)
    unfinished = [name for name, scores in result.encoders.items() if not scores.linear_converged]
    if unfinished:
        lines.append(f"  note: the linear probe of {' and '.join(unfinished)} stopped before it converged")
    return lines


def _few_lines(few: FewLabels, kinds: list[str]) -> list[str]:
    draws = len(few.videos)
    what = f"{draws} draws, mean ± standard deviation" if draws > 1 else "which is all there are"
    lines = [f"  {few.per_class} labelled video{'s' if few.per_class > 1 else ''} of each class ({what})"]
    for name, spreads in few.encoders.items():
        lines.append(_row(name, [_spread(spreads[kind]) for kind in kinds]))
    return lines


def _row(name: str, cells: list[str]) -> str:
    return f"  {name:<{NAME_WIDTH}}{''.join(f'{cell:<{CELL_WIDTH}}' for cell in cells)}".rstrip()


def _cell(score: Score) -> str:
    return f"{score.accuracy:6.1%} [{score.low:.1%}, {score.high:.1%}]"


def _spread(spread: Spread) -> str:
    return f"{spread.mean:6.1%} ± {100 * spread.deviation:.1f}" if len(spread.accuracies) > 1 else f"{spread.mean:6.1%}"


def _gain(gain: Gain) -> str:
    return f"{100 * gain.value:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
