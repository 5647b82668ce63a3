"""What a causal run has consumed, over all ranks, by source: measured from the batches themselves."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from marey.sampling.exposure import Appearance
from marey.sampling.planner import MicrobatchPlanner
from marey.training.latents import Walk

MEASURED = ("drawn", "repeats", "tail_repeats", "reached", "frames", "tokens", "seconds", "supervised")
ALWAYS = 3
"""The first so many are counted whether or not the step was taken."""


def measure(appearances: Sequence[Appearance], names: Sequence[str]) -> list[float]:
    """``len(names) x len(MEASURED)`` numbers, source by source."""
    table = np.zeros((len(names), len(MEASURED)))
    place = {name: row for row, name in enumerate(names)}
    for sample in appearances:
        first = not sample.repeat
        table[place[sample.source]] += (
            first,
            first and sample.turn > 0,
            not first,
            1,
            sample.frames,
            sample.tokens,
            sample.seconds,
            sample.supervised,
        )
    flat: list[float] = table.reshape(-1).tolist()
    return flat


class LatentLedger:
    """Counts over all ranks, saved with every checkpoint. ``own`` numbers precede the measured ones."""

    def __init__(
        self,
        planner: MicrobatchPlanner,
        shares: Sequence[Fraction],
        *,
        own: int,
        per_epoch: int,
        fixed_epoch: bool,
        walk: Walk,
    ) -> None:
        self._planner, self._walk, self._shares, self._own = planner, walk, list(shares), own
        self._per_epoch, self._fixed_epoch = per_epoch, fixed_epoch
        self.micro_steps = 0
        self.optimizer_steps = 0
        self.skipped_steps = 0
        self.tokens = 0
        self.table = np.zeros((len(self._shares), len(MEASURED)))
        self.dropped = [0] * len(self._shares)
        self.replaced = [0] * len(self._shares)

    @property
    def clips_seen(self) -> int:
        """Samples that reached an optimizer step."""
        return int(self.table[:, MEASURED.index("reached")].sum())

    def count(
        self,
        *,
        epoch: int,
        micro_steps: Sequence[int],
        tokens: int,
        replaced: Sequence[int],
        skipped: bool,
        numbers: Sequence[float],
    ) -> int:
        """Add one optimizer step; which samples meet is not of interest here, so 0 pairs."""
        table = np.asarray(numbers[self._own :]).reshape(self.table.shape)
        self.table[:, :ALWAYS] += table[:, :ALWAYS]
        if not skipped:
            self.table[:, ALWAYS:] += table[:, ALWAYS:]
        for micro_step in micro_steps:
            left = self.dropped_at(epoch, micro_step)
            if left is not None:
                for source, turn in zip(left[0].source.tolist(), left[0].turn.tolist(), strict=True):
                    self.dropped[source] += 1
                    self.table[source, MEASURED.index("drawn")] += 1
                    self.table[source, MEASURED.index("repeats")] += turn > 0
        self.replaced = [have + int(more) for have, more in zip(self.replaced, replaced, strict=True)]
        self.micro_steps += len(micro_steps)
        self.optimizer_steps += 1
        self.skipped_steps += skipped
        self.tokens += tokens
        return 0

    def dropped_at(self, epoch: int, micro_step: int) -> Any:
        """(draws, where they lie) of what no step takes of the epoch that this micro-step ends; None before it."""
        overall = micro_step if self._fixed_epoch else epoch * self._per_epoch + micro_step
        if self._fixed_epoch or not self._walk.ends_epoch(overall):
            return None
        positions = self._planner.dropped(self._walk.at(overall)[0])
        if not len(positions):
            return None
        drawn = self._planner.draws.at(self._walk.at(overall)[0], positions)
        return drawn, self._planner.windows.locate(drawn.source, drawn.window)

    def per_source(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """One entry a source, as the receipt has it."""
        reached = self.table[:, MEASURED.index("reached")]
        total = float(reached.sum())
        found = []
        for row, name in enumerate(names):
            counts = dict(zip(MEASURED, self.table[row].tolist(), strict=True))
            counts = {key: value if key == "seconds" else round(value) for key, value in counts.items()}
            found.append(
                {
                    "name": name,
                    "clips": counts.pop("reached"),
                    **counts,
                    "dropped": self.dropped[row],
                    "replaced": self.replaced[row],
                    "share": float(reached[row]) / total if total else 0.0,
                    "asked_share": float(self._shares[row]),
                }
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "micro_steps": self.micro_steps,
            "optimizer_steps": self.optimizer_steps,
            "skipped_steps": self.skipped_steps,
            "tokens": self.tokens,
            "table": self.table.tolist(),
            "dropped": list(self.dropped),
            "replaced": list(self.replaced),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a saved state; a resume that was allowed other sources gives new ones no past."""
        for key in ("micro_steps", "optimizer_steps", "skipped_steps", "tokens"):
            setattr(self, key, int(state[key]))
        for key in ("dropped", "replaced"):
            past = [int(value) for value in state[key]]
            setattr(self, key, (past + [0] * len(self._shares))[: len(self._shares)])
        table = np.asarray(state["table"], dtype=np.float64)[: len(self._shares)]
        self.table[:] = 0
        self.table[: len(table)] = table
