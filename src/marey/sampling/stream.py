"""From planned microbatches to requests that a loader worker can read by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from marey.core.keys import rng
from marey.latents.requests import Layout, WindowRequest
from marey.sampling.planner import MicrobatchPlanner, PlannedBatch

_CANDIDATES = 64


class RequestStream:
    """Requests of any microbatch. ``layouts``: what each source declares. ``alternates``: stand-ins per request.

    Alternates are of the same source, canvas and geometry as the window they may replace, and keyed by its
    draw.
    """

    def __init__(self, planner: MicrobatchPlanner, layouts: Sequence[Layout | None], *, alternates: int = 0) -> None:
        assert len(layouts) == len(planner.windows.sources), layouts
        self.planner, self._layouts, self._alternates = planner, tuple(layouts), alternates

    def requests(self, epoch: int, micro_step: int, rank: int) -> list[WindowRequest]:
        """The microbatch of ``rank`` in ``micro_step`` of ``epoch``."""
        batch = self.planner.batch_at(epoch, micro_step, rank)
        return [self._request(batch, i, epoch) for i in range(len(batch.position))]

    def _request(self, batch: PlannedBatch, i: int, epoch: int) -> WindowRequest:
        s = int(batch.source[i])
        source = self.planner.windows.sources[s]
        row, start, prefix, future = (int(column[i]) for column in batch.at[:4])
        position, repeat = int(batch.position[i]), int(batch.repeat[i])
        request = WindowRequest(
            clip=source.manifest.clip(row),
            source=source.name,
            layout=self._layouts[s],
            start=start,
            prefix=prefix,
            future=future,
            epoch=epoch,
            position=position,
            repeat=repeat,
        )
        if not self._alternates:
            return request
        drawn = rng(self.planner.seed, "replace", epoch, position, repeat).integers(0, len(source), _CANDIDATES)
        at = source.locate(drawn.astype(np.int64))
        like = (at.prefix == prefix) & (at.future == future) & (at.row != row)
        like &= (at.height == batch.at.height[i]) & (at.width == batch.at.width[i])
        others = np.flatnonzero(like)[: self._alternates]
        return request._replace(
            alternates=tuple(
                request._replace(clip=source.manifest.clip(int(at.row[j])), start=int(at.start[j])) for j in others
            )
        )


class MicrobatchSampler:
    """A loader's batch sampler: the microbatches of ``rank`` from micro-step ``first`` of ``epoch`` to its end.

    Where it starts is arithmetic: nothing before ``first`` is drawn or read.
    """

    def __init__(self, stream: RequestStream, *, epoch: int, rank: int, first: int = 0) -> None:
        self._stream, self._epoch, self._rank, self._first = stream, epoch, rank, first
        self._last = stream.planner.micro_steps(epoch)

    def __len__(self) -> int:
        return max(0, self._last - self._first)

    def __iter__(self) -> Iterator[list[WindowRequest]]:
        for micro_step in range(self._first, self._last):
            yield self._stream.requests(self._epoch, micro_step, self._rank)
