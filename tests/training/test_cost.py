"""Token, parameter and FLOP counts, against published numbers and slow counts."""

from __future__ import annotations

from marey.config.compose import load_config
from marey.training.cost import encoder_parameters, step_cost


def test_tokens_are_the_published_ones() -> None:
    cost = step_cost(load_config([]))
    assert (cost.tokens_global_all, cost.tokens_local_all) == (3136, 576)
    assert (cost.tokens_global, cost.tokens_local) == (157, 29)
    assert cost.tokens_per_clip == 157 + 10 * 29


def test_vit_large_has_303_099_904_parameters() -> None:
    assert encoder_parameters(load_config(["model.name=vit_large"])) == 303_099_904


def test_flops_equal_a_slow_count_product_by_product() -> None:
    config = load_config(["recipe=smoke"])
    width, depth = 128, 4
    lengths = [103, 27, 27]  # round(512 * .2) + 1, round(128 * .2) + 1 twice
    per_clip = 0
    for length in lengths:
        products = [(length - 1, 3 * 8 * 8, width)]
        for _ in range(depth):
            products += [(length, width, 3 * width), (length, width, width)]
            products += [(length, width, 4 * width), (length, 4 * width, width)]
            products += [
                (length, width, length),
                (length, length, width),
            ]  # all heads of q k', then of the values
        products += [(1, width, 128), (1, 128, 32), (1, 32, 64)]
        per_clip += sum(2 * a * b * c for a, b, c in products)
    assert step_cost(config).flops == 8 * 3 * per_clip


def test_recomputed_chunks_cost_one_more_forward_and_hold_less() -> None:
    whole = step_cost(load_config([]))
    chunks = step_cost(load_config(["loader.micro_batch_size=12"]))
    assert 1.3 < chunks.flops / whole.flops < 4 / 3
    assert chunks.memory_bytes < whole.memory_bytes
