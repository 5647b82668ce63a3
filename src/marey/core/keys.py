"""Addressed randomness: every draw comes from a key, none from a stream.

A key is ``(seed, purpose, *parts)``. Equal keys give equal draws, whatever process, worker or order asks,
so worker count, prefetching, resuming and partitioning cannot change what is drawn. Keys are hashed with
BLAKE2b, which makes neighbouring keys independent, and feed a counter-based generator (Philox).

Purposes are short fixed strings, one per kind of draw; two kinds of draw never share one.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def _digest(seed: int, purpose: str, parts: tuple[int, ...], size: int) -> bytes:
    name = purpose.encode()
    packed = struct.pack(f"<q{len(parts)}q", seed, *parts)
    # The length of the name separates it from the numbers, so no two keys share a byte string.
    return hashlib.blake2b(struct.pack("<q", len(name)) + name + packed, digest_size=size).digest()


def derive(seed: int, purpose: str, *parts: int) -> int:
    """An unsigned 63-bit integer that is a pure function of the key (fits every seed argument)."""
    return int.from_bytes(_digest(seed, purpose, parts, 8), "little") >> 1


def rng(seed: int, purpose: str, *parts: int) -> np.random.Generator:
    """A NumPy generator (Philox, 128-bit key) that belongs to this key alone."""
    key = np.frombuffer(_digest(seed, purpose, parts, 16), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def permutation(n: int, seed: int, purpose: str, *parts: int) -> NDArray[np.int64]:
    """A uniform permutation of ``0..n-1`` (int64) that is a pure function of the key."""
    return rng(seed, purpose, *parts).permutation(n).astype(np.int64, copy=False)


def torch_generator(seed: int, purpose: str, *parts: int) -> torch.Generator:
    """A CPU ``torch.Generator`` that belongs to this key alone."""
    import torch  # deferred: commands that never draw tensors must start without torch

    return torch.Generator().manual_seed(derive(seed, purpose, *parts))
