"""Frozen features to class probabilities: nearest neighbours and a linear layer.

Legend: n training clips, m clips to classify, D features, K classes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

NEIGHBOURS = 20
TEMPERATURE = 0.07
STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0)
ITERATIONS = 1000
SINGLE_THREAD_SIZE = 4_000_000

Floats = NDArray[np.float32]


def unit_rows(x: Floats) -> Floats:
    """Rows of length 1 (a row of zeros stays zero)."""
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(x / np.where(length > 0, length, 1), dtype=np.float32)


def knn_probabilities(
    train: Floats, train_class: NDArray[np.int64], test: Floats, *, classes: int, k: int = NEIGHBOURS
) -> NDArray[np.float64]:
    """``[m, K]`` from the ``k`` training clips nearest in cosine similarity, each voting with weight
    ``exp(similarity / 0.07)`` (Wu et al. 2018, arXiv 1805.01978).

    No more of them than a class has on average (``n // K``): with few clips, ``k`` of them would be clips of every
    class, and the largest class would win.
    """
    k = min(k, max(1, len(train) // classes))
    base, result = unit_rows(train), np.zeros((len(test), classes))
    for start in range(0, len(test), 1024):  # in blocks: m x n similarities need not be in memory at once
        similarity = unit_rows(test[start : start + 1024]) @ base.T
        near = np.argpartition(-similarity, k - 1, axis=1)[:, :k]
        weight = np.exp(np.take_along_axis(similarity, near, axis=1).astype(np.float64) / TEMPERATURE)
        for kind in range(classes):
            result[start : start + 1024, kind] = (weight * (train_class[near] == kind)).sum(axis=1)
    return np.asarray(result / result.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class LinearFit:
    """A multinomial logistic regression on standardised features."""

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    model: LogisticRegression
    strength: float
    """scikit-learn's C: the inverse of the L2 penalty."""
    converged: bool
    classes: int
    basis: NDArray[np.float64] | None = None
    """``[D, n]`` where D > n: orthonormal columns that hold all training clips. The penalty leaves every direction
    outside them at 0, so the same fit is found among n numbers instead of D.
    """

    def probabilities(self, x: Floats) -> NDArray[np.float64]:
        """``[m, K]``; a class absent from training has probability 0."""
        result = np.zeros((len(x), self.classes))
        inside = (x - self.mean) / self.scale
        inside = inside if self.basis is None else inside @ self.basis
        result[:, self.model.classes_] = self.model.predict_proba(inside)
        return result


def fit_linear(x: Floats, y: NDArray[np.int64], *, classes: int, strength: float) -> LinearFit:
    """Fit at one strength; features are standardised with the training clips' mean and deviation."""
    mean, scale = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    # A feature that never varies carries nothing; dividing by its rounding noise would invent something.
    scale = np.where(scale > 1e-6 * max(1.0, float(np.abs(mean).max())), scale, np.inf)
    inside, basis = (x - mean) / scale, None
    if inside.shape[1] > inside.shape[0]:
        basis = np.linalg.qr(inside.T)[0]
        inside = inside @ basis
    model = LogisticRegression(C=strength, max_iter=ITERATIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        # The solver is a chain of small products: below this size more threads only wait for each other.
        with threadpool_limits(1 if inside.size < SINGLE_THREAD_SIZE else None):
            model.fit(inside, y)
    converged = not any(issubclass(item.category, ConvergenceWarning) for item in caught)
    return LinearFit(mean, scale, model, strength, converged, classes, basis)
