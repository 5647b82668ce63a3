"""``marey probe``: what a frozen encoder knows, beside the same encoder with random weights and chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from marey.core.errors import UserError
from marey.evaluation.features import (
    ClipFeatures,
    capped_remark,
    clip_features,
    evaluation_clips,
    open_clips,
    rate_remark,
    refusal_remark,
    short_remark,
    video_names,
)
from marey.evaluation.labels import LabelSet, check_classes, labels_from_csv, labels_of_source
from marey.evaluation.loading import CheckpointInfo, Weights, load_encoder, random_twin, resolve_device
from marey.evaluation.measure import ProbeResult, Side, measure
from marey.evaluation.split import held_out
from marey.pixels.episodes import EpisodeSource

HELD_OUT_SHARE = 0.2
MIN_VIDEOS = 10
MIN_PER_CLASS = 3
PRETRAINED, RANDOM = "pretrained", "random weights"


@dataclass(frozen=True)
class ProbeReport:
    """A probe and what it was taken on."""

    result: ProbeResult
    info: CheckpointInfo
    data: str
    test: str | None
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "checkpoint": str(self.info.path.resolve()),
            "weights": self.info.weights,
            "step": self.info.step,
            "data": self.data,
            "test": self.test,
            "seed": self.seed,
            **self.result.as_dict(),
        }

    def text(self) -> str:
        """The result for a terminal."""
        head = f"{self.info.path} ({self.info.weights} weights, step {self.info.step:,})"
        split = self.test or "split by source video"
        return "\n".join([head, *result_lines(self.result, split=split)])


def result_lines(result: ProbeResult, *, split: str) -> list[str]:
    """A probe as an aligned table and one sentence of what it comes to."""
    lines = [
        f"{result.label}: {len(result.classes)} classes, {result.train_videos} videos to learn from "
        f"({result.train_clips} clips), {result.test_videos} held out ({split}); accuracy per video, "
        "95% interval",
        f"  {'':<16}{'kNN':<26}{'linear':<26}",
    ]
    for name, scores in result.encoders.items():
        cells = "".join(f"{_cell(score):<26}" for score in (scores.knn, scores.linear))
        lines.append(f"  {name:<16}{cells}".rstrip())
    lines.append(f"  {'majority class':<16}{_cell(result.chance)}")
    gain = result.gains.get("linear")
    if gain is not None:
        lines.append(
            f"  linear, pretrained minus random: {100 * gain.value:+.1f} points "
            f"[{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
        )
    unfinished = [name for name, scores in result.encoders.items() if not scores.linear_converged]
    if unfinished:
        lines.append(f"  note: the linear probe of {' and '.join(unfinished)} stopped before it converged")
    return lines


def _cell(score: Any) -> str:
    return f"{score.accuracy:6.1%} [{score.low:.1%}, {score.high:.1%}]"


def probe(
    checkpoint: Path | str,
    data: str,
    *,
    test: str | None = None,
    labels: Path | str | None = None,
    label_column: str = "label",
    seed: int = 0,
    weights: Weights | None = None,
    clips_per_video: int = 1,
    batch_size: int = 16,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> ProbeReport:
    """Measure kNN and linear accuracy on held-out videos.

    data: where to learn from; a fifth of its videos, by a keyed hash of their names, is held out unless
    ``test`` names other data. labels: a CSV joined by its ``path`` column, whose ``label_column`` is probed;
    None takes the source's own labels. seed: the split; the random weights are those of the run's own seed.
    Raises UserError where a probe would mean nothing: no labels, one class, fewer than ten videos, a class
    with fewer than three, a video on both sides, a class in ``test`` that was never learnt.
    """
    if label_column != "label" and labels is None:
        raise UserError(f"--label-column {label_column} needs --labels FILE.csv beside it")
    where = resolve_device(device)
    loaded = load_encoder(checkpoint, weights=weights, device=where)
    sources = [open_clips(path, loaded.preprocessing) for path in (data, test) if path is not None]
    if len(sources) == 2:
        refuse_overlap(*sources)
    # All refusals come before the encoder runs: labels, classes and splits need no features.
    sets = [_labels(source, labels, label_column) for source in sources]
    for source, found in zip(sources, sets, strict=True):
        names, files = _labelled(source, found)
        if source is sources[0]:
            check_classes(names, files, where=source.path, videos=MIN_VIDEOS, per_class=MIN_PER_CLASS)
            learnt = set(names)
        unknown = sorted(set(names) - learnt)
        if unknown:
            raise UserError(
                f"the class {unknown[0]!r} is in {source.path} and not in {sources[0].path}; a probe can "
                "only be tested on classes it learnt"
            )
    clips = [evaluation_clips(source, loaded.preprocessing, clips_per_episode=clips_per_video) for source in sources]
    remarks = [loaded.info.remark()]
    for chosen in clips:
        remarks += [rate_remark(chosen.source, loaded.preprocessing), short_remark(chosen), capped_remark(chosen)]
    for remark in filter(None, remarks):
        say(f"note: {remark}")
    encoders = {PRETRAINED: loaded.encoder, RANDOM: random_twin(loaded, device=where)}
    sides = []
    for chosen, found in zip(clips, sets, strict=True):
        features = clip_features(
            encoders,
            loaded.preprocessing,
            chosen,
            batch_size=batch_size,
            device=where,
            label=f"features of {chosen.source.name}",
        )
        lost = refusal_remark(features.refused)
        if lost:
            say(f"note: {lost}")
        sides.append(side_of(features, chosen.source, found))
        if len(sides) == 1:
            _check_read(sides[0], learnt, where=chosen.source.path)
        elif not sides[1].labels:
            raise UserError(f"no labelled video of {chosen.source.path} could be read; repair the files or name others")
    train, held = sides if len(sides) == 2 else split_side(sides[0], seed=seed)
    return ProbeReport(measure(train, held, label=sets[0].name, seed=seed), loaded.info, data, test, seed)


def side_of(features: ClipFeatures, source: EpisodeSource, labels: LabelSet) -> Side:
    """The labelled clips of a source."""
    names = video_names(source)
    kept = np.array([labels.values[episode] is not None for episode in features.episodes], dtype=np.bool_)
    side = Side(
        features.values,
        [names[episode] for episode in features.episodes],
        [labels.values[episode] or "" for episode in features.episodes],
    )
    return side.take(kept)


def _check_read(side: Side, learnt: set[str], *, where: str) -> None:
    """The refusals of labels once more, for what is left when some videos cannot be read."""
    lost = sorted(learnt - set(side.labels))
    if lost:
        raise UserError(
            f"no video of the class {lost[0]!r} in {where} could be read; repair the files, or leave their label empty"
        )
    check_classes(
        side.labels, side.videos, where=f"what can be read of {where}", videos=MIN_VIDEOS, per_class=MIN_PER_CLASS
    )


def split_side(side: Side, *, seed: int) -> tuple[Side, Side]:
    """(to learn from, held out), by source video."""
    index = {name: i for i, name in enumerate(sorted(set(side.labels)))}
    out = held_out(
        side.videos,
        [index[name] for name in side.labels],
        share=HELD_OUT_SHARE,
        seed=seed,
        purpose="probe-held-out",
    )
    train, held = side.take(~out), side.take(out)
    lost = sorted(set(held.labels) - set(train.labels))
    if lost:  # possible only where episodes of one video differ in label
        raise UserError(
            f"every video of the class {lost[0]!r} holds other classes too and went to the held-out side; "
            "try another --seed, or give --test"
        )
    return train, held


def refuse_overlap(train: EpisodeSource, test: EpisodeSource) -> None:
    """UserError naming a video that is on both sides."""
    shared = sorted(set(video_names(train)) & set(video_names(test)))
    if shared:
        more = f" and {len(shared) - 1} more are" if len(shared) > 1 else " is"
        raise UserError(
            f"{shared[0]}{more} in both {train.path} and {test.path}, so the test would not be held out; "
            "remove them from one, or leave out --test to split by video"
        )


def _labels(source: EpisodeSource, table: Path | str | None, column: str) -> LabelSet:
    if table is not None:
        return labels_from_csv(source.files, Path(table), column, where=source.path)
    return labels_of_source(source.labels, getattr(source, "label_names", None), where=source.path)


def _labelled(source: EpisodeSource, labels: LabelSet) -> tuple[list[str], list[str]]:
    """(label, video) of every labelled episode."""
    pairs = [(n, v) for n, v in zip(labels.values, video_names(source), strict=True) if n is not None]
    return [n for n, _ in pairs], [v for _, v in pairs]
