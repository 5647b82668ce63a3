"""What one training step of the encoder computes, counted: tokens, layer calls, rows, angles, pairs, FLOPs.

Everything is at the published geometry (16 frames; a global view of 224 pixels and ten local ones of 96; 95% of the
tokens dropped) with the smallest encoder, and every expectation is worked out here from that geometry.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import marey.objectives.sigreg as sigreg_module
from marey.config.compose import load_config
from marey.config.schema import EncoderConfig
from marey.core.tokens import TokenGroup, ViewChunk, grid_positions, keep_indices
from marey.objectives.invariance import InvarianceObjective
from marey.objectives.registry import build
from marey.training.cost import step_cost
from tests.costs.counting import Attended, Calls, Elements, Product, product_flops

CLIPS, LOCALS = 2, 10
ALL_GLOBAL, ALL_LOCAL = 16 * (224 // 16) ** 2, 16 * (96 // 16) ** 2
KEPT_GLOBAL, KEPT_LOCAL = 157, 29  # 5% of 3136 and of 576
PATCH_VALUES = 3 * 16 * 16
WIDTH, DEPTH, HEADS = 128, 4, 4
HIDDEN, OUTPUT, DIRECTIONS, KNOTS = 2048, 256, 1024, 17

PATCHES = CLIPS * (KEPT_GLOBAL + LOCALS * KEPT_LOCAL)
SEQUENCES = CLIPS * (1 + LOCALS)
ROWS = PATCHES + SEQUENCES
"""Kept tokens of all views of all clips, and a [CLS] for each view."""


class Run(NamedTuple):
    calls: Calls
    angles: Elements
    directions: int
    tokens: int


def config_of(*overrides: str) -> EncoderConfig:
    return load_config(["model.name=vit_nano", f"loader.batch_size={CLIPS}", *overrides])


@pytest.fixture(scope="module")
def objective() -> InvarianceObjective:
    made = build(config_of())
    assert isinstance(made, InvarianceObjective)
    return made


def views(clips: range, side: int, first: int, count: int) -> TokenGroup:
    """Random pixels at what survives of ``count`` views, ``first`` and on, of each clip."""
    grid = grid_positions((16, side // 16, side // 16))
    kept = torch.stack(
        [
            keep_indices(len(grid), 0.95, seed=0, epoch=0, position=clip, view=first + view)
            for clip in clips
            for view in range(count)
        ]
    )
    shape = (*kept.shape, PATCH_VALUES)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(clips.start))
    return TokenGroup(pixels, grid[kept])


def chunk_of(clips: range) -> ViewChunk:
    nothing = torch.zeros(0, 3, dtype=torch.int64)
    facts = torch.zeros(len(clips), 5, dtype=torch.int64)
    return ViewChunk(views(clips, 224, 0, 1), views(clips, 96, 1, LOCALS), facts, nothing, [])


@pytest.fixture(scope="module")
def chunks() -> list[ViewChunk]:
    """Two clips, each a chunk of its own."""
    return [chunk_of(range(clip, clip + 1)) for clip in range(CLIPS)]


@pytest.fixture(scope="module")
def whole() -> ViewChunk:
    """Two clips in one chunk."""
    return chunk_of(range(CLIPS))


def run(objective: InvarianceObjective, batch: list[ViewChunk], monkeypatch: pytest.MonkeyPatch) -> Run:
    """One step, forward and backward, watched."""
    drawn = 0
    draw = sigreg_module.directions

    def watched(count: int, width: int, *, seed: int, micro_step: int) -> torch.Tensor:
        nonlocal drawn
        drawn += 1
        return draw(count, width, seed=seed, micro_step=micro_step)

    monkeypatch.setattr(sigreg_module, "directions", watched)
    with Elements("cos", "sin") as angles, Calls(objective) as calls:
        out = objective.forward_train_batch(batch, micro_step=0)
        out.loss.backward()
    return Run(calls, angles, drawn, out.tokens)


def products(rows: int, sequences: int) -> dict[str, list[Product]]:
    """What each weight of the encoder is multiplied with in one forward pass, in full."""
    expected = {"encoder.patch_embed.proj.weight": [Product(rows - sequences, WIDTH)]}
    for i in range(DEPTH - 1):
        expected |= {
            f"encoder.blocks.{i}.attn.qkv.weight": [Product(rows, 3 * WIDTH)],
            f"encoder.blocks.{i}.attn.proj.weight": [Product(rows, WIDTH)],
            f"encoder.blocks.{i}.mlp.fc1.weight": [Product(rows, 4 * WIDTH)],
            f"encoder.blocks.{i}.mlp.fc2.weight": [Product(rows, WIDTH)],
        }
    last = f"encoder.blocks.{DEPTH - 1}"
    # The loss reads [CLS] alone, so after the last block's keys and values nothing else is computed.
    return expected | {
        f"{last}.attn.qkv.weight": [Product(sequences, WIDTH), Product(rows, 2 * WIDTH)],
        f"{last}.attn.proj.weight": [Product(sequences, WIDTH)],
        f"{last}.mlp.fc1.weight": [Product(sequences, 4 * WIDTH)],
        f"{last}.mlp.fc2.weight": [Product(sequences, WIDTH)],
    }


HEAD = {
    "projector.fc1.weight": [Product(SEQUENCES, HIDDEN)],
    "projector.fc2.weight": [Product(SEQUENCES, OUTPUT)],
}


def test_the_tokens_that_survive_are_a_twentieth_of_all() -> None:
    assert (ALL_GLOBAL, ALL_LOCAL) == (3136, 576)
    assert (round(ALL_GLOBAL / 20), round(ALL_LOCAL / 20)) == (KEPT_GLOBAL, KEPT_LOCAL)


def test_every_layer_is_called_once_on_the_kept_tokens_of_all_views_of_all_clips(
    objective: InvarianceObjective, whole: ViewChunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = run(objective, [whole], monkeypatch)
    assert {name: sorted(calls) for name, calls in seen.calls.products.items()} == products(ROWS, SEQUENCES) | HEAD
    assert seen.tokens == ROWS == CLIPS * (158 + 10 * 30)


def test_chunks_run_the_encoder_twice_and_nothing_else(
    objective: InvarianceObjective, chunks: list[ViewChunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = run(objective, chunks, monkeypatch)
    assert seen.tokens == ROWS
    one = products(ROWS // CLIPS, SEQUENCES // CLIPS)
    # Once forward and once more in the backward pass, for each chunk.
    expected = {name: sorted(calls * 2 * CLIPS) for name, calls in one.items()}
    assert {name: sorted(calls) for name, calls in seen.calls.products.items()} == expected | HEAD
    assert seen.directions == 1


def test_attention_stays_inside_a_view_and_the_last_layer_asks_for_the_summary_alone(
    objective: InvarianceObjective, whole: ViewChunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = run(objective, [whole], monkeypatch)
    wide, narrow = KEPT_GLOBAL + 1, KEPT_LOCAL + 1
    layer = [Attended(CLIPS, wide, wide), Attended(CLIPS * LOCALS, narrow, narrow)]
    last = [Attended(CLIPS, 1, wide), Attended(CLIPS * LOCALS, 1, narrow)]
    assert seen.calls.attended == layer * (DEPTH - 1) + last
    assert seen.calls.pairs == (DEPTH - 1) * CLIPS * (158**2 + 10 * 30**2) + CLIPS * (158 + 10 * 30)


@pytest.mark.parametrize("rope_layout", ["tiled", "rotary"])
def test_angles_are_turned_into_sines_and_cosines_once_for_all_layers(whole: ViewChunk, rope_layout: str) -> None:
    made = build(config_of(f"model.rope_layout={rope_layout}"))
    assert isinstance(made, InvarianceObjective)
    with Elements("cos", "sin") as angles:
        summaries = made.encoder.summarise_groups([whole.views_global, whole.views_local])
        torch.cat(summaries).sum().backward()
    # One of each per token and channel of one head; every head and every layer reads the same.
    assert angles.counts == {"cos": ROWS * WIDTH // HEADS, "sin": ROWS * WIDTH // HEADS}


def test_the_statistic_draws_its_directions_once_and_projects_every_embedding_on_each_once(
    objective: InvarianceObjective, whole: ViewChunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(objective, [whole], monkeypatch).directions == 1
    z = torch.randn(1 + LOCALS, CLIPS, OUTPUT, generator=torch.Generator().manual_seed(0), requires_grad=True)
    projections = SEQUENCES * DIRECTIONS
    with Elements("cos", "sin", "mm", "bmm", "addmm", "baddbmm") as forward:
        loss = objective.sigreg(z, micro_step=0)
    assert forward.counts["cos"] == forward.counts["sin"] == KNOTS * projections
    assert sum(forward.counts.values()) - 2 * KNOTS * projections == projections
    with Elements("cos", "sin") as backward:
        loss.backward()
    assert backward.counts["cos"] == backward.counts["sin"] == KNOTS * projections
    # Forward; in the backward pass the projections again, and the way back from their gradients.
    assert product_flops(lambda: objective.sigreg(z, micro_step=0)) == 3 * 2 * projections * OUTPUT


def step_flops(passes: int) -> tuple[int, int]:
    """FLOPs of a step from its matrix products, and those of them that a whole last block and a gradient with
    respect to the pixels would add. ``passes``: forward, backward with respect to inputs and to weights, recomputed.
    """
    square = WIDTH**2
    wide, narrow = KEPT_GLOBAL + 1, KEPT_LOCAL + 1
    lengths, squares = CLIPS * (wide + LOCALS * narrow), CLIPS * (wide**2 + LOCALS * narrow**2)
    assert lengths == ROWS
    embed = 2 * PATCHES * PATCH_VALUES * WIDTH
    block = 2 * ROWS * 12 * square + 2 * 2 * squares * WIDTH
    last = 2 * ROWS * 2 * square + 2 * SEQUENCES * 10 * square + 2 * 2 * lengths * WIDTH
    head = 2 * SEQUENCES * (WIDTH * HIDDEN + HIDDEN * OUTPUT + OUTPUT * DIRECTIONS)
    counted = (passes - 1) * embed + passes * ((DEPTH - 1) * block + last) + 3 * head
    return counted, embed + passes * (block - last)


@pytest.mark.parametrize("micro_batch", [CLIPS, 1])
def test_the_flops_of_a_step_are_its_products_and_the_forecast_is_above_them_by_what_is_left_out(
    objective: InvarianceObjective, whole: ViewChunk, chunks: list[ViewChunk], micro_batch: int
) -> None:
    batch = [whole] if micro_batch == CLIPS else chunks
    measured = product_flops(lambda: objective.forward_train_batch(batch, micro_step=0).loss)
    expected, saved = step_flops(3 if micro_batch == CLIPS else 4)
    assert measured == expected
    planned = step_cost(config_of(f"loader.micro_batch_size={micro_batch}")).flops
    assert planned == expected + saved
