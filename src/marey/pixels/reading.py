"""Reading clips so that one that cannot be read costs the others nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from marey.core.errors import UserError
from marey.core.now import reading
from marey.pixels.episodes import EpisodeSource, FrameRequest, ReadsEach, SourceGoneError

READ_BYTES = 1 << 27
"""Frames decoded before their views are made: enough to read storage in long strokes, and far from the memory
that a whole chunk of full frames would take in every worker."""
READ_ERRORS = (OSError, ValueError, RuntimeError, UserError)
"""What a source raises for frames that cannot be read or decoded."""

Item = TypeVar("Item")


class Refusal(NamedTuple):
    """An episode that could not be read."""

    episode: int
    reason: str
    """Names the file."""


class ClipReader:
    """Reads clips of one source in blocks of about ``READ_BYTES``, learning the size of a clip as it goes."""

    def __init__(self, source: EpisodeSource) -> None:
        self.source = source
        self._largest = 0

    def blocks(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """``items``, one per clip, in runs to be read at once; the first run is one clip until a size is known."""
        start = 0
        while start < len(items):
            count = max(1, READ_BYTES // self._largest) if self._largest else 1
            yield items[start : start + count]
            start += count

    def read(self, requests: Sequence[FrameRequest]) -> list[torch.Tensor | Refusal]:
        """Frames of every request, uint8 ``[T, 3, H, W]``, or why that one cannot be had."""
        results = read_clips(self.source, requests)
        sizes = [result.nbytes for result in results if isinstance(result, torch.Tensor)]
        self._largest = max([self._largest, *sizes])
        return results


def read_clips(source: EpisodeSource, requests: Sequence[FrameRequest]) -> list[torch.Tensor | Refusal]:
    """Frames of every request, uint8 ``[T, 3, H, W]``, or why that one cannot be had.

    Raises ``SourceGoneError`` where the source itself is no longer what it was: then no clip stands in for another.
    """
    if not requests:
        return []
    if isinstance(source, ReadsEach):
        each = zip(requests, source.read_each(requests), strict=True)
        return [_refusal(source, asked, got) if isinstance(got, UserError) else got for asked, got in each]
    try:
        with reading(source.path):
            return list(source.read(requests))
    except SourceGoneError:
        raise
    except READ_ERRORS as error:
        if len(requests) == 1:
            return [_refusal(source, requests[0], error)]
    return [result for request in requests for result in read_clips(source, [request])]


def _refusal(source: EpisodeSource, request: FrameRequest, error: Exception) -> Refusal:
    file, text = source.files[request.episode], " ".join(str(error).split()) or type(error).__name__
    return Refusal(request.episode, text if file in text else f"{file}: {text}")
