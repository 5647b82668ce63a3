"""Collation: what shares a batch, what is refused by name, and the way to the flat layout and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.batching.budget import cut_by_tokens, refuse_over_budget
from marey.batching.layout import program_labels, video_layout
from marey.batching.transport import collate
from marey.batching.visibility import UNBOUNDED
from marey.core.errors import UserError
from marey.core.latents import Identity, LatentSample


def sample(name, prefix, future, *, canvas=(4, 4), channels=2, **fields):
    frames = prefix + future
    latents = torch.arange(1.0, 1 + channels * frames * canvas[0] * canvas[1]).reshape(channels, frames, *canvas)
    return LatentSample(
        **{
            "video_latents": latents,
            "prefix_frames": prefix,
            "future_frames": future,
            "frame_positions": torch.arange(frames) + 1,
            "identity": Identity("s", name, name, 3),
            "length_hint": frames,
            **fields,
        }
    )


@pytest.mark.parametrize("mode", ["padded", "bucket", "packed"])
@pytest.mark.parametrize(("multiple", "capacity"), [(1, 5), (4, 8), (5, 5)])
def test_a_batch_holds_every_sample_and_zeros(mode, multiple, capacity):
    samples = [sample("a", 1, 2), sample("b", 2, 3, epoch=4, position=9, repeat=1)]
    batch = collate(samples, mode=mode, pad_to_multiple_of=multiple)
    assert batch.latents.shape == (2, 2, capacity, 4, 4)
    assert batch.capacity == capacity
    for row, own in zip(batch.latents, samples, strict=True):
        assert torch.equal(row[:, : own.valid_frames], own.video_latents)
        assert not bool(row[:, own.valid_frames :].any())
    assert batch.frame_mask.sum(1).tolist() == [3, 5]
    assert batch.future_mask[:, :5].tolist() == [[False, True, True, False, False], [False, False, True, True, True]]
    assert batch.frame_positions[0].tolist() == [1, 2, 3] + [0] * (capacity - 3)
    assert (batch.lengths, batch.prefixes) == ((3, 5), (1, 2))
    assert batch.draws == ((0, 0, 0), (4, 9, 1))
    assert [identity.clip_id for identity in batch.identities] == ["a", "b"]


def test_strict_pads_nothing_whatever_the_alignment():
    batch = collate([sample("a", 1, 2), sample("b", 2, 1)], mode="strict", pad_to_multiple_of=8)
    assert batch.capacity == 3


def test_stored_half_precision_is_computed_in_float32_and_double_stays():
    half = sample("a", 1, 2).video_latents.bfloat16()
    assert collate([sample("a", 1, 2, video_latents=half)], mode="packed").latents.dtype == torch.float32
    double = sample("a", 1, 2).video_latents.double()
    assert collate([sample("a", 1, 2, video_latents=double)], mode="packed").latents.dtype == torch.float64


def test_texts_keep_their_own_lengths():
    batch = collate([sample("a", 1, 2, text=torch.ones(3, 5)), sample("b", 1, 1, text=torch.ones(1, 5))], mode="packed")
    assert batch.text_lengths == (3, 1)
    assert batch.text.sum(dim=(1, 2)).tolist() == [15, 5]


def refusals():
    text, condition = torch.ones(2, 5), torch.ones(2, 1, 4, 4)
    a, b = sample("a", 1, 2), sample("b", 2, 3)
    nan = a.video_latents.clone()
    nan[0, 0, 0, 0] = torch.nan
    inf = text.clone()
    inf[1, 1] = torch.inf
    return {
        "unequal, strict": ([a, b], "strict", r"s/a@3 has latents \[2, 3, 4, 4\] and s/b@3 has \[2, 5, 4, 4\]"),
        "canvas, strict": ([a, sample("b", 1, 2, canvas=(4, 6))], "strict", r"s/a@3.*s/b@3"),
        "canvas, packed": (
            [a, sample("b", 2, 2, canvas=(4, 6))],
            "packed",
            r"s/a@3 has H x W 4 x 4 and s/b@3 has 4 x 6.*shape_bucketed_batching=true.*train_batch_size=1",
        ),
        "channels": ([a, sample("b", 1, 2, channels=3)], "padded", r"s/a@3 has 2 and s/b@3 has 3"),
        "text in one": ([a, sample("b", 1, 2, text=text)], "packed", r"text must be.*s/b@3 has it and s/a@3 has not"),
        "condition in one": (
            [sample("a", 1, 2, condition_latent=condition), b],
            "padded",
            r"condition_latent must be.*s/a@3 has it and s/b@3 has not",
        ),
        "text channels": (
            [sample("a", 1, 2, text=text), sample("b", 1, 2, text=torch.ones(1, 6))],
            "packed",
            r"s/a@3 has 5 and s/b@3 has 6",
        ),
        "nan latents": ([b, sample("a", 1, 2, video_latents=nan)], "packed", r"video_latents of s/a@3 holds 1 values"),
        "infinite text": ([sample("a", 1, 2, text=inf)], "strict", r"text of s/a@3 holds 1 values"),
        "nan condition": (
            [sample("a", 1, 2, condition_latent=condition * torch.nan)],
            "strict",
            r"condition_latent of s/a@3 holds 32 values",
        ),
    }


@pytest.mark.parametrize("name", list(refusals()))
def test_what_cannot_share_a_batch_is_refused_by_name(name):
    samples, mode, message = refusals()[name]
    with pytest.raises(UserError, match=message) as refused:
        collate(samples, mode=mode)
    assert "\n" not in str(refused.value)


def test_a_part_of_a_batch_keeps_the_capacity():
    samples = [sample(str(i), 1, 1 + i, text=torch.ones(1 + i, 5)) for i in range(4)]
    batch = collate(samples, mode="packed")
    part = batch.part(1, 3)
    assert (len(part), part.capacity, part.lengths, part.text_lengths) == (2, 5, (3, 4), (2, 3))
    assert torch.equal(part.latents, batch.latents[1:3])


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), extra=st.integers(0, 2))
def test_gather_then_scatter_returns_valid_positions_and_zeros(lengths, extra):
    capacity = max(lengths) + extra
    valid = torch.arange(capacity) < torch.tensor(lengths).unsqueeze(1)
    labels = program_labels(
        valid,
        chunk=torch.zeros_like(valid),
        noisy=torch.zeros_like(valid),
        reach=torch.full((len(lengths),), UNBOUNDED),
    )
    x = torch.rand(len(lengths), capacity, 3) + 1
    for mode in ("packed", "padded"):
        layout = video_layout(labels, mode=mode, tokens_per_position=4, text_lengths=None, device=torch.device("cpu"))
        back = layout.scatter(layout.gather(x))
        kept = valid if mode == "packed" else torch.ones_like(valid)
        assert torch.equal(back, x * kept.unsqueeze(-1))
        assert layout.tokens == 4 * int(kept.sum())
        assert layout.valid_tokens == 4 * sum(lengths)


@given(
    tokens=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    slack=st.integers(0, 30),
    at_least=st.integers(1, 14),
)
def test_chunks_cover_the_batch_in_order_within_the_budget(tokens, slack, at_least):
    budget = max(tokens) + slack
    ranges = cut_by_tokens(tokens, max_tokens=budget, at_least=at_least)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(len(tokens)))
    assert all(sum(tokens[start:stop]) <= budget for start, stop in ranges)
    assert len(ranges) >= min(at_least, len(tokens))
    greedy = cut_by_tokens(tokens, max_tokens=budget)
    assert all(sum(tokens[start : stop + 1]) > budget for start, stop in greedy if stop < len(tokens))
    assert len(ranges) == max(len(greedy), min(at_least, len(tokens)))


def test_a_literal_cut():
    assert cut_by_tokens([4, 4, 8, 2, 2, 2], max_tokens=8) == [(0, 2), (2, 3), (3, 6)]
    assert cut_by_tokens([4, 4, 8], max_tokens=None) == [(0, 3)]
    assert cut_by_tokens([1, 1, 1, 1], max_tokens=9, at_least=3) == [(0, 1), (1, 2), (2, 4)]


def test_a_sample_over_the_budget_is_refused_by_name():
    refuse_over_budget([Identity("s", "a", "a", 0)], [8], max_tokens=8)
    with pytest.raises(UserError, match=r"s/b@0 alone has 9 video tokens.*max_tokens=8"):
        refuse_over_budget([Identity("s", "a", "a", 0), Identity("s", "b", "b", 0)], [8, 9], max_tokens=8)
