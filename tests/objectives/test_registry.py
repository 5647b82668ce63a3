from __future__ import annotations

import torch

from marey.config.compose import load_config
from marey.objectives.invariance import InvarianceObjective
from marey.objectives.registry import build, summary_keys

SMALL = ["model.name=vit_nano", "projector.hidden_dim=32", "projector.output_dim=8", "seed=5"]


def test_a_configuration_builds_its_objective_from_its_seed() -> None:
    objective = build(load_config([*SMALL, "model.attn_mode=full", "loss.sigreg.weight=0.5"]))
    assert isinstance(objective, InvarianceObjective)
    assert (objective.encoder.embed_dim, objective.encoder.attn_mode) == (128, "full")
    assert objective.projector.fc2.out_features == 8
    assert (objective.sigreg_weight, objective.sigreg.seed) == (0.5, 5)
    again, other = build(load_config(SMALL)), build(load_config([*SMALL[:3], "seed=6"]))
    state = objective.state_dict()
    assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
    assert not torch.equal(state["encoder.cls_token"], other.state_dict()["encoder.cls_token"])


def test_each_checkpoint_key_is_explained_in_one_sentence() -> None:
    assert list(summary_keys) == ["state_dict", "state_dict_ema"]
    assert all(text and "\n" not in text for text in summary_keys.values())
