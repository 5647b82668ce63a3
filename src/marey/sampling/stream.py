"""From planned microbatches to requests that a loader worker can read by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from marey.core.keys import rng
from marey.latents.requests import Layout, WindowRequest
from marey.sampling.planner import Ints, MicrobatchPlanner, PlannedBatch

_CANDIDATES = 64
"""Clips that are looked at for a stand-in: they fit already, so only rows of one file are passed over."""


class RequestStream:
    """Requests of any microbatch. ``layouts``: what each source declares. ``alternates``: stand-ins per request.

    Alternates are of the same source and canvas as the window they may replace, cut to its geometry, and keyed by
    its draw; there are fewer only where a source has no more clips that are long enough.
    """

    def __init__(self, planner: MicrobatchPlanner, layouts: Sequence[Layout | None], *, alternates: int = 0) -> None:
        assert len(layouts) == len(planner.windows.sources), layouts
        self.planner, self._layouts, self._alternates = planner, tuple(layouts), alternates
        self._roomy: dict[tuple[int, int, int], tuple[Ints, Ints]] = {}

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
        return request._replace(
            alternates=self._stand_ins(request, s, canvas=(int(batch.at.height[i]), int(batch.at.width[i])))
        )

    def _stand_ins(self, request: WindowRequest, s: int, *, canvas: tuple[int, int]) -> tuple[WindowRequest, ...]:
        """Other clips of the source and canvas that are long enough, each at one of its windows' starts, by key."""
        source = self.planner.windows.sources[s]
        rows, room = self._by_room(s, canvas)
        fitting = int(np.searchsorted(-room, -request.frames, side="right"))
        key = rng(self.planner.seed, "replace", request.epoch, request.position, request.repeat)
        if fitting <= _CANDIDATES:
            drawn = key.permutation(fitting)
        else:
            drawn = np.unique(key.integers(0, fitting, _CANDIDATES))
            drawn = key.permutation(drawn)
        found: list[WindowRequest] = []
        for place in drawn.tolist():
            clip = source.manifest.clip(int(rows[place]))
            if clip.path == request.clip.path:
                continue
            starts = (int(room[place]) - request.frames) // source.stride + 1
            start = int(source.first[rows[place]]) + int(key.integers(0, starts)) * source.stride
            found.append(request._replace(clip=clip, start=start))
            if len(found) == self._alternates:
                break
        return tuple(found)

    def _by_room(self, s: int, canvas: tuple[int, int]) -> tuple[Ints, Ints]:
        """Rows of a source's clips on ``canvas`` and the frames of each from its first window on, longest first."""
        if (s, *canvas) not in self._roomy:
            source = self.planner.windows.sources[s]
            manifest = source.manifest
            room = manifest.length_frames - source.first
            here = np.ones(len(manifest), dtype=np.bool_)
            if manifest.height is not None and manifest.width is not None:
                here = (manifest.height == canvas[0]) & (manifest.width == canvas[1])
            rows = np.flatnonzero(here)
            rows = rows[np.argsort(-room[rows], kind="stable")]
            self._roomy[s, *canvas] = (rows, room[rows])
        return self._roomy[s, *canvas]


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
