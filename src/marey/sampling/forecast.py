"""What a plan would cost and give, read off the plan: padding, tokens, attention, balance of ranks, exposure.

Nothing is opened and nothing is estimated from averages: these are the microbatches that a run would train
on, of which ``steps`` evenly spaced ones are looked at (whole pools where there are pools).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from marey.config.causal import ProgramConfig
from marey.sampling.flops import SampleCost
from marey.sampling.planner import EpochCounts, MicrobatchPlanner
from marey.sampling.video_tokens import frames_seen, visible_pairs


@dataclass(frozen=True)
class Forecast:
    """Of one epoch. Tokens are video tokens that the program sees; shares are of what was looked at."""

    counts: EpochCounts
    steps_seen: int
    buckets: dict[tuple[int, int], int]
    """Samples by (prefix, future)."""
    canvases: dict[tuple[int, int], int]
    """Samples by (height, width); (0, 0) where the manifest does not say."""
    draws: dict[str, float]
    """Share of samples by source."""
    tail: dict[str, float]
    """Share of samples by source that complete a step: repeats of other samples of the epoch."""
    tokens: float
    """Valid tokens of a micro-step, over all ranks."""
    tokens_padded: float
    """Tokens of a micro-step when each microbatch is padded to its longest sample."""
    pairs: float
    """Query-key pairs of self-attention inside samples, valid ones, a micro-step."""
    pairs_padded: float
    """The same when each microbatch is padded."""
    rank_balance: float
    """Mean over micro-steps of (mean rank's tokens / busiest rank's tokens), valid ones; 1: nobody waits."""
    rank_balance_padded: float
    """The same when each microbatch is padded."""
    flops_balance: float | None
    """The same of modelled FLOPs, valid ones; None without a cost."""
    flops_balance_padded: float | None
    """The same when each microbatch is padded."""
    samples: tuple[int, int]
    """Of the smallest and the largest microbatch looked at."""

    @property
    def padding_share(self) -> float:
        """Share of padding in what heavy layers see in a padded forward pass; packed sees none."""
        return 1 - self.tokens / self.tokens_padded if self.tokens_padded else 0.0


def forecast(
    planner: MicrobatchPlanner,
    *,
    program: ProgramConfig,
    epoch: int = 0,
    patch: int = 1,
    multiple: int = 1,
    steps: int | None = 64,
    cost: SampleCost | None = None,
) -> Forecast:
    """Look at ``steps`` micro-steps of ``epoch`` (None: all). ``multiple``: capacities are rounded up to it. ``cost``:
    what samples are taken to cost, for the balance of work.

    Where manifests do not tell height and width a token is a whole frame.
    """
    counts = planner.counts(epoch)
    buckets: Counter[tuple[int, int]] = Counter()
    canvases: Counter[tuple[int, int]] = Counter()
    sources: Counter[int] = Counter()
    tail: Counter[int] = Counter()
    valid, padded, pairs, pairs_padded = [], [], 0.0, 0.0
    work: list[list[float]] = []
    work_padded: list[list[float]] = []
    sizes: list[int] = []
    chosen = _chosen(counts.micro_steps, planner.pooled, steps)
    for step in chosen:
        by_rank, by_rank_padded = [], []
        if cost is not None:
            work.append([])
            work_padded.append([])
        for rank in range(planner.world):
            batch = planner.batch_at(epoch, step, rank)
            at = batch.at
            buckets.update(zip(at.prefix.tolist(), at.future.tolist(), strict=True))
            canvases.update(zip(at.height.tolist(), at.width.tolist(), strict=True))
            sources.update(batch.source.tolist())
            tail.update(batch.source[batch.repeat > 0].tolist())
            cells = np.maximum(at.height // patch, 1) * np.maximum(at.width // patch, 1)
            frames = at.prefix + at.future
            longest = np.full_like(frames, -(-int(frames.max(initial=0)) // multiple) * multiple)
            seen, capacity = frames_seen(program, frames), frames_seen(program, longest)
            sizes.append(len(frames))
            if cost is not None:
                work[-1].append(float(cost.of(at).sum()))
                work_padded[-1].append(float(cost.of(at, frames=longest).sum()))
            by_rank.append(int((seen * cells).sum()))
            by_rank_padded.append(int((capacity * cells).sum()))
            pairs += float((visible_pairs(program, at.prefix, at.future) * cells.astype(np.float64) ** 2).sum())
            pairs_padded += float(((capacity * cells).astype(np.float64) ** 2).sum())
        valid.append(by_rank)
        padded.append(by_rank_padded)
    steps_seen = max(1, len(chosen))
    samples = max(1, sum(sources.values()))
    return Forecast(
        counts=counts,
        steps_seen=len(chosen),
        buckets=dict(sorted(buckets.items())),
        canvases=dict(sorted(canvases.items())),
        draws={name: sources[s] / samples for s, name in enumerate(planner.windows.names)},
        tail={name: tail[s] / samples for s, name in enumerate(planner.windows.names)},
        tokens=float(np.sum(valid)) / steps_seen,
        tokens_padded=float(np.sum(padded)) / steps_seen,
        pairs=pairs / steps_seen,
        pairs_padded=pairs_padded / steps_seen,
        rank_balance=_balance(valid),
        rank_balance_padded=_balance(padded),
        flops_balance=None if cost is None else _balance(work),
        flops_balance_padded=None if cost is None else _balance(work_padded),
        samples=(min(sizes, default=0), max(sizes, default=0)),
    )


def _chosen(total: int, pooled: int, steps: int | None) -> list[int]:
    """About ``steps`` of ``total`` micro-steps in evenly spaced whole pools."""
    pools = -(-total // pooled)
    wanted = pools if steps is None else min(pools, max(1, -(-steps // pooled)))
    starts = sorted({i * pools // wanted for i in range(wanted)}) if wanted else []
    return [step for pool in starts for step in range(pool * pooled, min((pool + 1) * pooled, total))]


def _balance(loads: Sequence[Sequence[float]]) -> float:
    shares = [sum(row) / len(row) / max(row) for row in loads if max(row, default=0) > 0]
    return float(np.mean(shares)) if shares else 1.0
