"""Effective batch, statistic batch and BatchNorm group: what they are, and what gives the recipe's back."""

from __future__ import annotations

import pytest

from marey.config.compose import load_config
from marey.training.compare import batch_numbers, comparison_lines, restore_lines

ONE_NODE = "trainer.num_nodes=1"


def test_the_reference_recipe_is_3072_1536_96() -> None:
    config = load_config([])
    assert batch_numbers(config, world_size=16) == (3072, 1536, 96)
    assert restore_lines(config, world_size=16) == []


def test_one_node_halves_both_batches_and_two_ways_out_are_named() -> None:
    config = load_config([ONE_NODE])
    assert batch_numbers(config, world_size=8) == (1536, 768, 96)
    alone, everything = restore_lines(config, world_size=8)
    assert alone.startswith("accumulate_grad_batches=4 restores the effective batch alone")
    assert "the statistic batch stays 768 (recipe: 1536)" in alone
    assert "BatchNorm" not in alone
    assert everything == (
        "loader.batch_size=192 loader.micro_batch_size=96 projector.norm_group=96 restores all three numbers"
    )


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_what_is_said_to_restore_all_three_does(world_size: int) -> None:
    devices = f"trainer.devices={world_size}"
    lines = restore_lines(load_config([ONE_NODE, devices]), world_size=world_size)
    (everything,) = (line for line in lines if "all three" in line)
    words = everything.removesuffix(" restores all three numbers").split()
    restored = load_config([ONE_NODE, devices, *words])
    assert batch_numbers(restored, world_size=world_size) == (3072, 1536, 96)
    assert restore_lines(restored, world_size=world_size) == []
    assert (restored.loader.micro_batch_size or restored.loader.batch_size) <= 96


def test_accumulation_changes_the_effective_batch_and_never_the_statistic_batch() -> None:
    config = load_config([ONE_NODE, "accumulate_grad_batches=4"])
    assert batch_numbers(config, world_size=8) == (3072, 768, 96)
    lines = comparison_lines(config, world_size=8)
    assert "the same" in lines[0]
    assert "1536, DIFFERENT" in lines[1]


@pytest.mark.parametrize("world_size", [3, 7, 12])
def test_ranks_that_do_not_divide_the_statistic_batch_are_said_to_be_no_way(world_size: int) -> None:
    lines = restore_lines(load_config([ONE_NODE, f"trainer.devices={world_size}"]), world_size=world_size)
    assert f"no loader.batch_size restores all three numbers on {world_size} ranks" in lines[-1]
    assert "divides 16" in lines[-1]


def test_an_unpublished_number_is_compared_with_nothing() -> None:
    config = load_config(["recipe=videomix_vitl"])
    assert restore_lines(config, world_size=3) == []
    assert all("not published" in line for line in comparison_lines(config, world_size=3))
