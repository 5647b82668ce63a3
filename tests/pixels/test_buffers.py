"""Memory that is used again once nobody looks at it, and never before."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import marey.pixels.buffers as buffers_module
from marey.pixels.buffers import GRAIN, Block, Buffers


class Counted(Buffers):
    """Counts blocks made and dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []
        self.dropped: list[int] = []

    def make(self, size: int) -> Block:
        self.made.append(size)
        return super().make(size)

    def drop(self, block: Block) -> None:
        self.dropped.append(block.size)


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    buffers = Counted()
    array, block = buffers.take(3 * 100)
    clip = torch.from_numpy(array.reshape(10, 10, 3)).permute(2, 0, 1)
    one = clip[1]
    del array, clip
    buffers.take(300)
    assert buffers.made == [GRAIN, GRAIN]  # ``one`` still looks into the first
    address = one.untyped_storage().data_ptr()
    del one
    again, same = buffers.take(300)
    other, _ = buffers.take(300)
    assert buffers.made == [GRAIN, GRAIN]
    assert address in (again.ctypes.data, other.ctypes.data)
    assert block is same or block.size == same.size


def test_a_smaller_clip_fits_a_larger_block_and_the_best_fit_is_taken() -> None:
    buffers = Counted()
    held = [buffers.take(size)[0] for size in (5 * GRAIN, 2 * GRAIN, 3 * GRAIN)]
    held.clear()
    array, block = buffers.take(GRAIN + 1)
    assert (len(array), block.size) == (GRAIN + 1, 2 * GRAIN)
    assert buffers.take(5 * GRAIN)[1].size == 5 * GRAIN
    assert len(buffers.made) == 3


def test_no_more_than_so_much_lies_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "KEEP_BYTES", 3 * GRAIN)
    buffers = Counted()
    held = [buffers.take(GRAIN)[0] for _ in range(6)]
    assert len(buffers.made) == 6
    held.clear()
    buffers.take(GRAIN)
    assert buffers.dropped == [GRAIN] * 2  # one in use, three kept


@given(st.lists(st.tuples(st.integers(0, 3 * GRAIN), st.integers(0, 5)), max_size=30))
@settings(max_examples=30, deadline=None)
def test_no_two_arrays_alive_share_memory(asked: list[tuple[int, int]]) -> None:
    """Take some, let some go, in any order: what an array holds stays what was written to it."""
    buffers = Buffers()
    alive: list[tuple[int, np.ndarray]] = []
    for number, (size, gone) in enumerate(asked):
        array, _ = buffers.take(size)
        assert array.shape == (size,)
        array[:] = number
        alive.append((number, array))
        if gone < len(alive):
            del alive[gone]
        del array
        assert all((held == mark).all() for mark, held in alive)


def test_arrays_outlive_their_buffers() -> None:
    buffers = Buffers()
    array, _ = buffers.take(10)
    array[:] = 7
    del buffers
    assert array.tolist() == [7] * 10
    assert pickle.loads(pickle.dumps(array)).tolist() == [7] * 10
