from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marey.batching.budget import cut_by_tokens
from marey.core.errors import UserError
from marey.sampling.budget import agreed_calls, calls_needed, largest_window, window_tokens
from marey.sampling.draws import MixtureDraws, draw_shares
from marey.sampling.planner import MicrobatchPlanner
from marey.sampling.windows import WindowTable
from tests.sampling.latent_sources import source


def plan() -> MicrobatchPlanner:
    at = WindowTable([source("a", [4 + i % 9 for i in range(64)], canvases=[(4, 4 + 4 * (i % 2)) for i in range(64)])])
    draws = MixtureDraws(at.names, at.sizes, draw_shares(["a"], [1], [1], meaning="by_draw"), seed=0)
    return MicrobatchPlanner(draws, at, seed=0, world=4, batch=4, mode="packed")


def test_tokens_are_valid_frames_times_cells_over_the_patch() -> None:
    batch = plan().batch_at(0, 0, 0)
    at = batch.at
    expected = [
        int((p + f) * (h // 2) * (w // 2)) for p, f, h, w in zip(at.prefix, at.future, at.height, at.width, strict=True)
    ]
    assert window_tokens(batch, patch=2).tolist() == expected


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(50, 120))
def test_the_plan_counts_the_calls_that_the_program_makes(tokens: list[int], budget: int) -> None:
    assert calls_needed(np.array(tokens), budget) == len(cut_by_tokens(tokens, max_tokens=budget))


def test_ranks_agree_on_the_calls_of_the_neediest_and_each_can_make_that_many() -> None:
    planned = plan()
    needs = []
    for step in range(planned.micro_steps(0)):
        tokens = [window_tokens(planned.batch_at(0, step, rank), patch=1) for rank in range(4)]
        budget = 400
        calls = [calls_needed(t, budget) for t in tokens]
        assert agreed_calls(planned, 0, step, max_tokens=budget, patch=1) == max(calls)
        needs.append(len(set(calls)) > 1)
        for t in tokens:
            ranges = cut_by_tokens(t.tolist(), max_tokens=budget, at_least=max(calls))
            assert len(ranges) == max(calls)
            assert all(int(t[a:b].sum()) <= budget for a, b in ranges)
    assert any(needs)


def test_a_sample_over_the_budget_is_refused_by_name_before_anything_is_read() -> None:
    planned = plan()
    largest = largest_window(planned, patch=1)
    assert largest == 12 * 4 * 8
    for step in range(planned.micro_steps(0)):
        agreed_calls(planned, 0, step, max_tokens=largest, patch=1)
    over = next(
        step
        for step in range(planned.micro_steps(0))
        if any(window_tokens(planned.batch_at(0, step, rank), patch=1).max() == largest for rank in range(4))
    )
    with pytest.raises(
        UserError, match=r"a/a\d+@\d+ alone has 384 video tokens, more than data.batching.max_tokens=383"
    ):
        agreed_calls(planned, 0, over, max_tokens=largest - 1, patch=1)
