from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.sampling.windows import WindowTable
from tests.sampling.latent_sources import BUCKETS, source, table


def listed(lengths: list[int], **options: object) -> list[tuple[int, int, int]]:
    windows = source("a", lengths, **options)  # type: ignore[arg-type]
    at = windows.locate(np.arange(len(windows)))
    return list(zip(at.row.tolist(), at.start.tolist(), (at.prefix + at.future).tolist(), strict=True))


def test_windows_of_a_clip_do_not_overlap_and_reach_its_end() -> None:
    assert [(row, start) for row, start, _ in listed([4, 12, 15, 16, 30])] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (3, 12), (4, 0), (4, 12), (4, 24),
    ]  # fmt: skip


def test_a_clip_that_just_fits_is_used_and_a_shorter_one_is_counted() -> None:
    windows = source("a", [3, 4, 2])
    assert len(windows) == 1
    assert windows.unusable_clips == 2


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=8),
    st.integers(1, 15),
    st.integers(0, 1),
    st.data(),
)
def test_windows_are_the_starts_that_a_loop_would_find(
    lengths: list[int], stride: int, lead: int, data: st.DataObject
) -> None:
    starts = [data.draw(st.integers(0, n - 1)) for n in lengths]
    expected = [
        (row, at)
        for row, (length, start) in enumerate(zip(lengths, starts, strict=True))
        for at in range(max(start, lead), length - 3, stride)
    ]
    found = listed(lengths, stride=stride, lead=lead, starts=starts)
    assert [(row, at) for row, at, _ in found] == expected
    assert all(at + frames <= lengths[row] for row, at, frames in found)
    assert {frames for _, _, frames in found} <= {sum(b) for b in BUCKETS}


def test_a_window_is_located_alone_as_among_others() -> None:
    windows = source("a", [4, 40, 7, 2, 90])
    whole = windows.locate(np.arange(len(windows)))
    for i in range(len(windows)):
        assert [int(column[0]) for column in windows.locate(np.array([i]))] == [int(column[i]) for column in whole]


def test_the_geometry_of_a_window_does_not_change_with_the_other_clips() -> None:
    few = listed([20, 20, 20])
    assert listed([20, 20, 20, 50, 50])[: len(few)] == few


def test_measures_count_every_window_once() -> None:
    windows = source("a", [12, 25], canvases=[(4, 6), (8, 2)], fps=2.0)
    at = windows.locate(np.arange(3))
    frames = (at.prefix + at.future).tolist()
    measured = windows.measures(patch=2)
    assert (measured.windows, measured.frames) == (3, sum(frames))
    assert measured.hours == pytest.approx(sum(frames) / 2 / 3600)
    assert measured.tokens == frames[0] * 6 + (frames[1] + frames[2]) * 4


def test_a_weight_that_the_manifest_cannot_count_is_refused_by_name() -> None:
    windows = WindowTable([source("a", [9], canvases=[(4, 4)], fps=1.0), source("b", [9])])
    assert windows.weighing("by_draw", patch=1) == [1.0, 1.0]
    assert windows.weighing("by_size", patch=1) == [1.0, 1.0]
    with pytest.raises(UserError, match=r"b.csv: data.weights=by_hours needs the column fps, which source b"):
        windows.weighing("by_hours", patch=1)
    with pytest.raises(UserError, match=r"by_tokens needs the column height and width, which source b"):
        windows.weighing("by_tokens", patch=1)
    assert all(value > 0 for value in windows.weighing("by_frames", patch=1))


def test_a_mixture_locates_in_each_source_and_refuses_equal_names() -> None:
    windows = table(a=[9, 9], b=[30])
    at = windows.locate(np.array([1, 0, 1], dtype=np.int32), np.array([2, 1, 0]))
    assert at.row.tolist() == [0, 1, 0]
    assert at.start.tolist() == [24, 0, 0]
    with pytest.raises(UserError, match="two sources are named a"):
        WindowTable([source("a", [9]), source("a", [9])])


def test_grouping_by_canvas_without_height_and_width_names_the_source() -> None:
    with pytest.raises(UserError, match=r"a.csv: source a has no columns height and width"):
        table(a=[9]).require_canvas(why="data.shape_bucketed_batching=true")


def test_a_source_of_weight_zero_is_not_asked_what_it_holds() -> None:
    windows = WindowTable([source("a", [9], fps=2.0), source("b", [9])])
    assert windows.weighing("by_hours", patch=1, weights=[1.0, 0.0])[1] == 0
    with pytest.raises(UserError, match="which source b"):
        windows.weighing("by_hours", patch=1, weights=[1.0, 0.5])


def test_the_room_of_a_source_is_what_its_longest_clip_has_left() -> None:
    assert source("a", [5, 9, 7], starts=[0, 6, 1]).longest_room == 6
    assert source("a", [5, 9, 7], lead=1).longest_room == 8
    assert source("a", []).longest_room == 0
