"""What a run has consumed, over all ranks: counted as steps complete, saved with every checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from marey.sampling.order import EpochPlan


class Ledger:
    """Counts over all ranks. Which clips a micro-step takes is arithmetic, so no rank asks another for them.

    clips: made and trained on, per source; of these, ``replaced`` stand in for one that could not be read.
    """

    def __init__(self, order: EpochPlan, *, sources: int, fixed_epoch: bool) -> None:
        self._order, self._fixed_epoch = order, fixed_epoch
        self.micro_steps = 0
        self.optimizer_steps = 0
        self.skipped_steps = 0
        self.tokens = 0
        self.same_episode_pairs = 0
        self.clips = [0] * sources
        self.replaced = [0] * sources

    @property
    def clips_seen(self) -> int:
        """Clips of all sources."""
        return sum(self.clips)

    def count(
        self,
        *,
        epoch: int,
        micro_steps: Sequence[int],
        tokens: int,
        replaced: Sequence[int],
        skipped: bool,
        numbers: Sequence[float] = (),  # noqa: ARG002  # clips are arithmetic
    ) -> int:
        """Add one optimizer step made of these micro-steps of ``epoch``; returns its pairs of clips of one episode."""
        pairs = 0
        size = self._order.statistic_batch
        key = 0 if self._fixed_epoch else epoch
        for micro_step in micro_steps:
            start, stop = micro_step * size, (micro_step + 1) * size
            pairs += self._order.same_episode_pairs(key, start, stop)
            sources = np.fromiter((draw.source for draw in self._order.draws(key, start, stop)), np.int64, size)
            counts = np.bincount(sources, minlength=len(self.clips)).tolist()
            self.clips = [have + more for have, more in zip(self.clips, counts, strict=True)]
        self.replaced = [have + int(more) for have, more in zip(self.replaced, replaced, strict=True)]
        self.micro_steps += len(micro_steps)
        self.optimizer_steps += 1
        self.skipped_steps += skipped
        self.tokens += tokens
        self.same_episode_pairs += pairs
        return pairs

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "micro_steps": self.micro_steps,
            "optimizer_steps": self.optimizer_steps,
            "skipped_steps": self.skipped_steps,
            "tokens": self.tokens,
            "same_episode_pairs": self.same_episode_pairs,
            "clips": list(self.clips),
            "replaced": list(self.replaced),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a saved state."""
        for key in ("micro_steps", "optimizer_steps", "skipped_steps", "tokens", "same_episode_pairs"):
            setattr(self, key, int(state[key]))
        for key in ("clips", "replaced"):
            # A resume that was allowed to change its sources has no past to give the new ones.
            past = [int(value) for value in state[key]]
            setattr(self, key, (past + [0] * len(self.clips))[: len(self.clips)])
