"""How far a cloud of vectors is from collapse: its effective rank and its spread."""

from __future__ import annotations

import torch
from torch import Tensor


def _at_least_float32(x: Tensor) -> Tensor:
    return x.detach() if x.dtype == torch.float64 else x.detach().float()


def rankme(x: Tensor) -> Tensor:
    """Effective rank of the rows of ``x`` ``[B, D]``: a scalar from 1 to min(B, D).

    The exponential of the entropy of the singular values normalised to sum 1 (RankMe: Garrido et al. 2023,
    arXiv 2210.02885), of the uncentred matrix. A constant matrix, zero included, has rank 1. NaN if ``x``
    holds a value that is not finite.
    """
    x = _at_least_float32(x)
    if not bool(torch.isfinite(x).all()):
        return x.new_full((), float("nan"))
    # The rank does not depend on scale; scaled to 1 the squares inside the decomposition cannot overflow.
    scale = x.abs().amax()
    if not bool(scale > 0):
        return x.new_ones(())
    values = torch.linalg.svdvals(x / scale)
    shares = values / values.sum()
    rank: Tensor = torch.special.entr(shares).sum().exp()
    return rank


def embedding_std(x: Tensor) -> Tensor:
    """Standard deviation over the rows of ``x`` ``[B, D]``, averaged over columns: 0 when all rows are one
    vector.

    The population value (divided by B), so that a single row gives 0.
    """
    return _at_least_float32(x).std(dim=0, correction=0).mean()
