"""Requests in, samples out: what a loader worker runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils.data import Dataset

from marey.core.errors import UserError
from marey.core.latents import Identity, LatentSample
from marey.core.now import reading
from marey.latents.adapter import LatentAdapter
from marey.latents.requests import WindowRequest


@dataclass(frozen=True)
class Replacement:
    """A window whose clip could not be read, why, and what stood in for it."""

    asked: Identity
    reason: str
    used: Identity


class LatentDataset(Dataset[LatentSample]):
    """Loads microbatches of requests. Requests carry everything, so there is nothing to index and no length.

    A clip that cannot be read stops the run with its reason, unless its request brings alternates: then the
    first readable one, which is of the same source and shape, takes its place, and the replacement is
    reported.
    """

    def __init__(self, adapter: LatentAdapter) -> None:
        self._adapter = adapter

    def __getitem__(self, request: WindowRequest) -> LatentSample:
        return self.read(request)[0]

    def __getitems__(self, requests: Sequence[WindowRequest]) -> list[tuple[LatentSample, Replacement | None]]:
        """The samples of one microbatch, in order, each with its replacement if there was one."""
        return [self.read(request) for request in requests]

    def read(self, request: WindowRequest) -> tuple[LatentSample, Replacement | None]:
        """One sample, and what it replaces. Raises UserError when neither the clip nor an alternate is readable."""
        try:
            return self._load(request), None
        except UserError as error:
            if not request.alternates:
                raise
            reason = str(error)
        for other in request.alternates:
            try:
                sample = self._load(other)
            except UserError:
                continue
            return sample, Replacement(request.identity, reason, other.identity)
        raise UserError(
            f"source {request.source}: neither clip {request.clip.clip_id} nor {len(request.alternates)} others of "
            f"its shape could be read ({reason})"
        )

    def _load(self, request: WindowRequest) -> LatentSample:
        with reading(str(request.clip.path)):
            return self._adapter.load(request)
