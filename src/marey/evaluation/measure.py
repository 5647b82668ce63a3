"""What frozen features are worth: kNN and a linear layer on held-out videos, each beside its baselines.

Legend: n training clips, m held-out clips, D features. Every score counts videos: the probabilities of a
video's clips are averaged before the class is read off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marey.evaluation.classifiers import STRENGTHS, Floats, fit_linear, knn_probabilities
from marey.evaluation.intervals import paired_gain, wilson
from marey.evaluation.split import held_out

VALIDATION_SHARE = 0.2


@dataclass(frozen=True)
class Side:
    """Clips of one side of a split. features: float32 ``[n, D]`` by encoder; videos, labels: ``[n]``."""

    features: Mapping[str, Floats]
    videos: Sequence[str]
    labels: Sequence[str]

    def take(self, mask: NDArray[np.bool_]) -> Side:
        """The clips where ``mask`` is True."""
        kept = np.flatnonzero(mask).tolist()
        return Side(
            {name: values[kept] for name, values in self.features.items()},
            [self.videos[i] for i in kept],
            [self.labels[i] for i in kept],
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
    """One encoder's two probes."""

    knn: Score
    linear: Score
    linear_strength: float
    """scikit-learn's C, chosen on a validation part of the training videos."""
    linear_converged: bool


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
    """``knn`` and ``linear``: first encoder minus second, where there are two."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def measure(train: Side, test: Side, *, label: str, seed: int) -> ProbeResult:
    """Probe every encoder on the same clips. Nothing of ``test`` takes part in any choice."""
    classes = sorted(set(train.labels), key=_natural)
    index = {name: i for i, name in enumerate(classes)}
    y_train = np.array([index[name] for name in train.labels], dtype=np.int64)
    # A video is scored once per label it carries; videos whose episodes differ in label count as several.
    units = sorted(set(zip(test.videos, test.labels, strict=True)))
    place = {unit: i for i, unit in enumerate(units)}
    unit_of_clip = np.array([place[unit] for unit in zip(test.videos, test.labels, strict=True)])
    truth = np.array([index[name] for _, name in units], dtype=np.int64)

    rights: dict[str, dict[str, NDArray[np.bool_]]] = {}
    scores: dict[str, EncoderScores] = {}
    for name, x_train in train.features.items():
        x_test = test.features[name]
        strength = choose_strength(x_train, y_train, train.videos, classes=len(classes), seed=seed)
        fit = fit_linear(x_train, y_train, classes=len(classes), strength=strength)
        answers = {
            "knn": knn_probabilities(x_train, y_train, x_test, classes=len(classes)),
            "linear": fit.probabilities(x_test),
        }
        rights[name] = {kind: _right(p, unit_of_clip, truth) for kind, p in answers.items()}
        scores[name] = EncoderScores(
            knn=_score(rights[name]["knn"]),
            linear=_score(rights[name]["linear"]),
            linear_strength=strength,
            linear_converged=fit.converged,
        )
    majority = int(np.bincount(y_train, minlength=len(classes)).argmax())
    names = list(rights)
    gains = {}
    if len(names) == 2:
        for kind in ("knn", "linear"):
            gains[kind] = Gain(*paired_gain(rights[names[0]][kind], rights[names[1]][kind], seed=seed))
    return ProbeResult(
        label=label,
        classes=classes,
        train_videos=len(set(train.videos)),
        test_videos=len(set(test.videos)),
        train_clips=len(train.videos),
        test_clips=len(test.videos),
        chance=_score(truth == majority),
        encoders=scores,
        gains=gains,
    )


def choose_strength(x: Floats, y: NDArray[np.int64], videos: Sequence[str], *, classes: int, seed: int) -> float:
    """The regularisation that does best on a fifth of the training videos, held out for this choice alone.

    The stronger regularisation wins a tie.
    """
    validation = held_out(videos, y, share=VALIDATION_SHARE, seed=seed, purpose="probe-validation")
    if not validation.any() or len(np.unique(y[~validation])) < 2:
        return 1.0
    best, best_right = STRENGTHS[0], -1.0
    for strength in STRENGTHS:
        fit = fit_linear(x[~validation], y[~validation], classes=classes, strength=strength)
        right = float((fit.probabilities(x[validation]).argmax(axis=1) == y[validation]).mean())
        if right > best_right:
            best, best_right = strength, right
    return best


def _right(
    clip_probabilities: NDArray[np.float64], unit_of_clip: NDArray[np.int64], truth: NDArray[np.int64]
) -> NDArray[np.bool_]:
    summed = np.zeros((len(truth), clip_probabilities.shape[1]))
    np.add.at(summed, unit_of_clip, clip_probabilities)
    return np.asarray(summed.argmax(axis=1) == truth)


def _score(right: NDArray[np.bool_]) -> Score:
    return Score(int(right.sum()), len(right), *wilson(int(right.sum()), len(right)))


def _natural(name: str) -> tuple[int, int, str]:
    """Sorts ``2`` before ``10``, and numbers before words."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)
