"""What frozen features are worth: kNN, linear and attentive probe on held-out videos, each beside its baselines.

Legend: n training clips, m held-out clips, D features. Every score counts videos: the probabilities of a
video's clips are averaged before the class is read off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from marey.core.progress import Progress
from marey.evaluation.attentive_fit import Choice, probe_attentive
from marey.evaluation.by_video import Videos
from marey.evaluation.classifiers import STRENGTHS, Floats, fit_linear, knn_probabilities
from marey.evaluation.intervals import paired_gain, wilson
from marey.evaluation.split import VALIDATION_SHARE, few_per_class, held_out
from marey.evaluation.token_features import Tokens

ENOUGH, MOST_DRAWS = 200, 5
"""Validation videos that a choice of strength asks for, and draws of a validation part to come to them."""
DRAWS = 5
"""Of a few labels for each class: which ones they are makes a difference."""


@dataclass(frozen=True)
class Side:
    """Clips of one side of a split. features: float32 ``[n, D]`` by encoder; videos, labels: ``[n]``."""

    features: Mapping[str, Floats]
    videos: Sequence[str]
    labels: Sequence[str]
    tokens: Mapping[str, Tokens] = field(default_factory=dict)
    """All patch tokens by encoder, for the attentive probe; where there are none, it is not taken."""

    def take(self, mask: NDArray[np.bool_]) -> Side:
        """The clips where ``mask`` is True."""
        kept = np.flatnonzero(mask).tolist()
        return Side(
            {name: values[kept] for name, values in self.features.items()},
            [self.videos[i] for i in kept],
            [self.labels[i] for i in kept],
            {name: tokens.take(kept) for name, tokens in self.tokens.items()},
        )


@dataclass(frozen=True)
class Score:
    """Videos classified rightly, and the 95% interval of that share."""

    right: int
    videos: int
    low: float
    high: float

    @property
    def accuracy(self) -> float:
        """Share of videos, 0..1."""
        return self.right / self.videos


@dataclass(frozen=True)
class Gain:
    """Difference of two accuracies on the same videos, with its 95% interval (paired bootstrap), in -1..1."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class EncoderScores:
    """One encoder's probes."""

    knn: Score
    linear: Score
    linear_strength: float
    """scikit-learn's C, chosen on a validation part of the training videos."""
    linear_converged: bool
    attentive: Score | None = None
    attentive_choice: Choice | None = None


@dataclass(frozen=True)
class Spread:
    """Accuracies of several draws of labels on the same held-out videos."""

    mean: float
    deviation: float
    """Standard deviation over draws (n - 1); 0 for a single draw."""
    accuracies: list[float]

    @classmethod
    def of(cls, accuracies: Sequence[float]) -> Spread:
        """Of one accuracy for each draw."""
        deviation = float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else 0.0
        return cls(float(np.mean(accuracies)), deviation, list(accuracies))


@dataclass(frozen=True)
class FewLabels:
    """What a few labelled videos of each class are worth."""

    per_class: int
    videos: list[int]
    """To learn from, in each draw."""
    encoders: dict[str, dict[str, Spread]]
    """By encoder, then probe."""


@dataclass(frozen=True)
class ProbeResult:
    """A probe of one label."""

    label: str
    classes: list[str]
    train_videos: int
    test_videos: int
    train_clips: int
    test_clips: int
    chance: Score
    """Always answering the class most frequent in training."""
    encoders: dict[str, EncoderScores]
    gains: dict[str, Gain]
    """By probe (``knn``, ``linear``, ``attentive``): first encoder minus second, where there are two."""
    against: dict[str, dict[str, Gain]] = field(default_factory=dict)
    """The same against every other encoder or baseline, by its name."""
    few_labels: list[FewLabels] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Answers:
    """One encoder's probes, and which held-out videos each has right: bool ``[videos]``."""

    right: dict[str, NDArray[np.bool_]]
    strength: float
    converged: bool
    choice: Choice | None


