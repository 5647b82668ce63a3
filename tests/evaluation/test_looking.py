from __future__ import annotations

import pytest
import torch

from marey.core.errors import UserError
from marey.evaluation.looking import cls_attention, look
from tests.models.samples import encoder


@pytest.mark.parametrize("changes", [{"attn_mode": "full"}, {"rope_layout": "rotary"}, {"use_rope": False}])
def test_the_weights_of_the_summary_are_those_that_the_layer_used(changes):
    model = encoder(**changes)
    video = torch.randn(2, 3, 4, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attention = model.blocks[-1].attn
    seen = {}
    hook = attention.register_forward_hook(lambda _m, inputs, output: seen.update(inputs=inputs, output=output))
    with torch.no_grad():
        model(video)
        hook.remove()
        x, layout = seen["inputs"]
        weights = cls_attention(attention, x, layout)
        length = weights.shape[-1]
        values = attention.qkv(x).view(2, length, 3, model.num_heads, -1)[:, :, 2]
        gathered = torch.einsum("nhl,nlhd->nhd", weights, values).flatten(1)
        expected = seen["output"].view(2, length, -1)[:, 0]
        assert (attention.proj(gathered) - expected).abs().max() < 1e-12
    assert weights.shape == (2, model.num_heads, 1 + 4 * 2 * 3)
    assert (weights.sum(dim=-1) - 1).abs().max() < 1e-12


def test_a_look_is_the_encoders_own_output_in_its_places():
    model = encoder(tubelet_size=2)
    video = torch.randn(3, 3, 4, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made = look(model, video)
    with torch.no_grad():
        tokens = model(video).float()
    assert torch.equal(made.summary, tokens[:, 0])
    assert made.patches.shape == (3, 2, 2, 3, model.embed_dim)
    assert torch.equal(made.patches[:, 1, 0, 2], tokens[:, 1 + 6 + 2])
    assert made.attention.shape == (3, model.num_heads, 2, 2, 3)
    assert (made.attention.sum(dim=(2, 3, 4)) + made.to_itself - 1).abs().max() < 1e-6
    assert not model.blocks[-1].attn._forward_pre_hooks


def test_outputs_that_are_not_finite_are_refused_and_leave_no_hook():
    model = encoder()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        look(model, torch.zeros(1, 3, 4, 16, 16, dtype=torch.float64))
    assert not model.blocks[-1].attn._forward_pre_hooks
