"""One predicate, three kernels: segments and tiles against the dense definition."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from marey.batching.attention import dense_attention, isolated_attention
from marey.batching.flex import TILE, block_mask, tile_pairs, tile_table
from marey.batching.layout import program_labels, video_layout
from marey.batching.segments import segment, sequence_units
from marey.batching.visibility import UNBOUNDED, Labels, may_see, visibility_matrix

CPU = torch.device("cpu")


def layout_of(
    lengths,
    *,
    prefixes=None,
    capacity=None,
    mode="packed",
    tokens=2,
    text_lengths=None,
    chunk=None,
    noisy=None,
    reach=None,
):
    capacity = capacity or max(lengths)
    time = torch.arange(capacity)
    valid = time < torch.tensor(lengths).unsqueeze(1)
    if chunk is None:
        chunk = torch.zeros_like(valid) if prefixes is None else time >= torch.tensor(prefixes).unsqueeze(1)
    labels = program_labels(
        valid,
        chunk=chunk,
        noisy=torch.zeros_like(valid) if noisy is None else noisy,
        reach=torch.full((len(lengths),), UNBOUNDED) if reach is None else reach,
    )
    return video_layout(labels, mode=mode, tokens_per_position=tokens, text_lengths=text_lengths, device=CPU)


def qkv(layout, heads=2, channels=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    counts = (len(layout.query_labels.sample), len(layout.key_labels.sample), len(layout.key_labels.sample))
    return [torch.randn(n, heads, channels, generator=g, dtype=torch.float64).requires_grad_() for n in counts]


def compare_with_dense(layout):
    own, reference = qkv(layout), qkv(layout)
    out, expected = isolated_attention(*own, layout), dense_attention(*reference, layout)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(own, reference, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)


geometries = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    geometry=geometries,
    mode=st.sampled_from(["padded", "packed"]),
    causal=st.booleans(),
    extra=st.integers(0, 2),
    tokens=st.integers(1, 3),
)
def test_segments_equal_the_dense_definition(geometry, mode, causal, extra, tokens):
    prefixes = [p for p, _, _ in geometry]
    lengths = [p + f for p, f, _ in geometry]
    layout = layout_of(
        lengths,
        prefixes=prefixes if causal else None,
        capacity=max(lengths) + extra,
        mode=mode,
        tokens=tokens,
        text_lengths=[words for _, _, words in geometry],
    )
    compare_with_dense(layout.attention)
    compare_with_dense(layout.cross)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), samples=st.integers(1, 3), frames=st.integers(1, 6))
def test_segments_equal_the_dense_definition_for_two_streams(data, samples, frames):
    sizes = torch.tensor([data.draw(st.integers(1, 4)) for _ in range(samples)]).unsqueeze(1)
    own = torch.arange(frames) // sizes + 1
    layout = layout_of(
        [1 + 2 * frames] * samples,
        mode="strict",
        chunk=torch.cat((torch.zeros_like(sizes), own, own), dim=1),
        noisy=(torch.arange(1 + 2 * frames) > frames).expand(samples, -1),
        reach=torch.tensor([data.draw(st.integers(1, 4)) for _ in range(samples)]),
    )
    compare_with_dense(layout.attention)
    assert layout.attention.needed_pairs == layout.attention.computed_pairs


def test_queries_that_see_nothing_get_zero():
    """A noisy frame of chunk 0 among clean ones of chunk 0 and 3: no key, and no NaN either."""
    chunk, seen_from = torch.tensor([3, 0, 3], dtype=torch.int32), torch.tensor([False, True, False])
    keys = Labels(
        sample=torch.zeros(3, dtype=torch.int32),
        valid=torch.ones(3, dtype=torch.bool),
        chunk=chunk,
        noisy=torch.zeros(3, dtype=torch.bool),
        reach=torch.full((3,), UNBOUNDED, dtype=torch.int32),
    )
    layout = segment(sequence_units(keys._replace(noisy=seen_from), 2, [3]), sequence_units(keys, 2, [3]))
    out = isolated_attention(*qkv(layout), layout)
    assert not bool(out[2:4].any())
    assert bool(out[:2].all())
    compare_with_dense(layout)


def test_the_predicate_is_own_sample_valid_key_program():
    def one(sample=0, valid=True, chunk=0, noisy=False, reach=UNBOUNDED):
        return Labels(*(torch.tensor(v) for v in (sample, valid, chunk, noisy, reach)))

    assert may_see(one(), one())
    assert not may_see(one(), one(sample=1))
    assert not may_see(one(sample=-1), one(sample=-1))
    assert not may_see(one(), one(valid=False))
    assert may_see(one(valid=False), one())
    assert may_see(one(chunk=2), one(chunk=1))
    assert not may_see(one(chunk=1), one(chunk=2))
    assert not may_see(one(chunk=9, reach=3), one(chunk=5))
    assert may_see(one(chunk=8, reach=3), one(chunk=5))
    assert may_see(one(chunk=1, noisy=True), one(chunk=1, noisy=True))
    assert not may_see(one(chunk=1, noisy=True), one(chunk=1))
    assert not may_see(one(chunk=1), one(chunk=1, noisy=True))
    assert not may_see(one(chunk=2, noisy=True), one(chunk=1, noisy=True))


@pytest.mark.parametrize("tokens", [1, 50, 128, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_hold_every_visible_pair_and_whole_tiles_nothing_else(tokens, causal):
    lengths, prefixes, words = [3, 5, 2, 7], [1, 2, 1, 3], [90, 7, 200, 128]
    layout = layout_of(lengths, prefixes=prefixes if causal else None, tokens=tokens, text_lengths=words)
    for attention in (layout.attention, layout.cross):
        seen = visibility_matrix(attention.query_labels, attention.key_labels)
        q, k = (-(-n // TILE) for n in seen.shape)
        padded = torch.zeros(q * TILE, k * TILE, dtype=torch.bool)
        padded[: seen.shape[0], : seen.shape[1]] = seen
        blocks = padded.reshape(q, TILE, k, TILE).transpose(1, 2).flatten(2)
        tiles = tile_table(attention)
        assert torch.equal(tiles.straddling | tiles.visible, blocks.any(-1))
        assert torch.equal(tiles.visible, blocks.all(-1))
        assert tile_pairs(attention) == int(blocks.any(-1).sum()) * TILE**2
        assert tile_pairs(attention) >= attention.needed_pairs


def test_straddling_tiles_cost_under_five_percent_on_long_samples():
    lengths = [20, 33, 48, 64]
    layout = layout_of(lengths, tokens=256).attention
    assert tile_pairs(layout) / layout.needed_pairs < 1.05


def test_flex_attention_reads_the_tiles_as_the_dense_definition_does():
    """Uncompiled, on a CPU and forward only: the mask and its table, not the CUDA kernel."""
    layout = layout_of([3, 5, 2], prefixes=[1, 2, 1], tokens=40, text_lengths=[3, 150, 20])
    for attention in (layout.attention, layout.cross):
        q, k, v = (x.detach().transpose(0, 1).unsqueeze(0) for x in qkv(attention, channels=16))
        mask = block_mask(attention, CPU)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.compile.*")
            out = flex_attention(q, k, v, block_mask=mask)
        expected = dense_attention(*(x.squeeze(0).transpose(0, 1) for x in (q, k, v)), attention)
        torch.testing.assert_close(out.squeeze(0).transpose(0, 1), expected, rtol=0, atol=1e-10)
        tiles = tile_table(attention)
        assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.straddling | tiles.visible)


def test_packed_computes_no_pair_that_is_not_needed():
    for causal in (None, [1, 2, 1]):
        layout = layout_of([3, 5, 2], prefixes=causal, tokens=4, text_lengths=[3, 1, 2])
        assert layout.attention.computed_pairs == layout.attention.needed_pairs
        assert layout.cross.computed_pairs == layout.cross.needed_pairs


def test_equal_sequences_share_one_call_wherever_they_stood_in_the_batch():
    layout = layout_of([3, 5, 3, 5, 3], tokens=2, text_lengths=[1, 2, 1, 2, 1])
    assert [group.samples for group in layout.attention.groups] == [3, 2]
    assert [group.samples for group in layout.cross.groups] == [3, 2]
