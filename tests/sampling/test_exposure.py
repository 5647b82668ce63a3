from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.sampling.draws import MixtureDraws, draw_shares
from marey.sampling.exposure import Appearance, ExposureLog, cut_spans, read_exposure, summarise
from marey.sampling.planner import MicrobatchPlanner, PlannedBatch
from marey.sampling.windows import WindowTable
from tests.sampling.latent_sources import source

FPS = 4.0


def plan(epoch_draws: int = 50, **options: Any) -> MicrobatchPlanner:
    sizes = [(8, 8), (4, 8)]
    at = WindowTable(
        [
            source("a", [4 + i % 9 for i in range(20)], canvases=[sizes[i % 2] for i in range(20)], fps=FPS),
            source("b", [12] * 6, canvases=[sizes[0]] * 6, fps=FPS),
        ]
    )
    shares = draw_shares(at.names, [3, 1], [1, 1], meaning="by_draw")
    draws = MixtureDraws(at.names, at.sizes, shares, seed=0, epoch_draws=epoch_draws)
    return MicrobatchPlanner(draws, at, **{"seed": 0, "world": 2, "batch": 3, "shape_grouping": True, **options})


def appearances(planner: MicrobatchPlanner, batch: PlannedBatch) -> list[Appearance]:
    found = []
    for i in range(len(batch.position)):
        origin = planner.windows.sources[int(batch.source[i])]
        frames = int(batch.at.prefix[i] + batch.at.future[i])
        cells = int(batch.at.height[i] * batch.at.width[i])
        found.append(
            Appearance(
                source=origin.name,
                clip_id=origin.manifest.clip(int(batch.at.row[i])).clip_id,
                frames=frames,
                tokens=frames * cells,
                seconds=frames / FPS,
                supervised=int(batch.at.future[i]) * cells * 2,
                turn=int(batch.turn[i]),
                repeat=int(batch.repeat[i]),
            )
        )
    return found


def run(folder: Path, planner: MicrobatchPlanner, *, epochs: int, start: int, stop: int, every: int) -> None:
    """What a run does from micro-step ``start`` to ``stop``, with checkpoints at multiples of ``every``."""
    cut_spans(folder, step=start)
    logs = [ExposureLog.resumed(folder, step=start, rank=rank) for rank in range(planner.world)]
    step = 0
    for epoch in range(epochs):
        for m in range(planner.micro_steps(epoch)):
            if start <= step < stop:
                for rank, log in enumerate(logs):
                    log.record(appearances(planner, planner.batch_at(epoch, m, rank)))
                if m == planner.micro_steps(epoch) - 1:
                    dropped = planner.draws.at(epoch, planner.dropped())
                    at = planner.windows.locate(dropped.source, dropped.window)
                    logs[0].record_dropped(
                        [
                            (planner.windows.sources[s].name, planner.windows.sources[s].manifest.clip(r).clip_id, t)
                            for s, r, t in zip(
                                dropped.source.tolist(), at.row.tolist(), dropped.turn.tolist(), strict=True
                            )
                        ]
                    )
                if (step + 1) % every == 0:
                    for log in logs:
                        log.flush(step + 1)
            step += 1
    if stop >= step:
        for log in logs:
            log.flush(step)


