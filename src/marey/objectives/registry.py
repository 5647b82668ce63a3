"""From a configuration to its objective, and what the two sets of weights in a checkpoint are."""

from __future__ import annotations

from torch import nn

from marey.config.schema import EncoderConfig
from marey.models.projector import build_projector
from marey.models.vit import build_encoder
from marey.objectives.invariance import InvarianceObjective
from marey.objectives.sigreg import SigReg

summary_keys: dict[str, str] = {
    "state_dict": "the weights that training updates (encoder.*, projector.*): resume or fine-tune these",
    "state_dict_ema": "a slow average of the encoder's weights alone (encoder.*), never part of the loss: "
    "evaluate and release these",
}
"""Checkpoint key -> what it is for, in one sentence."""


def _invariance(config: EncoderConfig) -> InvarianceObjective:
    encoder = build_encoder(config.model, seed=config.seed)
    return InvarianceObjective(
        encoder=encoder,
        projector=build_projector(config.projector, width=encoder.embed_dim, seed=config.seed),
        sigreg=SigReg(config.loss.sigreg.kwargs, seed=config.seed),
        sigreg_weight=config.loss.sigreg.weight,
    )


OBJECTIVES = {"invariance": _invariance}


def build(config: EncoderConfig) -> nn.Module:
    """The objective that ``config.objective`` names, weights initialised from ``config.seed``."""
    return OBJECTIVES[config.objective](config)
