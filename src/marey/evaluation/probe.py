"""``marey probe``: what a frozen encoder knows, beside the same encoder with random weights, raw pixels and chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from marey.core.errors import UserError
from marey.evaluation import attentive_fit
from marey.evaluation.feature_cache import LIMIT_BYTES, FeatureCache
from marey.evaluation.features import (
    ClipFeatures,
    capped_remark,
    evaluation_clips,
    open_clips,
    rate_remark,
    refusal_remark,
    short_remark,
    video_names,
)
from marey.evaluation.featurizers import Featurizer, FrozenEncoder, RawPixels
from marey.evaluation.frozen import FrozenFeatures, frozen_features
from marey.evaluation.labels import LabelSet, check_classes, labels_from_csv, labels_of_source
from marey.evaluation.loading import CheckpointInfo, LoadedEncoder, Weights, load_encoder, random_twin, resolve_device
from marey.evaluation.measure import DRAWS, ProbeResult, Side, measure
from marey.evaluation.preprocessing import Preprocessing
from marey.evaluation.probe_text import result_lines
from marey.evaluation.spatial import SpatialViews
from marey.evaluation.split import VALIDATION_SHARE, held_out
from marey.pixels.digits import built_source
from marey.pixels.episodes import EpisodeSource, FrameRequest
from marey.pixels.evalclips import EvalClips
from marey.pixels.reading import Refusal, read_clips

HELD_OUT_SHARE = 0.2
MIN_VIDEOS = 10
MIN_PER_CLASS = 3
PRETRAINED, RANDOM, PIXELS = "pretrained", "random weights", "raw pixels"


@dataclass(frozen=True)
class ProbeReport:
    """A probe and what it was taken on."""

    result: ProbeResult
    info: CheckpointInfo
    data: str
    test: str | None
    seed: int
    clips_per_video: int
    views: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "checkpoint": str(self.info.path.resolve()),
            "weights": self.info.weights,
            "step": self.info.step,
            "data": self.data,
            "test": self.test,
            "seed": self.seed,
            "protocol": {
                "clips_per_video": self.clips_per_video,
                "views": self.views,
                "held_out_share": None if self.test else HELD_OUT_SHARE,
                "validation_share": VALIDATION_SHARE,
                "draws_of_few_labels": DRAWS,
                "attentive": attentive_fit.protocol(),
            },
            **self.result.as_dict(),
        }

    def text(self) -> str:
        """The result for a terminal."""
        head = f"{self.info.path} ({self.info.weights} weights, step {self.info.step:,})"
        split = self.test or "split by source video"
        return "\n".join([head, *result_lines(self.result, split=split)])


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
    views: int = 1,
    attentive: bool = True,
    per_class: Sequence[int] = (),
    cached: bool = True,
    batch_size: int = 16,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> ProbeReport:
    """Measure kNN, linear and attentive probe on held-out videos, beside random weights and raw pixels.

    data: where to learn from; a fifth of its videos, by a keyed hash of their names, is held out unless
    ``test`` names other data. labels: a CSV joined by its ``path`` column, whose ``label_column`` is probed;
    None takes the source's own labels. seed: the split and the probes; the random weights are those of the run's own
    seed. views: square views along the longer side of each clip. attentive: False leaves that probe out, and with it
    the patch tokens, which take most of the room. per_class: also learn from so many labelled videos of each class.
    cached: keep features under ``MAREY_CACHE`` and take them from there.
    Raises UserError where a probe would mean nothing: no labels, one class, fewer than ten videos, a class
    with fewer than three, a video on both sides, a class in ``test`` that was never learnt.
    """
    if label_column != "label" and labels is None:
        raise UserError(f"--label-column {label_column} needs --labels FILE.csv beside it")
    for path in (data, test):
        if path is not None and path.startswith("demo:"):
            built_source(path.removeprefix("demo:"))  # a misspelt split is refused before the other one is made
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
    cache = FeatureCache() if cached else None
    featurizers = _featurizers(loaded, where)
    sides = []
    for chosen, found in zip(clips, sets, strict=True):
        features = frozen_features(
            featurizers,
            loaded.preprocessing,
            _with_views(chosen, loaded.preprocessing, views, say=say),
            tokens=attentive,
            cache=cache,
            batch_size=batch_size,
            device=where,
            label=f"features of {chosen.source.name}",
        )
        if features.reused:
            say(f"note: features of {', '.join(features.reused)} on {chosen.source.name} come from the cache")
        lost = refusal_remark(features.refused)
        if lost:
            say(f"note: {lost}")
        sides.append(side_of(features, chosen.source, found))
        if len(sides) == 1:
            _check_read(sides[0], learnt, where=chosen.source.path)
        elif not sides[1].labels:
            raise UserError(f"no labelled video of {chosen.source.path} could be read; repair the files or name others")
    if cache is not None:
        say(
            f"note: cached features take {cache.bytes() / 1e9:.2f} GB under {cache.folder} "
            f"(above {LIMIT_BYTES / 1e9:.0f} GB the least recently used go)"
        )
    train, held = sides if len(sides) == 2 else split_side(sides[0], seed=seed)
    result = measure(train, held, label=sets[0].name, seed=seed, per_class=per_class, device=where)
    return ProbeReport(result, loaded.info, data, test, seed, clips_per_video, views)


def _featurizers(loaded: LoadedEncoder, device: torch.device) -> dict[str, Featurizer]:
    return {
        PRETRAINED: FrozenEncoder.of(loaded.encoder, loaded.model),
        RANDOM: FrozenEncoder.of(random_twin(loaded, device=device), loaded.model),
        PIXELS: RawPixels(loaded.preprocessing.patch_size, loaded.preprocessing.tubelet_size),
    }


def _with_views(clips: EvalClips, preprocessing: Preprocessing, views: int, *, say: Callable[[str], None]) -> EvalClips:
    """The same clips, each ``views`` times."""
    if views == 1:
        return clips
    (frames,) = read_clips(clips.source, [FrameRequest(int(clips.index.episodes[0]), np.zeros(1, dtype=np.int64))])
    if not isinstance(frames, Refusal) and frames.shape[-1] == frames.shape[-2]:
        say(f"note: frames of {clips.source.name} are square, so {views} views are one picture: --views 1 is enough")
    spread = SpatialViews(clips.source, views)
    return evaluation_clips(spread, preprocessing, clips_per_episode=clips.clips_per_episode)


def side_of(features: ClipFeatures | FrozenFeatures, source: EpisodeSource, labels: LabelSet) -> Side:
    """The labelled clips of a source."""
    names = video_names(source)
    kept = np.array([labels.values[episode] is not None for episode in features.episodes], dtype=np.bool_)
    side = Side(
        features.values,
        [names[episode] for episode in features.episodes],
        [labels.values[episode] or "" for episode in features.episodes],
        features.tokens if isinstance(features, FrozenFeatures) else {},
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
