"""The token budget as the plan sees it: how many forward calls a microbatch takes, known before anything is read.

The plan of every rank is arithmetic, so the ranks agree on the number of calls without talking to each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.sampling.planner import MicrobatchPlanner, PlannedBatch

Ints = NDArray[np.int64]


def window_tokens(batch: PlannedBatch, *, patch: int) -> Ints:
    """int64 ``[b]``: valid video tokens of each sample; ``patch`` is the side of a token in latent cells."""
    at = batch.at
    return (at.prefix + at.future) * (at.height // patch) * (at.width // patch)


def calls_needed(tokens: Ints, max_tokens: int) -> int:
    """Consecutive chunks of at most ``max_tokens`` that the samples fill, in order; none may exceed it alone."""
    assert tokens.size
    assert tokens.max() <= max_tokens, (tokens.max(), max_tokens)
    calls, held = 1, 0
    for count in tokens.tolist():
        if held and held + count > max_tokens:
            calls, held = calls + 1, 0
        held += count
    return calls


def agreed_calls(planner: MicrobatchPlanner, epoch: int, micro_step: int, *, max_tokens: int, patch: int) -> int:
    """Forward calls of ``micro_step`` on every rank: as many as the rank that needs most.

    Raises UserError naming the first sample that alone exceeds the budget.
    """
    most = 0
    for rank in range(planner.world):
        batch = planner.batch_at(epoch, micro_step, rank)
        tokens = window_tokens(batch, patch=patch)
        over = np.flatnonzero(tokens > max_tokens)
        if over.size:
            i = int(over[0])
            source = planner.windows.sources[int(batch.source[i])]
            clip = source.manifest.clip(int(batch.at.row[i])).clip_id
            raise UserError(
                f"{source.name}/{clip}@{int(batch.at.start[i])} alone has {int(tokens[i])} video tokens, more than "
                f"data.batching.max_tokens={max_tokens}; raise it or choose shorter data.buckets."
            )
        most = max(most, calls_needed(tokens, max_tokens))
    return most


def largest_window(planner: MicrobatchPlanner, *, patch: int) -> int:
    """Tokens of the largest window that any source can give: what the budget must at least be."""
    largest = 0
    for source in planner.windows.sources:
        if len(source) and source.manifest.height is not None:
            at = source.locate(np.arange(len(source), dtype=np.int64))
            tokens = (at.prefix + at.future) * (at.height // patch) * (at.width // patch)
            largest = max(largest, int(tokens.max()))
    return largest
