"""A keyed permutation of 0..n-1 without a table: any entry by arithmetic, whatever n.

A generalised Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): an
index is a pair (left, right) of digits in bases a and b with a*b >= n, the digits are shifted in turn by a
keyed hash of the other one, and an image outside 0..n-1 is sent through again until it falls inside. With a
and b next to the square root of n hardly any image does fall outside.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from marey.core.keys import derive
from marey.core.mixing import mix64

# Eight rounds do for thousands of indices; a handful needs sixteen before all orders are equally likely.
ROUNDS = 16


def permute(
    indices: NDArray[np.int64], n: int, *, turns: NDArray[np.int64], seed: int, purpose: str, parts: tuple[int, ...]
) -> NDArray[np.int64]:
    """int64 ``[k]`` in 0..n-1 -> int64 ``[k]``: their images under permutations of 0..n-1.

    Each index has its own permutation, the one that belongs to the key and its entry of ``turns`` (int64
    ``[k]``).
    """
    assert n >= 1, n
    assert indices.size == 0 or (indices.min() >= 0 and indices.max() < n), (indices, n)
    base_left = math.isqrt(n - 1) + 1
    base_left += base_left % 2  # a rotation of even length is an odd permutation: both parities are reached
    base_right = -(-n // base_left)
    keys = [derive(seed, purpose, *parts, turn) for turn in range(ROUNDS)]
    tweaks = mix64(turns.astype(np.uint64), derive(seed, purpose, *parts))
    images = _once(indices, tweaks, base_left, base_right, keys)
    outside = np.flatnonzero(images >= n)
    while outside.size:
        images[outside] = _once(images[outside], tweaks[outside], base_left, base_right, keys)
        outside = outside[images[outside] >= n]
    return images


def _once(
    indices: NDArray[np.int64], tweaks: NDArray[np.uint64], base_left: int, base_right: int, keys: list[int]
) -> NDArray[np.int64]:
    left, right = (digit.astype(np.uint64) for digit in np.divmod(indices, base_right))
    a, b = np.uint64(base_left), np.uint64(base_right)
    for turn, key in enumerate(keys):
        # The hash is reduced before it is added, so the second sum cannot wrap around 2**64.
        if turn % 2 == 0:
            left = (left + mix64(right + tweaks, key) % a) % a
        else:
            right = (right + mix64(left + tweaks, key) % b) % b
    return (left * b + right).astype(np.int64)
