from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.models.rope import axis_channels, rotary_tables, rotate, rotate_back, sincos_embedding


def turned_slowly(x: list[float], position: tuple[int, int, int], layout: str) -> list[float]:
    """One token of one head, straight from the formula, channel by channel."""
    d = len(x)
    n = 2 * math.floor(math.floor(d / 3) / 2)
    out = list(x)
    for axis in range(3):
        for c in range(n):
            frequency = c % (n // 2) if layout == "tiled" else c // 2
            angle = position[axis] * 10000 ** (-frequency / (n / 2))
            here = axis * n + c
            partner = -x[here + 1] if c % 2 == 0 else x[here - 1]
            out[here] = x[here] * math.cos(angle) + partner * math.sin(angle)
    return out


def turned(x: torch.Tensor, positions: torch.Tensor, layout: str) -> torch.Tensor:
    cos, sin = rotary_tables(positions, head_dim=x.shape[-1], layout=layout, dtype=x.dtype)
    return rotate(x, cos, sin, out=torch.empty_like(x))


@pytest.mark.parametrize(("head_dim", "channels"), [(64, 20), (80, 26), (88, 28), (32, 10), (8, 2)])
def test_each_axis_turns_an_even_third_of_a_head(head_dim: int, channels: int) -> None:
    assert axis_channels(head_dim) == channels


@pytest.mark.parametrize("layout", ["tiled", "rotary"])
@pytest.mark.parametrize("head_dim", [8, 32, 64, 88])
def test_rotation_equals_the_formula_token_by_token(layout: str, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, head_dim, generator=generator, dtype=torch.float64)
    positions = torch.randint(0, 40, (7, 3), generator=generator)
    slow = [turned_slowly(r.tolist(), tuple(p.tolist()), layout) for r, p in zip(x, positions, strict=True)]
    torch.testing.assert_close(
        turned(x, positions, layout), torch.tensor(slow, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("layout", ["tiled", "rotary"])
def test_turning_back_is_the_transpose_of_turning(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64)
    positions = torch.randint(0, 9, (5, 3), generator=generator)
    cos, sin = rotary_tables(positions, head_dim=16, layout=layout, dtype=x.dtype)
    forth = rotate(x, cos, sin, out=torch.empty_like(x))
    back = rotate_back(y, cos, sin, out=torch.empty_like(y))
    assert float((forth * y).sum()) == pytest.approx(float((x * back).sum()), rel=1e-12)
    # The result may overwrite what it is made from.
    assert torch.equal(rotate_back(y, cos, sin, out=y), back)
    assert torch.equal(rotate(x, cos, sin, out=x), forth)


def score(shift: tuple[int, int, int], layout: str) -> float:
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 64, generator=generator, dtype=torch.float64)
    here, there = torch.tensor([[3, 1, 2]]), torch.tensor([[1, 4, 2]])
    by = torch.tensor([shift])
    return float((turned(q, here + by, layout) * turned(k, there + by, layout)).sum())


@settings(max_examples=20, deadline=None)
@given(shift=st.tuples(*[st.integers(0, 30)] * 3))
def test_rotary_scores_depend_on_differences_of_position_alone(shift: tuple[int, int, int]) -> None:
    assert score(shift, "rotary") == pytest.approx(score((0, 0, 0), "rotary"), abs=1e-10)


def test_tiled_scores_depend_on_absolute_positions_too() -> None:
    assert abs(score((5, 2, 7), "tiled") - score((0, 0, 0), "tiled")) > 0.1


@pytest.mark.parametrize("layout", ["tiled", "rotary"])
def test_position_zero_is_not_turned(layout: str) -> None:
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(turned(x, torch.zeros(1, 3, dtype=torch.int64), layout), x)


def test_angles_stay_float32_for_half_precision_and_float64_for_float64() -> None:
    positions = torch.tensor([[15, 13, 13]])
    tables = {
        dtype: rotary_tables(positions, head_dim=64, layout="rotary", dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    assert tables[torch.bfloat16][0].dtype == torch.float32
    assert tables[torch.float32][1].dtype == torch.float32
    assert tables[torch.float64][0].dtype == torch.float64
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    # Computed in float32, rounded once.
    exact = rotate(x.float(), *tables[torch.bfloat16], out=torch.empty(1, 64)).bfloat16()
    assert torch.equal(rotate(x, *tables[torch.bfloat16], out=torch.empty_like(x)), exact)


def test_fixed_embeddings_equal_the_formula() -> None:
    positions = torch.tensor([[0, 0, 0], [3, 1, 12]])
    width = 128
    n = 2 * (width // 3 // 2)
    slow = torch.zeros(2, width, dtype=torch.float64)
    for row, where in enumerate(positions.tolist()):
        for axis in range(3):
            for i in range(n // 2):
                angle = where[axis] * 10000 ** (-i / (n / 2))
                slow[row, axis * n + i] = math.sin(angle)
                slow[row, axis * n + n // 2 + i] = math.cos(angle)
    fast = sincos_embedding(positions, width=width, dtype=torch.float64)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
