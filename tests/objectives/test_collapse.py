from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.objectives.collapse import embedding_std, rankme


def test_effective_rank_equals_its_formula() -> None:
    x = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.eigvalsh(x.T @ x).sqrt().tolist()
    shares = [v / sum(values) for v in values]
    assert float(rankme(x)) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-10)


@settings(max_examples=25, deadline=None)
@given(rank=st.integers(1, 6), scale=st.sampled_from([1e-20, 1.0, 1e20]))
def test_orthogonal_rows_of_equal_length_have_their_number_as_rank(rank: int, scale: float) -> None:
    x = torch.zeros(8, 6)
    x[:rank, :rank] = scale * torch.eye(rank)
    assert float(rankme(x)) == pytest.approx(rank, rel=1e-4)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-30])
@pytest.mark.parametrize("shape", [(1, 4), (8, 4), (8, 1)])
def test_a_constant_matrix_has_rank_one_and_no_spread(value: float, shape: tuple[int, int]) -> None:
    x = torch.full(shape, value)
    assert float(rankme(x)) == pytest.approx(1, abs=1e-4)
    assert float(embedding_std(x)) == pytest.approx(0, abs=1e-6)


def test_a_value_that_is_not_finite_shows_as_nan() -> None:
    x = torch.ones(4, 3)
    x[0, 0] = math.inf
    assert math.isnan(float(rankme(x)))
    assert math.isnan(float(embedding_std(x)))


def test_spread_is_the_mean_over_columns_of_the_spread_over_rows() -> None:
    x = torch.tensor([[1.0, 0.0], [3.0, 0.0]], requires_grad=True)
    assert float(embedding_std(x)) == pytest.approx(0.5)
    assert not embedding_std(x).requires_grad


def test_half_precision_is_measured_in_float32() -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert rankme(x).dtype == torch.float32
    assert float(rankme(x)) == pytest.approx(float(rankme(x.float())))
