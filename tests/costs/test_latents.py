"""What one training step on latent video computes, counted: attention pairs, layer calls, angles, FLOPs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from marey.batching.transport import LatentBatch, Mode
from marey.objectives.chunked_conditioned import ChunkedConditionedObjective
from marey.objectives.video_program import ProgramSettings, VideoProgram
from marey.training.kinds.causal import CausalKind
from marey.training.plan import plan_text
from tests.costs.counting import Calls, Elements, Product, product_flops
from tests.objectives.latent_cases import (
    CHANNELS,
    SIDE,
    TEXT_CHANNELS,
    batch_of,
    make_model,
    make_objective,
    make_sample,
    make_samples,
)
from tests.training.latent_runs import SMALL, load, one_source

DEPTH, WIDTH, HEADS = 2, 24, 2
S = (SIDE // 2) ** 2
"""Tokens of a frame."""
PATCH = CHANNELS * 4
TIME_WAVE = 256


def watched(program: VideoProgram, batch: LatentBatch) -> tuple[Calls, int]:
    """One step, forward and backward; with the self-attention pairs that it says it computed."""
    with Calls(program) as calls:
        out = program.forward_train_batch(batch, micro_step=0)
        out.loss.backward()
    return calls, out.pairs_seen


def frame_pairs(prefix: int, frames: int, visibility: str) -> int:
    """Pairs of frames of one sample that see each other."""
    return frames**2 if visibility == "full" else prefix**2 + (frames - prefix) * frames


@pytest.mark.parametrize("visibility", ["full", "prefix_causal"])
def test_packed_attention_computes_the_pairs_inside_each_sample_and_no_other(visibility: str) -> None:
    batch = batch_of(make_samples(6))
    calls, claimed = watched(make_objective("packed", visibility=visibility), batch)
    own = sum(S**2 * frame_pairs(p, n, visibility) for p, n in zip(batch.prefixes, batch.lengths, strict=True))
    assert batch.text_lengths is not None
    text = sum(S * n * words for n, words in zip(batch.lengths, batch.text_lengths, strict=True))
    assert claimed == own
    assert calls.pairs == DEPTH * (own + text)


def test_padded_attention_computes_every_sample_at_the_length_of_the_longest() -> None:
    batch = batch_of(make_samples(6))
    calls, claimed = watched(make_objective("padded"), batch)
    longest = S * max(batch.lengths)
    assert batch.text_lengths is not None
    assert claimed == 6 * longest**2
    assert calls.pairs == DEPTH * (6 * longest**2 + longest * sum(batch.text_lengths))


def test_samples_of_equal_shape_share_their_attention_calls() -> None:
    samples = [make_sample(i, 2, 2 + i % 2, words=3) for i in range(6)]
    calls, _ = watched(make_objective("packed"), batch_of(samples))
    assert [call.sequences for call in calls.attended] == [3, 3, 3, 3] * DEPTH


def test_chunked_attention_computes_what_the_streams_may_see_and_no_other() -> None:
    frames = 5
    samples = []
    for i in range(3):
        condition = make_sample(9 + i, 1, 1).video_latents[:, :1]
        samples.append(make_sample(i, 1, frames - 1, words=2, condition_latent=condition))
    batch = batch_of(samples, "strict")
    program = ChunkedConditionedObjective(make_model(), ProgramSettings(mode="strict", seed=3), windows=(1, 2))
    calls, claimed = watched(program, batch)
    pairs = 0
    for b in range(3):
        size, window, _ = program.geometry(batch, b)
        clean = [0] + [f // size + 1 for f in range(frames)]
        noisy = clean[1:]
        pairs += sum(0 <= q - k <= window for q in clean for k in clean)
        pairs += sum(0 < q - k <= window for q in noisy for k in clean)
        pairs += sum(q == k for q in noisy for k in noisy)
    assert claimed == S**2 * pairs
    assert calls.pairs == DEPTH * (S**2 * pairs + 3 * S * (1 + 2 * frames) * 2)


def test_a_token_budget_computes_every_layer_twice_for_each_chunk_and_no_token_more() -> None:
    batch = batch_of(make_samples(6))
    budget = 12 * S
    calls, _ = watched(make_objective("packed", max_tokens=budget), batch)
    tokens = S * sum(batch.lengths)
    chunks = len(calls.products["model.patch_embed.weight"]) // 2
    assert -(-tokens // budget) <= chunks < 6
    for name, products in calls.products.items():
        assert len(products) == 2 * chunks, name  # and once more in the backward pass
    for block in range(DEPTH):
        for layer, outputs in (("attn.qkv", 3), ("attn.proj", 1), ("cross.q", 1), ("mlp.fc1", 4), ("mlp.fc2", 1)):
            products = calls.products[f"model.blocks.{block}.{layer}.weight"]
            assert sum(rows for rows, _ in products) == 2 * tokens
            assert max(rows for rows, _ in products) <= budget
            assert {width for _, width in products} == {outputs * WIDTH}
        # Time belongs to a frame: its tokens read one row of modulation together.
        modulation = calls.products[f"model.blocks.{block}.modulation.weight"]
        assert sum(rows for rows, _ in modulation) == 2 * sum(batch.lengths)
        assert {width for _, width in modulation} == {6 * WIDTH}


def test_packed_shows_no_layer_a_token_or_a_frame_of_padding() -> None:
    batch = batch_of(make_samples(6), multiple=5)
    assert batch.capacity == 10
    calls, _ = watched(make_objective("packed"), batch)
    frames = sum(batch.lengths)
    assert batch.text_lengths is not None
    words = sum(batch.text_lengths)
    block = {
        "modulation": Product(frames, 6 * WIDTH),
        "attn.qkv": Product(S * frames, 3 * WIDTH),
        "attn.proj": Product(S * frames, WIDTH),
        "cross.q": Product(S * frames, WIDTH),
        "cross.kv": Product(words, 2 * WIDTH),
        "cross.proj": Product(S * frames, WIDTH),
        "mlp.fc1": Product(S * frames, 4 * WIDTH),
        "mlp.fc2": Product(S * frames, WIDTH),
    }
    expected = {
        "patch_embed": Product(S * frames, WIDTH),
        "time_embed.fc1": Product(frames, WIDTH),
        "time_embed.fc2": Product(frames, WIDTH),
        "text_embed": Product(words, WIDTH),
        "final.modulation": Product(frames, 2 * WIDTH),
        "final.proj": Product(S * frames, PATCH),
        **{f"blocks.{i}.{name}": product for i in range(DEPTH) for name, product in block.items()},
    }
    assert calls.products == {f"model.{name}.weight": [product] for name, product in expected.items()}


@pytest.mark.parametrize(("mode", "frames"), [("packed", 32), ("padded", 48)])
def test_rotary_factors_are_made_once_for_all_layers(mode: Mode, frames: int) -> None:
    batch = batch_of(make_samples(6))
    with Elements("polar") as factors:
        make_objective(mode).forward_train_batch(batch, micro_step=0).loss.backward()
    # One for each token and pair of channels of one head.
    assert (sum(batch.lengths), 6 * batch.capacity) == (32, 48)
    assert factors.counts == {"polar": S * frames * WIDTH // HEADS // 2}


def by_frame(frames: int, *, width: int, depth: int) -> int:
    """FLOPs, forward and backward, of what noise levels pass through; the wave itself has no gradient."""
    embedding = 2 * (2 * frames * TIME_WAVE * width) + 3 * (2 * frames * width**2)
    return embedding + 3 * 2 * frames * (6 * depth + 2) * width**2


def test_the_flops_of_a_packed_step_are_its_products() -> None:
    batch = batch_of(make_samples(6))
    program = make_objective("packed")
    measured = product_flops(lambda: program.forward_train_batch(batch, micro_step=0).loss)
    assert batch.text_lengths is not None
    tokens, words = S * sum(batch.lengths), sum(batch.text_lengths)
    pairs = sum((S * n) ** 2 + S * n * m for n, m in zip(batch.lengths, batch.text_lengths, strict=True))
    block = 2 * tokens * (4 + 2 + 8) * WIDTH**2 + 2 * words * 2 * WIDTH**2 + 2 * 2 * pairs * WIDTH
    # Latents and texts are given: there is a gradient for the weights that read them, none for themselves.
    inputs = 2 * (2 * tokens * PATCH * WIDTH + 2 * words * TEXT_CHANNELS * WIDTH)
    outputs = 3 * 2 * tokens * WIDTH * PATCH
    assert measured == by_frame(sum(batch.lengths), width=WIDTH, depth=DEPTH) + inputs + 3 * DEPTH * block + outputs


@pytest.mark.parametrize("mode", ["packed", "bucket"])
def test_the_flops_of_an_epoch_are_those_of_the_forecast(mode: Mode, tmp_path: Path) -> None:
    """But for what a forecast leaves out (products by frame) and counts without need (a gradient for the latents)."""
    overrides = [*one_source(tmp_path), f"data.batching.mode={mode}", "data.train_batch_size=4"]
    said = plan_text([*SMALL, *overrides], config_name="causal_video")
    planned = re.search(r"compute +([\d.e+-]+) TFLOP per optimizer step", said)
    shown = re.search(r"tokens +([\d,]+) video tokens seen per optimizer step", said)
    assert planned is not None
    assert shown is not None
    kind = CausalKind(load(*overrides), validates=False)
    program = kind.objective()
    assert isinstance(program, VideoProgram)
    steps = flops = tokens = 0
    for step, read in enumerate(kind.train_loader(pin_memory=False)):

        def loss(batch: LatentBatch = read.batch, step: int = step) -> torch.Tensor:
            return program.forward_train_batch(batch, micro_step=step).loss

        flops += product_flops(loss)
        tokens += program.forward_train_batch(read.batch, micro_step=step).tokens_seen
        steps += 1
    assert steps == kind.plan.micro_steps_per_epoch > 4
    frames, width = tokens // S, program.model.size.width
    forecast = flops - by_frame(frames, width=width, depth=1) + 2 * tokens * PATCH * width
    assert float(shown[1].replace(",", "")) == pytest.approx(tokens / steps, abs=0.51)
    assert float(planned[1]) * 1e12 == pytest.approx(forecast / steps, rel=0.005)  # told to three digits