def measure(
    train: Side,
    test: Side,
    *,
    label: str,
    seed: int,
    per_class: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> ProbeResult:
    """Probe every encoder on the same clips. Nothing of ``test`` takes part in any choice.

    per_class: also learn from so many videos of each class, ``DRAWS`` times each. device: of the attentive probe.
    """
    classes = sorted(set(train.labels), key=_natural)
    index = {name: i for i, name in enumerate(classes)}
    held = Videos.of(test.videos, _numbers(test, index))

    def ask(name: str, part: Side, shown: str | None = None) -> _Answers:
        y = _numbers(part, index)
        return _ask(name, part, y, test, held, classes=len(classes), seed=seed, device=device, label=shown)

    answers = {name: ask(name, train, f"attentive probe of {name}") for name in train.features}
    first, *others = answers
    against = {
        other: {
            kind: Gain(*paired_gain(right, answers[other].right[kind], seed=seed))
            for kind, right in answers[first].right.items()
        }
        for other in others
    }
    majority = int(np.bincount(_numbers(train, index), minlength=len(classes)).argmax())
    return ProbeResult(
        label=label,
        classes=classes,
        train_videos=len(set(train.videos)),
        test_videos=len(set(test.videos)),
        train_clips=len(train.videos),
        test_clips=len(test.videos),
        chance=_score(held.truth == majority),
        encoders={name: _scores(answer) for name, answer in answers.items()},
        gains=against[others[0]] if others else {},
        against=against,
        few_labels=[_few(train, ask, count=count, seed=seed) for count in per_class],
    )


def _few(train: Side, ask: Callable[[str, Side], _Answers], *, count: int, seed: int) -> FewLabels:
    """What ``count`` labelled videos of each class are worth; a single draw where that is all there are."""
    masks = [few_per_class(train.videos, train.labels, per_class=count, seed=seed, draw=draw) for draw in range(DRAWS)]
    masks = masks[:1] if masks[0].all() else masks
    accuracies: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in train.features}
    drawn = []
    with Progress(f"{count} per class", total=len(masks) * len(accuracies), unit="fits") as progress:
        for mask in masks:
            part = train.take(mask)
            drawn.append(len(set(part.videos)))
            for name, by_kind in accuracies.items():
                for kind, right in ask(name, part).right.items():
                    by_kind[kind].append(float(right.mean()))
                progress.advance()
    spreads = {name: {kind: Spread.of(all_) for kind, all_ in kinds.items()} for name, kinds in accuracies.items()}
    return FewLabels(count, drawn, spreads)


def _ask(
    name: str,
    train: Side,
    y: NDArray[np.int64],
    test: Side,
    held: Videos,
    *,
    classes: int,
    seed: int,
    device: torch.device | str,
    label: str | None,
) -> _Answers:
    """One encoder's probes, learnt from ``train`` and asked about ``test``. label: of the progress shown."""
    x_train, x_test = train.features[name], test.features[name]
    strength = choose_strength(x_train, y, train.videos, classes=classes, seed=seed)
    fit = fit_linear(x_train, y, classes=classes, strength=strength)
    right = {
        "knn": held.right(knn_probabilities(x_train, y, x_test, classes=classes)),
        "linear": held.right(fit.probabilities(x_test)),
    }
    choice = None
    if name in train.tokens:
        attentive, choice = probe_attentive(
            train.tokens[name], y, train.videos, classes=classes, seed=seed, device=device, label=label
        )
        right["attentive"] = held.right(attentive.probabilities(test.tokens[name])[0])
    return _Answers(right, strength, fit.converged, choice)


def _scores(answer: _Answers) -> EncoderScores:
    return EncoderScores(
        knn=_score(answer.right["knn"]),
        linear=_score(answer.right["linear"]),
        linear_strength=answer.strength,
        linear_converged=answer.converged,
        attentive=_score(answer.right["attentive"]) if "attentive" in answer.right else None,
        attentive_choice=answer.choice,
    )


def _numbers(side: Side, index: Mapping[str, int]) -> NDArray[np.int64]:
    return np.array([index[name] for name in side.labels], dtype=np.int64)


def choose_strength(x: Floats, y: NDArray[np.int64], videos: Sequence[str], *, classes: int, seed: int) -> float:
    """The regularisation that does best on fifths of the training videos, held out for this choice alone.

    One fifth where it holds ``ENOUGH`` videos, else as many draws of one, up to ``MOST_DRAWS``, as come to so many:
    on forty videos chance decides among the strengths. The stronger regularisation wins a tie.
    """
    right = np.zeros(len(STRENGTHS))
    asked = 0
    for draw in range(MOST_DRAWS):
        purpose = "probe-validation" if draw == 0 else f"probe-validation-{draw}"
        validation = held_out(videos, y, share=VALIDATION_SHARE, seed=seed, purpose=purpose)
        if not validation.any() or len(np.unique(y[~validation])) < 2:
            continue
        for i, strength in enumerate(STRENGTHS):
            fit = fit_linear(x[~validation], y[~validation], classes=classes, strength=strength)
            right[i] += float((fit.probabilities(x[validation]).argmax(axis=1) == y[validation]).sum())
        asked += len({video for video, out in zip(videos, validation.tolist(), strict=True) if out})
        if asked >= ENOUGH:
            break
    return STRENGTHS[int(right.argmax())] if asked else 1.0


def _score(right: NDArray[np.bool_]) -> Score:
    return Score(int(right.sum()), len(right), *wilson(int(right.sum()), len(right)))


def _natural(name: str) -> tuple[int, int, str]:
    """Sorts ``2`` before ``10``, and numbers before words."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)
