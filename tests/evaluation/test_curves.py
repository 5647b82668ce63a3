from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.evaluation.curves import first_finite, last_finite, read_columns, thinned


def test_a_table_is_read_by_column_and_a_row_that_a_kill_cut_off_is_left(tmp_path: Path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,name\n1,0.5,a\n2,,b\n3,inf,c\n4,0.2")
    columns = read_columns(path)
    assert columns["step"].tolist() == [1, 2, 3]
    assert columns["loss"][0] == 0.5
    assert math.isnan(columns["loss"][1])
    assert last_finite(columns["loss"]) == first_finite(columns["loss"]) == 0.5
    assert math.isnan(last_finite(columns["name"]))


@pytest.mark.parametrize("text", ["", "step,loss\n", "step,loss\n1\n"])
def test_a_table_without_a_row_is_refused(tmp_path: Path, text: str):
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(UserError, match="holds no row"):
        read_columns(tmp_path / "m.csv")


def test_what_is_no_table_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        read_columns(tmp_path / "none.csv")
    (tmp_path / "big.csv").write_text("step\n" + "9" * 200_000 + "\n")
    with pytest.raises(UserError, match="no table of numbers"):
        read_columns(tmp_path / "big.csv")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), min_size=1, max_size=200),
    st.integers(1, 40),
)
def test_thinning_keeps_the_mean_and_the_extremes_of_every_stretch(values, most):
    y = np.array(values)
    x = np.arange(len(y), dtype=np.float64)
    curve = thinned(x, y, most=most)
    assert len(curve.x) == len(curve.y) <= max(most, 1)
    assert (np.diff(curve.x) > 0).all()
    if curve.low is None or curve.high is None:
        assert np.array_equal(curve.y, y, equal_nan=True)
        return
    each = -(-len(y) // most)
    for i in range(len(curve.y)):
        part = y[i * each : (i + 1) * each]
        part = part[np.isfinite(part)]
        if not len(part):
            assert math.isnan(curve.y[i])
            continue
        assert curve.y[i] == pytest.approx(part.mean(), abs=1e-6)
        assert (curve.low[i], curve.high[i]) == (part.min(), part.max())
