"""A part of the corpus of ``benchmarks/damaged_videos.py`` through ingest: no crash, no hang, no wrong success."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.damaged_videos import Outcome, run, summary, wrong


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("damaged"), files=40, seed=0, workers=2, originals=1)


def test_every_damaged_file_is_stored_for_what_it_is_or_refused_by_name(outcome: Outcome) -> None:
    result = summary(outcome)
    assert result["wrong"] == []
    counts = result["table"]["all"]
    assert sum(counts.values()) == result["files"] == 40
    assert min(counts.get(key, 0) for key in ("whole", "in part", "refused")) > 0  # the corpus reaches all three
    assert sum(result["refusals"].values()) == counts["refused"]


def test_the_judge_sees_a_frame_too_few_a_wrong_sum_and_a_silent_loss(outcome: Outcome) -> None:
    report, truth = outcome.report, outcome.truth
    refused = {item["path"] for item in report.refused}
    stored = next(n for n, item in enumerate(outcome.corpus) if str(item.path) not in refused)

    def judged(report: Any = report, **changed: Any) -> str:
        seen = truth | {stored: truth[stored] | changed} if changed else truth
        return "\n".join(wrong(outcome.corpus, report, outcome.store, seen))

    more = truth[stored]["frames"] + 1
    assert "not reported as partial" in judged(replace(report, partial=[]), promised=10**6)
    assert "frames decoded by the report" in judged(
        replace(report, partial=[{"path": str(outcome.corpus[stored].path), "decoded": more, "reason": ""}])
    )
    assert "times at which nothing decodes" in judged(stamps=[])
    assert "the store holds" in judged(replace(report, frames=report.frames - 1))
    again = [*report.refused, {"path": str(outcome.corpus[stored].path), "reason": "no"}]
    assert "refused and stored, or neither" in judged(replace(report, refused=again))
