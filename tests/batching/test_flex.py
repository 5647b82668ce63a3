"""The CUDA kernel's tiles, masks and compilation, as far as a CPU can show them: forward, uncompiled or traced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from marey.batching import flex
from marey.batching.attention import dense_attention
from marey.batching.flex import (
    COMPILATION,
    TILE,
    cached_mask,
    compiled_attention,
    flex_isolated_attention,
    heads_first,
    padded_attention,
    padded_head,
    tile_table,
)
from marey.batching.visibility import visibility_matrix
from marey.core.errors import UserError

from .test_attention import CPU, layout_of, qkv


def operands(layout, *, channels=16, dtype=torch.float32, heads=2):
    return [x.detach().to(dtype) for x in qkv(layout, heads=heads, channels=channels)]


@pytest.fixture
def eager(monkeypatch):
    """The kernel's own definition in place of the kernel, which a CPU cannot run."""

    def attend(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.compile.*")
            return padded_attention(*arguments)

    monkeypatch.setattr(flex, "compiled_attention", lambda: attend)


@pytest.fixture
def traced(monkeypatch):
    """The kernel compiled as in training, up to the code generator: a list with one entry a compilation."""
    made: list[int] = []

    def backend(graph, inputs):
        made.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(padded_attention, backend=backend, **COMPILATION)
    monkeypatch.setattr(flex, "compiled_attention", lambda: compiled)
    yield made
    torch._dynamo.reset()


@pytest.mark.parametrize("channels", [6, 16, 40])
def test_heads_of_any_even_width_are_attended_to_as_they_are(eager, channels):
    layout = layout_of([3, 5, 2], prefixes=[1, 2, 1], tokens=40, text_lengths=[3, 150, 20])
    for attention in (layout.attention, layout.cross):
        q, k, v = operands(attention, channels=channels)
        out = flex_isolated_attention(q, k, v, attention)
        assert out.shape == q.shape
        torch.testing.assert_close(out.double(), dense_attention(q, k, v, attention), rtol=0, atol=2e-6)


def test_the_kernel_is_given_powers_of_two():
    assert [padded_head(n) for n in (2, 16, 18, 32, 80, 96, 128, 130)] == [16, 16, 32, 32, 128, 128, 128, 256]
    assert all(padded_head(n) == n for n in (16, 32, 64, 128, 256))


def test_queries_that_see_nothing_get_zero(eager):
    layout = layout_of([2, 3], capacity=4, mode="padded", tokens=5).attention
    q, k, v = operands(layout)
    out = flex_isolated_attention(q, k, v, layout)
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, layout), rtol=0, atol=2e-6)


def test_float64_is_refused_in_a_sentence():
    layout = layout_of([2, 3], tokens=5).attention
    with pytest.raises(UserError, match="float64"):
        flex_isolated_attention(*operands(layout, dtype=torch.float64), layout)


BATCHES = [([3, 9, 4], [140, 20, 3]), ([7, 8], [60, 75]), ([4, 4, 5, 6, 9], [100, 1, 100, 4, 9]), ([9], [131])]


def test_batches_of_other_lengths_compile_nothing_new(traced):
    counts = []
    for lengths, words in BATCHES:
        layout = layout_of(lengths, prefixes=[1] * len(lengths), tokens=40, text_lengths=words)
        for attention in (layout.attention, layout.cross):
            q, k, v = operands(attention)
            out = flex_isolated_attention(q, k, v, attention)
            torch.testing.assert_close(out.double(), dense_attention(q, k, v, attention), rtol=0, atol=2e-6)
        counts.append(len(traced))
    # Queries that are their own keys, and video asking text.
    assert counts == [2, 2, 2, 2]


def test_a_family_beyond_the_limit_is_an_error_and_not_the_eager_version(traced):
    layout = layout_of([3, 9, 4], tokens=40).attention
    with torch._dynamo.config.patch(recompile_limit=1):
        flex_isolated_attention(*operands(layout), layout)
        with pytest.raises(FailOnRecompileLimitHit):
            flex_isolated_attention(*operands(layout, heads=3), layout)


def test_the_limit_on_variants_holds_more_than_one_models_families():
    compiled_attention()
    assert torch._dynamo.config.recompile_limit >= flex.VARIANTS


def test_one_layout_is_masked_once(monkeypatch):
    made = []
    original = flex.block_mask
    monkeypatch.setattr(flex, "block_mask", lambda *a: made.append(a) or original(*a))
    layout = layout_of([3, 5], tokens=40).attention
    assert cached_mask(layout, CPU) is cached_mask(layout, CPU)
    assert len(made) == 1


def test_heads_come_first_without_a_copy():
    (q,) = heads_first(torch.randn(5, 3, 4))
    assert q.shape == (1, 3, 5, 4)
    assert q.stride()[1:] == (4, 12, 1)


@pytest.mark.parametrize("mode", ["padded", "packed"])
@pytest.mark.parametrize("tokens", [1, 37, 128])
def test_tiles_are_those_of_the_whole_matrix_though_only_sequences_are_looked_at(monkeypatch, mode, tokens):
    asked = []

    def looking(queries, keys):
        asked.append(len(queries.sample) * len(keys.sample))
        return visibility_matrix(queries, keys)

    lengths, words = [3, 5, 2, 7, 1], [90, 7, 200, 128, 300]
    layout = layout_of(lengths, prefixes=[1, 2, 1, 3, 0], capacity=9, mode=mode, tokens=tokens, text_lengths=words)
    monkeypatch.setattr(flex, "visibility_matrix", looking)
    for attention in (layout.attention, layout.cross):
        asked.clear()
        tiles = tile_table(attention)
        owned = zip(attention.queries.per_sequence, attention.keys.per_sequence, strict=True)
        assert asked == [nq * nk for nq, nk in owned]
        seen = visibility_matrix(attention.query_labels, attention.key_labels)
        q, k = (-(-n // TILE) for n in seen.shape)
        padded = torch.zeros(q * TILE, k * TILE, dtype=torch.bool)
        padded[: seen.shape[0], : seen.shape[1]] = seen
        blocks = padded.reshape(q, TILE, k, TILE).transpose(1, 2).flatten(2)
        assert torch.equal(tiles.straddling | tiles.visible, blocks.any(-1))
        assert torch.equal(tiles.visible, blocks.all(-1))
