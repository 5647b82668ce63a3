from __future__ import annotations

import pytest

from marey.core.errors import UserError
from marey.sampling.budget import check_budget
from marey.sampling.draws import MixtureDraws, draw_shares
from marey.sampling.planner import MicrobatchPlanner
from marey.sampling.windows import WindowTable
from tests.sampling.latent_sources import source


def test_a_window_over_the_budget_is_refused_by_name_before_anything_is_read() -> None:
    at = WindowTable([source("a", [4 + i % 9 for i in range(64)], canvases=[(4, 4 + 4 * (i % 2)) for i in range(64)])])
    draws = MixtureDraws(at.names, at.sizes, draw_shares(["a"], [1], [1], meaning="by_draw"), seed=0)
    planner = MicrobatchPlanner(draws, at, seed=0, world=4, batch=4, mode="packed")
    largest = 12 * 4 * 8
    check_budget(planner, max_tokens=largest, patch=1)
    check_budget(planner, max_tokens=largest // 4, patch=2)
    with pytest.raises(
        UserError, match=r"a/a\d+@\d+ alone has 384 video tokens, more than data.batching.max_tokens=383"
    ):
        check_budget(planner, max_tokens=largest - 1, patch=1)
    with pytest.raises(UserError, match="alone has 96 video tokens"):
        check_budget(planner, max_tokens=largest // 4 - 1, patch=2)
