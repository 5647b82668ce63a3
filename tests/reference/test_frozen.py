"""The numbers of the causal program stay what they were, in every mode."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.reference.make_frozen import ALIGNMENTS, evaluate, frozen_file

EXACT = ("latents", "frame_mask", "supervised", "positions", "inputs", "levels", "targets", "generator")


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("mode", ["padded", "bucket", "packed"])
def test_every_mode_reproduces_the_frozen_numbers(mode, alignment):
    frozen, now = load_file(frozen_file(alignment)), evaluate(mode, alignment)
    assert frozen.keys() == now.keys()
    for name, expected in frozen.items():
        assert now[name].shape == expected.shape, name
        assert now[name].dtype == expected.dtype, name
        if name in EXACT:
            assert torch.equal(now[name], expected), name
        else:
            torch.testing.assert_close(now[name], expected, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_the_frozen_numbers_say_something(alignment):
    """Every parameter has a gradient worth comparing, and took a step."""
    frozen = load_file(frozen_file(alignment))
    gradients = [value for name, value in frozen.items() if name.startswith("gradient.")]
    assert len(gradients) > 40
    assert all(float(gradient.abs().max()) > 1e-4 for gradient in gradients)
    assert frozen["latents"].shape[2] == {1: 5, 4: 8}[alignment]