def test_exposure_equals_an_independent_recount(tmp_path: Path) -> None:
    planner = plan()
    run(tmp_path, planner, epochs=3, start=0, stop=10**9, every=4)
    recount: dict[tuple[str, str], Counter[str]] = {}
    for epoch in range(3):
        drawn = planner.draws.at(epoch, np.arange(50))
        at = planner.windows.locate(drawn.source, drawn.window)
        for i in range(50):
            name = "ab"[drawn.source[i]]
            row = recount.setdefault((name, f"{name}{at.row[i]}"), Counter())
            row["drawn"] += 1
            row["repeats"] += int(drawn.turn[i] > 0)
            row["dropped"] += int(i >= 48)
        for m in range(planner.micro_steps(epoch)):
            for rank in range(2):
                for sample in appearances(planner, planner.batch_at(epoch, m, rank)):
                    row = recount[(sample.source, sample.clip_id)]
                    row["reached"] += 1
                    row["tail_repeats"] += int(sample.repeat > 0)
                    for name in ("frames", "tokens", "supervised", "seconds"):
                        row[name] += getattr(sample, name)
    table = read_exposure(tmp_path).to_pylist()
    assert len(table) == len(recount)
    for row in table:
        expected = recount[(row["source"], row["clip_id"])]
        for name in (
            "drawn",
            "reached",
            "frames",
            "tokens",
            "supervised",
            "seconds",
            "repeats",
            "tail_repeats",
            "dropped",
        ):
            assert row[name] == expected[name], (row, name)
    assert sum(row["drawn"] for row in table) == 150
    assert sum(row["dropped"] for row in table) == 6
    assert sum(row["reached"] for row in table) == 144 + sum(row["tail_repeats"] for row in table)
    assert sum(row["tail_repeats"] for row in table) == sum(planner.counts(e).repeated for e in range(3)) > 0


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(0, 26), min_size=1, max_size=3), st.integers(2, 7))
def test_killed_and_resumed_counts_equal_uninterrupted_ones(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], every: int
) -> None:
    planner = plan()
    whole, pieces = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("pieces")
    run(whole, planner, epochs=3, start=0, stop=10**9, every=every)
    start = 0
    for kill in kills:
        stop = max(kill, start)
        run(pieces, planner, epochs=3, start=start, stop=stop, every=every)  # what was not flushed is lost
        start = stop // every * every
    run(pieces, planner, epochs=3, start=start, stop=10**9, every=every)
    assert read_exposure(pieces).equals(read_exposure(whole))


def test_resuming_from_an_older_checkpoint_forgets_what_came_after(tmp_path: Path) -> None:
    planner = plan()
    run(tmp_path, planner, epochs=2, start=0, stop=10**9, every=4)
    assert cut_spans(tmp_path, step=4) > 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"steps-0000000000-0000000004-rank{rank}.parquet" for rank in range(2)]
    with pytest.raises(UserError, match=r"counts micro-steps 0..3, across the resumed one, 2"):
        cut_spans(tmp_path, step=2)


def test_a_skipped_step_is_drawn_but_does_not_reach(tmp_path: Path) -> None:
    log = ExposureLog(tmp_path)
    sample = Appearance("a", "x", frames=4, tokens=64, seconds=1.0, supervised=48)
    log.record([sample, sample._replace(turn=1), sample._replace(repeat=1)])
    log.record([sample], reached=False)
    log.record_replaced("a", "broken")
    assert log.flush(2) is not None
    assert log.flush(3) is None
    broken, row = read_exposure(tmp_path).to_pylist()
    assert (row["drawn"], row["reached"], row["frames"], row["repeats"], row["tail_repeats"]) == (3, 3, 12, 1, 1)
    assert (broken["clip_id"], broken["replaced"], broken["quarantined"], broken["reached"]) == ("broken", 1, 1, 0)
    log.record_replaced("a", "broken")
    log.record_dropped([("a", "x", 2)])
    log.flush(4)
    (summary,) = summarise(read_exposure(tmp_path), {"a": 1})
    assert (summary["replaced"], summary["quarantined"], summary["quarantined_clips"]) == (2, 2, 1)
    assert (summary["dropped"], summary["drawn"], summary["repeats"], summary["reached"]) == (1, 4, 2, 3)
    assert (summary["seconds"], summary["tokens"], summary["supervised"]) == (3.0, 192, 144)


def test_the_summary_holds_measured_shares_against_those_asked_for(tmp_path: Path) -> None:
    planner = plan(epoch_draws=48, shape_grouping=False)
    run(tmp_path, planner, epochs=4, start=0, stop=10**9, every=100)
    asked = dict(zip("abc", [*planner.draws.shares, 0], strict=True))  # type: ignore[attr-defined]
    a, b, c = summarise(read_exposure(tmp_path), asked)
    assert (a["source"], a["share"], a["asked_share"], a["drawn"]) == ("a", 0.75, 0.75, 144)
    assert (b["share"], b["clips"]) == (0.25, 6)
    assert (c["source"], c["drawn"], c["share"]) == ("c", 0, 0.0)
    assert a["repeats"] == 144 - len(planner.windows.sources[0])


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no exposure log"):
        read_exposure(tmp_path)
