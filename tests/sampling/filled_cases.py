"""Planners that fill microbatches or balance ranks, on small sources of three canvases."""

from __future__ import annotations

from typing import Any

from marey.config.causal import CausalConfig
from marey.config.compose import compose_container, validate
from marey.sampling.draws import MixtureDraws, draw_shares
from marey.sampling.flops import sample_cost
from marey.sampling.planner import MicrobatchPlanner, PlannedBatch
from marey.sampling.windows import WindowTable
from tests.sampling.latent_sources import source

CONFIG = validate(compose_container(["data=demo"], config_name="causal_video"), CausalConfig)
COST = sample_cost(CONFIG.model, CONFIG.program)
CANVASES = [(8, 8), (8, 12), (16, 16)]


def windows(n: int = 90) -> WindowTable:
    lengths = [4 + (7 * i) % 9 for i in range(n)]
    return WindowTable(
        [
            source("a", lengths, canvases=[CANVASES[i % 2] for i in range(n)]),
            source("b", lengths[: n // 3], canvases=[CANVASES[2]] * (n // 3)),
        ]
    )


def planner(at: WindowTable, *, epoch_draws: int | None = None, **options: Any) -> MicrobatchPlanner:
    shares = draw_shares(at.names, [1.0] * len(at.sources), [1.0] * len(at.sources), meaning="by_draw")
    draws = MixtureDraws(at.names, at.sizes, shares, seed=1, epoch_draws=epoch_draws)
    wanted: dict[str, Any] = {"seed": 1, "world": 1, "batch": 4, "fill_tokens": 800, "patch": 2, **options}
    return MicrobatchPlanner(draws, at, **wanted)


def tokens_of(batch: PlannedBatch) -> int:
    at = batch.at
    return int(((at.prefix + at.future) * (at.height // 2) * (at.width // 2)).sum())


def every(plan: MicrobatchPlanner, epoch: int = 0) -> list[list[PlannedBatch]]:
    return [[plan.batch_at(epoch, m, rank) for rank in range(plan.world)] for m in range(plan.micro_steps(epoch))]
