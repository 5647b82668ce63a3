"""Integer mixing over whole arrays: keyed draws for a million rows at once, without a generator per row.

``mix64`` is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): a bijection of 64-bit integers in which every input bit moves about half of the
output bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix64(values: NDArray[np.uint64], key: int = 0) -> NDArray[np.uint64]:
    """uint64 array -> uint64 array of the same shape, mixed under ``key`` (low 64 bits)."""
    with np.errstate(over="ignore"):
        x = values + (np.uint64(key & 0xFFFFFFFFFFFFFFFF) + _GOLDEN)
        x ^= x >> np.uint64(30)
        x *= _FIRST
        x ^= x >> np.uint64(27)
        x *= _SECOND
        x ^= x >> np.uint64(31)
    return x


def text_keys(texts: Iterable[str], *, salt: str = "") -> NDArray[np.uint64]:
    """uint64 ``[len(texts)]``: a stable hash of each text (BLAKE2b, 64 bits), the same on every machine."""
    start = hashlib.blake2b(salt.encode(), digest_size=8)

    def digest(text: str) -> bytes:
        state = start.copy()
        state.update(text.encode())
        return state.digest()

    return np.frombuffer(b"".join(map(digest, texts)), dtype="<u8").astype(np.uint64, copy=False)


def text_key(text: str, *, salt: str = "") -> int:
    """A stable 63-bit hash of one text, fit to be a part of a key."""
    return int(text_keys([text], salt=salt)[0]) >> 1
