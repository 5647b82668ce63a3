from __future__ import annotations

import numpy as np
import torch

from marey.pixels.episodes import FrameRequest
from marey.pixels.evalclips import short_side_centre_crop
from marey.pixels.shrunk import Shrunk
from tests.pixels.memory_source import MemorySource


def test_frames_come_square_and_small_from_the_same_steps_of_the_same_episodes() -> None:
    source = MemorySource([5, 7, 9], size=(40, 56))
    shrunk = Shrunk(source, 16)
    requests = [FrameRequest(1, np.array([0, 6])), FrameRequest(2, np.array([3]))]
    for small, large in zip(shrunk.read(requests), source.read(requests), strict=True):
        assert small.shape[1:] == (3, 16, 16)
        assert torch.equal(small, short_side_centre_crop(large, 16))
    assert shrunk.lengths.tolist() == [5, 7, 9]
    assert shrunk.rate == source.rate


def test_a_part_is_the_first_episodes_under_a_version_of_its_own() -> None:
    source = MemorySource([5, 7, 9])
    part = Shrunk(source, 16, 2)
    assert part.lengths.tolist() == [5, 7]
    assert part.files == source.files[:2]
    versions = {part.version, Shrunk(source, 16).version, Shrunk(source, 24, 2).version, source.version}
    assert len(versions) == 4
