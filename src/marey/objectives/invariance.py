"""The encoder objective: every view of a clip lands where its global view lands, and the cloud stays
Gaussian.

LeVJEPA (Kuhn et al. 2026, arXiv 2608.27395): ``invariance + weight * sigreg`` and nothing else; both sides of
the invariance get gradient, and there is no teacher, no stop-gradient and no predictor.

Legend: b clips of a chunk, B clips of this rank's micro-step, V local views, D encoder width, O projector
output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from marey.core.tokens import TokenGroup, ViewChunk
from marey.models.projector import Projector
from marey.models.vit import VisionTransformer
from marey.objectives.base import StepOutput
from marey.objectives.sigreg import SigReg


def invariance_loss(z: Tensor) -> Tensor:
    """``[B, V+1, O]``, global view first -> scalar ``(global - all)^2`` averaged over everything.

    The global view's zero distance to itself is in the mean, as published. float32 at least.
    """
    z = z if z.dtype == torch.float64 else z.float()
    return (z[:, :1] - z).square().mean()


class InvarianceObjective(nn.Module):
    """Encoder, projector and loss. Checkpoints hold ``encoder.*`` and ``projector.*``."""

    def __init__(
        self, *, encoder: VisionTransformer, projector: Projector, sigreg: SigReg, sigreg_weight: float
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.sigreg = sigreg
        self.sigreg_weight = sigreg_weight

    def forward_train_batch(self, batch: list[ViewChunk], *, micro_step: int) -> StepOutput:
        """Loss of one rank's micro-step: consecutive chunks of its B clips, global number ``micro_step``.

        With several chunks the encoder holds one chunk's activations at a time: each chunk is run again in
        the backward pass from its kept patches. Projector, BatchNorm and SIGReg see all B clips together, so
        the chunking changes memory and no result.
        """
        if len(batch) == 1:
            summaries = self._encode(*_flatten(batch[0]))
        else:
            summaries = torch.cat([self._recomputed(chunk) for chunk in batch])
        z = self.projector(summaries)
        invariance = invariance_loss(z)
        sigreg = self.sigreg(z.transpose(0, 1), micro_step=micro_step)
        groups = [group for chunk in batch for group in (chunk.views_global, chunk.views_local)]
        return StepOutput(
            loss=invariance + self.sigreg_weight * sigreg,
            parts={"invariance": invariance.detach(), "sigreg": sigreg.detach()},
            embeddings=z[:, 0].detach(),
            features=summaries[:, 0].detach(),
            clips=summaries.shape[0],
            tokens=sum(g.patches.shape[0] * (1 + g.patches.shape[1]) for g in groups),
        )

    def _recomputed(self, chunk: ViewChunk) -> Tensor:
        """``_encode`` whose activations are dropped, and made again in the backward pass."""
        # Nothing in the encoder is random: the second run equals the first without saved generator states.
        summaries: Tensor = checkpoint(self._encode, *_flatten(chunk), use_reentrant=False, preserve_rng_state=False)
        return summaries

    def _encode(
        self, patches_global: Tensor, positions_global: Tensor, patches_local: Tensor, positions_local: Tensor
    ) -> Tensor:
        """One chunk's [CLS] outputs ``[b, V+1, D]``, global view first."""
        b, locals_ = patches_global.shape[0], patches_local.shape[0]
        assert locals_ % b == 0, (b, locals_)
        groups = [TokenGroup(patches_global, positions_global)]
        if locals_:
            groups.append(TokenGroup(patches_local, positions_local))
        views = [x.view(b, -1, x.shape[-1]) for x in self.encoder.summarise_groups(groups)]
        return torch.cat(views, dim=1)


def _flatten(chunk: ViewChunk) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors of a chunk, one by one: what activation checkpointing keeps."""
    return *chunk.views_global, *chunk.views_local
