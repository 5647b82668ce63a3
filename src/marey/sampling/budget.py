"""The plan against what a forward pass can hold: what can never work is refused before anything is read."""

from __future__ import annotations

import numpy as np

from marey.core.errors import UserError
from marey.sampling.planner import MicrobatchPlanner, PlannedBatch


def check_budget(
    planner: MicrobatchPlanner, *, max_tokens: int, patch: int, key: str = "data.batching.max_tokens"
) -> None:
    """Look at every window that could be drawn; ``patch`` is the side of a token in latent cells.

    Sources whose manifest has no height and width are judged when they are read. ``key`` names the budget.
    Raises UserError naming the largest window of the first source that holds one beyond ``max_tokens``.
    """
    for source in planner.windows.sources:
        if not len(source) or source.manifest.height is None:
            continue
        at = source.locate(np.arange(len(source), dtype=np.int64))
        tokens = (at.prefix + at.future) * (at.height // patch) * (at.width // patch)
        i = int(tokens.argmax())
        if tokens[i] > max_tokens:
            clip = source.manifest.clip(int(at.row[i])).clip_id
            raise UserError(
                f"{source.name}/{clip}@{int(at.start[i])} alone has {int(tokens[i])} video tokens, more than "
                f"{key}={max_tokens}; raise it or choose shorter data.buckets"
            )


def check_shapes(planner: MicrobatchPlanner, *, strict: bool, key: str, first: int | None = None) -> None:
    """Look at the first ``first`` micro-steps (None: all) of epoch 0 for samples that cannot share a microbatch.

    Those are of two canvases or, when ``strict``, of two lengths. ``key`` names the size of the batch. What
    manifests do not say is judged when it is read. Raises UserError naming two such samples.
    """
    if planner.batch == 1 or (not strict and len(canvases_of(planner)) < 2):
        return
    steps = planner.micro_steps(0)
    for step in range(steps if first is None else min(first, steps)):
        for rank in range(planner.world):
            batch = planner.batch_at(0, step, rank)
            at = batch.at
            for what, values in (
                ("canvases", list(zip(at.height.tolist(), at.width.tolist(), strict=True))),
                ("lengths", (at.prefix + at.future).tolist() if strict else []),
            ):
                other = next((i for i, value in enumerate(values) if value != values[0]), None)
                if other is not None:
                    mode = "data.batching.mode=strict cannot hold" if what == "lengths" else "no mode can hold"
                    raise UserError(
                        f"{_sample(planner, batch, 0)} and {_sample(planner, batch, other)} are in one batch and of "
                        f"different {what} ({_shown(values[0])} and {_shown(values[other])}), which {mode}; "
                        f"set {key}=1" + (", or data.batching.mode=packed" if what == "lengths" else "")
                    )


def canvases_of(planner: MicrobatchPlanner) -> set[tuple[int, int]]:
    """(height, width) of all clips whose manifest tells."""
    found: set[tuple[int, int]] = set()
    for manifest in (source.manifest for source in planner.windows.sources):
        if manifest.height is not None and manifest.width is not None:
            found |= set(zip(manifest.height.tolist(), manifest.width.tolist(), strict=True))
    return found


def _sample(planner: MicrobatchPlanner, batch: PlannedBatch, i: int) -> str:
    source = planner.windows.sources[int(batch.source[i])]
    return f"{source.name}/{source.manifest.clip(int(batch.at.row[i])).clip_id}@{int(batch.at.start[i])}"


def _shown(value: tuple[int, int] | int) -> str:
    return f"{value} frames" if isinstance(value, int) else f"{value[0]} x {value[1]}"
