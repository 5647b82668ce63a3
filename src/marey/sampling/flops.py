"""What samples cost the video transformer, modelled: the matrix products of its blocks. No torch.

A multiply-add counts as two FLOPs; these are of a forward pass (a backward pass is twice as much). Text, and the patch
embedding, which depends on channels that only files tell, are left out: no assignment of work may change with what a
configuration has filled in later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from marey.config.causal import ProgramConfig, VideoModelConfig
from marey.sampling.video_tokens import Ints, frames_seen, visible_pairs
from marey.sampling.windows import Located


class SampleCost(NamedTuple):
    """FLOPs of all blocks by what they see."""

    token: float
    """Projections and MLP, a token."""
    pair: float
    """Scores and their sum over values, a (query, key) pair of tokens."""
    model: VideoModelConfig
    program: ProgramConfig

    def of(self, at: Located, *, frames: Ints | None = None) -> NDArray[np.float64]:
        """float64 ``[k]``: FLOPs of each window, forward; padded to ``frames`` (int64 ``[k]``) where that is given.

        A window whose height and width are not known is taken for one token a frame.
        """
        patch, pt = self.model.patch, self.model.patch_t
        cells = (np.maximum(at.height // patch, 1) * np.maximum(at.width // patch, 1)).astype(np.float64)
        if frames is None:
            seen = frames_seen(self.program, at.prefix + at.future)
            pairs = visible_pairs(self.program, at.prefix, at.future)
        else:
            seen = frames_seen(self.program, frames)
            pairs = seen.astype(np.float64) ** 2
        return self.token * seen * cells / pt + self.pair * pairs * (cells / pt) ** 2


def sample_cost(model: VideoModelConfig, program: ProgramConfig) -> SampleCost:
    """What the blocks of ``model`` cost under ``program``: 8 + 4 r FLOPs a token, block and squared width (q, k, v and
    output; an MLP of r times the width), and 4 a pair, block and unit of width.
    """
    return SampleCost(
        token=model.layers * (8 + 4 * model.mlp_ratio) * model.hidden**2,
        pair=4.0 * model.layers * model.hidden,
        model=model,
        program=program,
    )
