from __future__ import annotations

import numpy as np
import pytest
import torch

from marey.core.errors import UserError
from marey.evaluation.spatial import SpatialViews, square
from marey.pixels.episodes import FrameRequest
from marey.pixels.evalclips import EvalClips
from tests.evaluation.coloured_source import ColouredSource


def test_views_lie_evenly_along_the_longer_side():
    wide = torch.arange(10).expand(2, 3, 4, 10)
    assert [square(wide, view, 3)[0, 0, 0].tolist() for view in range(3)] == [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
    ]
    tall = wide.transpose(-1, -2)
    assert torch.equal(square(tall, 1, 2), square(wide, 1, 2).transpose(-1, -2))
    assert torch.equal(square(wide[..., :4], 1, 2), wide[..., :4])


def test_every_view_of_every_clip_is_there_and_each_clip_is_read_once(monkeypatch):
    source, read, asked = ColouredSource([0, 1], length=8), ColouredSource.read, []

    def counted(self, requests):
        asked.extend(request.episode for request in requests)
        return read(self, requests)

    monkeypatch.setattr(ColouredSource, "read", counted)
    clips = EvalClips(SpatialViews(source, 3), num_frames=4, frame_stride=1, img_size=20)
    assert len(clips) == 6
    clips.__getitems__([0])  # the reader learns how large a clip is
    asked.clear()
    found = clips.__getitems__(range(6))
    assert found.episodes.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert asked.count(1) == 1
    frames = read(source, [FrameRequest(1, np.arange(2, 6))])[0]  # [T, 3, 20, 24]
    assert torch.equal(found.video[3], frames[..., :20].movedim(1, 0))
    assert torch.equal(found.video[4], frames[..., 2:22].movedim(1, 0))
    assert torch.equal(found.video[5], frames[..., 4:].movedim(1, 0))


def test_a_clip_that_cannot_be_read_costs_the_others_nothing():
    source = ColouredSource([0, 1, 2])
    source.unreadable = {1}
    clips = EvalClips(SpatialViews(source, 2), num_frames=4, frame_stride=1, img_size=20)
    found = clips.__getitems__(range(6))
    assert found.episodes.tolist() == [0, 1, 4, 5]
    assert [refusal.episode for refusal in found.refused] == [2, 3]
    assert "/data/001.mp4" in found.refused[0].reason
    with pytest.raises(UserError, match="a broken frame"):
        SpatialViews(source, 2).read([FrameRequest(2, np.arange(2))])
