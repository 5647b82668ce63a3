"""The isolation predicate: which token may see which. Defined here, once, for every mode and every kernel.

A token carries five labels. ``sample``: whose it is (-1: nobody's). ``valid``: it is real, not padding. ``chunk``:
its place in the program's causal order. ``noisy``: it belongs to the stream that is being denoised. ``reach``: how
many chunks away it may look. Programs differ in the labels they give, never in the rule:

- every valid frame sees every valid frame: one chunk, nothing noisy;
- prefix frames see only prefix frames: prefix in chunk 0, future in chunk 1, nothing noisy;
- two streams: noisy tokens see noisy ones of their own chunk and clean ones of strictly earlier chunks, clean ones
  see clean ones of the same and earlier chunks, both within ``reach``;
- text: the query is a video token, the key a text token, all in one chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

UNBOUNDED = 2**30
"""A ``reach`` that excludes nothing."""


class Labels(NamedTuple):
    """Labels of tokens (or of frames: all tokens of a frame have equal ones); five tensors of one shape."""

    sample: Tensor
    """int32"""
    valid: Tensor
    """bool"""
    chunk: Tensor
    """int32"""
    noisy: Tensor
    """bool"""
    reach: Tensor
    """int32"""

    def at(self, index: Any) -> Labels:
        """The labels at an index, as tensors are indexed."""
        return Labels(*(field[index] for field in self))

    def to(self, device: torch.device) -> Labels:
        """The labels on a device."""
        return Labels(*(field.to(device, non_blocking=True) for field in self))


def may_see(query: Labels, key: Labels) -> Tensor:
    """bool, broadcast over both: whether ``query`` may attend to ``key``.

    Padding is never seen. A padding query sees what its own sample's tokens of its chunk see; nothing reads it.
    """
    own = (query.sample == key.sample) & (query.sample >= 0) & key.valid
    # A clean key is visible from its own chunk to clean queries, from later chunks to all; a noisy one, from its
    # own chunk to noisy queries alone.
    clean = (key.chunk < query.chunk) | ((key.chunk == query.chunk) & ~query.noisy)
    noisy = (key.chunk == query.chunk) & query.noisy
    causal = (key.noisy & noisy) | (~key.noisy & clean)
    return own & causal & ((query.chunk - key.chunk).abs() <= query.reach)


def visibility_matrix(query: Labels, key: Labels) -> Tensor:
    """bool ``[..., Q, K]``: ``may_see`` for every pair of two label sets ``[..., Q]`` and ``[..., K]``."""
    return may_see(Labels(*(field.unsqueeze(-1) for field in query)), Labels(*(field.unsqueeze(-2) for field in key)))
