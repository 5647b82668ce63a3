"""The token budget against the plan: a window that can never fit is refused before anything is read."""

from __future__ import annotations

import numpy as np

from marey.core.errors import UserError
from marey.sampling.planner import MicrobatchPlanner


def check_budget(planner: MicrobatchPlanner, *, max_tokens: int, patch: int) -> None:
    """Look at every window that could be drawn; ``patch`` is the side of a token in latent cells.

    Sources whose manifest has no height and width are judged when they are read.
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
                f"data.batching.max_tokens={max_tokens}; raise it or choose shorter data.buckets"
            )
