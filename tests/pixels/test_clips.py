from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.pixels.clips import clip_span, index_clips
from tests.pixels.memory_source import MemorySource


def test_a_clip_that_just_fits_is_accepted_and_one_frame_less_is_not() -> None:
    assert clip_span(16, 2) == 31
    index = index_clips(MemorySource([30, 31, 32]), num_frames=16, frame_stride=2, pad_short="drop")
    assert index.episodes.tolist() == [1, 2]
    assert (index.dropped_short, index.padded_short) == (1, 0)
    assert index.window(0, seed=0, epoch=0, position=0).tolist() == list(range(0, 31, 2))


def test_short_episodes_repeat_their_last_frame_when_asked_and_are_counted() -> None:
    index = index_clips(MemorySource([0, 3, 9]), num_frames=4, frame_stride=2, pad_short="repeat")
    assert index.episodes.tolist() == [1, 2]
    assert (index.dropped_short, index.padded_short) == (1, 1)
    assert index.window(0, seed=0, epoch=0, position=5).tolist() == [0, 2, 2, 2]


@given(
    length=st.integers(1, 60),
    frames=st.integers(1, 8),
    stride=st.integers(1, 4),
    position=st.integers(0, 1000),
)
def test_a_window_lies_in_its_episode_with_the_stride_kept(
    length: int, frames: int, stride: int, position: int
) -> None:
    index = index_clips(MemorySource([length]), num_frames=frames, frame_stride=stride, pad_short="repeat")
    steps = index.window(0, seed=1, epoch=2, position=position)
    assert steps.dtype == np.int64
    assert steps.shape == (frames,)
    assert 0 <= steps[0] <= steps[-1] < length
    if length >= clip_span(frames, stride):
        assert (np.diff(steps) == stride).all()


def test_window_starts_are_uniform_over_all_that_fit() -> None:
    index = index_clips(MemorySource([10]), num_frames=3, frame_stride=2, pad_short="drop")  # starts 0..5
    counts = Counter(int(index.window(0, seed=0, epoch=0, position=p)[0]) for p in range(6000))
    assert sorted(counts) == list(range(6))
    chi2 = sum((n - 1000) ** 2 / 1000 for n in counts.values())
    assert chi2 < 25.7  # 5 degrees of freedom, p = 1e-4


def test_a_window_depends_on_its_address_alone() -> None:
    one = index_clips(MemorySource([50, 50]), num_frames=4, frame_stride=2, pad_short="drop")
    other = index_clips(MemorySource([50, 6, 50]), num_frames=4, frame_stride=2, pad_short="drop")
    for position in range(20):
        a = one.window(0, seed=3, epoch=1, position=position)
        assert a.tolist() == other.window(1, seed=3, epoch=1, position=position).tolist()
    windows = {one.window(0, seed=3, epoch=e, position=0)[0] for e in range(30)}
    assert len(windows) > 10


def test_even_windows_reach_from_start_to_end() -> None:
    index = index_clips(MemorySource([21, 2]), num_frames=3, frame_stride=1, pad_short="repeat")
    assert [w[0] for w in index.even_windows(0, 3)] == [0, 9, 18]
    assert [w.tolist() for w in index.even_windows(0, 1)] == [[9, 10, 11]]
    assert [w.tolist() for w in index.even_windows(1, 2)] == [[0, 1, 1]] * 2


@pytest.mark.parametrize(("lengths", "remedy"), [([30, 12], "pad_short=repeat"), ([], "decoded"), ([0], "decoded")])
def test_a_source_without_a_usable_episode_is_refused_at_once(lengths: list[int], remedy: str) -> None:
    source = MemorySource(lengths, name="walks")
    with pytest.raises(UserError, match=r"walks .*need 31 stored frames.*") as refusal:
        index_clips(source, num_frames=16, frame_stride=2, pad_short="drop")
    assert remedy in str(refusal.value)
    assert source.reads == []


def test_only_empty_episodes_are_refused_even_when_short_ones_are_padded() -> None:
    with pytest.raises(UserError, match="no episode long enough"):
        index_clips(MemorySource([0, 0]), num_frames=2, frame_stride=1, pad_short="repeat")
