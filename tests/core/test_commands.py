from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from marey.core.commands import override, override_word
from marey.core.errors import UserError

PATHS = st.text(st.characters(exclude_characters="$", exclude_categories=["Cs", "Cc"]), min_size=1)


@given(PATHS)
def test_any_path_reaches_the_configuration_as_it_is(path):
    (parsed,) = OverridesParser.create().parse_overrides([override("data.train", path)])
    assert parsed.value() == path


@given(PATHS)
@example("my store.lance")
@example("/it's/a,b.lance")
@example("a/b.lance")
@example("1")
def test_a_copied_override_passes_the_shell_and_the_configuration(path):
    (word,) = shlex.split(override_word("data.train", path))
    (parsed,) = OverridesParser.create().parse_overrides([word])
    assert parsed.value() == path


def test_a_plain_path_is_shown_as_it_is():
    assert override_word("data.train", "/videos/a-1.lance") == "data.train=/videos/a-1.lance"


def test_a_path_that_would_be_interpolated_is_refused():
    with pytest.raises(UserError, match="rename that folder"):
        override("data.train", "/a/${b}")
