"""Overrides as people mistype them: a configuration, or one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from marey.config.compose import known_keys, load_run
from tests.fuzz.mutations import FAST, said

CONFIGS = ("config", "causal_video")
KEYS = {name: sorted(known_keys(name)) for name in CONFIGS}
"""Every key there is, so that values meet what they are meant for."""
PLAIN = ("", "null", "true", "0", "-1", "1.5", "1e999", "nan", "inf", "1_000", "0x10", "9" * 40, "a b", "é")
NESTED = ("[]", "{}", "[1,", "{a:", "[[[[1]]]]", "{a:{b:1}}", "[1,2,3]", "[{path:x}]")
SPECIAL = ("???", "'", '"', "\\", "${x}", "${seed}", "${oc.env:HOME}", "${oc.env:NOT_SET_ANYWHERE}", "${oc.decode:'['}")
SWEEPS = ("range(1,3)", "choice(1,2)", "glob(*)")
VALUES = (
    st.sampled_from([*PLAIN, *NESTED, *SPECIAL, *SWEEPS])
    | st.integers(-(2**70), 2**70).map(str)
    | st.floats().map(str)
    | st.text(max_size=8)
)


@st.composite
def overrides(draw: st.DrawFn, config: str) -> list[str]:
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(KEYS[config]) | st.sampled_from(["recipe", "data", "hydra.run.dir", "model", "x.y"]))
        sign = draw(st.sampled_from(["", "", "", "+", "++", "~"]))
        lines.append(draw(st.sampled_from([f"{sign}{key}={draw(VALUES)}", f"{sign}{key}", key[:-1] + "="])))
    return lines


@pytest.mark.parametrize("config", CONFIGS)
@hypothesis_settings(FAST, max_examples=25)
@given(data=st.data())
def test_any_override_gives_a_configuration_or_one_sentence(config: str, data: st.DataObject) -> None:
    chosen = data.draw(overrides(config))
    said(lambda: load_run(chosen, config_name=config))


@hypothesis_settings(FAST, max_examples=30)
@given(line=st.text(max_size=20))
@example(line="")
@example(line="=")
@example(line="@")
@example(line="a@b:c=d")
@example(line="recipe=")
@example(line="~recipe")
@example(line="+recipe=smoke")
@example(line="model=")
@example(line="seed=\x00")
@example(line="hydra=null")
@example(line="hydra.job.chdir=maybe")
@example(line="hydra/launcher=nothing")
def test_any_text_in_place_of_an_override_is_a_configuration_or_one_sentence(line: str) -> None:
    said(lambda: load_run([line]))


WRONG: dict[str, Any] = {
    "seed": ["-1.5", "x", "null"],
    "loader.batch_size": ["0", "-3", "1.5", "many"],
    "optimizer.lr": ["-1", "nan", "inf", "fast"],
    "model.token_drop_rate": ["1", "-0.1", "2", "nan"],
    "loader.timeout": ["-1", "soon"],
    "data.video_rate": ["0", "-2", "nan"],
    "ema.decay": ["1.5", "-1", "nan"],
    "trainer.max_steps": ["x", "1.5"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_value_out_of_range_is_never_accepted_and_the_key_is_named(key: str, value: str) -> None:
    text = said(lambda: load_run([f"{key}={value}"]))
    assert text is not None
    assert key in text
