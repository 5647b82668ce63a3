from __future__ import annotations

import torch
from torch import nn

from marey.config.compose import load_config
from marey.objectives.registry import build
from marey.training.optimizer import build_adamw, decay_groups


def vit_base() -> nn.Module:
    with torch.device("meta"):
        return build(load_config([]))


def test_vit_base_decays_its_matrices_alone_by_name() -> None:
    decay, keep = decay_groups(vit_base().named_parameters())
    blocks = [f"encoder.blocks.{i}." for i in range(12)]
    matrices = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
    assert sorted(decay) == sorted(
        ["encoder.patch_embed.proj.weight", "projector.fc1.weight", "projector.fc2.weight"]
        + [block + name for block in blocks for name in matrices]
    )
    vectors = (
        "norm1.weight",
        "norm1.bias",
        "norm2.weight",
        "norm2.bias",
        *tuple(name.replace("weight", "bias") for name in matrices),
    )
    assert sorted(keep) == sorted(
        ["encoder.cls_token", "encoder.patch_embed.proj.bias", "encoder.norm.weight", "encoder.norm.bias"]
        + ["projector.fc1.bias", "projector.norm.weight", "projector.norm.bias", "projector.fc2.bias"]
        + [block + name for block in blocks for name in vectors]
    )


def test_a_norm_is_told_by_its_name_whatever_its_shape() -> None:
    odd = [("a.norm1.weight", nn.Parameter(torch.zeros(2, 2))), ("a.normal.weight", nn.Parameter(torch.zeros(2, 2)))]
    assert decay_groups(odd) == (["a.normal.weight"], ["a.norm1.weight"])


def test_decay_is_applied_to_the_first_group_alone() -> None:
    config = load_config([]).optimizer
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = build_adamw(module, config)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.04, 0.0]
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight"],
        ["0.bias", "1.weight", "1.bias"],
    ]
    before = [p.detach().clone() for p in module.parameters()]
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    after = list(module.parameters())
    torch.testing.assert_close(after[0], before[0] * (1 - config.lr * 0.04))
    assert all(torch.equal(a, b) for a, b in zip(after[1:], before[1:], strict=True))


def test_the_rule_can_be_turned_off() -> None:
    config = load_config(["optimizer.exclude_bias_norm=false"]).optimizer
    optimizer = build_adamw(nn.LayerNorm(2), config)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.04]
