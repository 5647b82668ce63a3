"""Damage to bytes and to JSON, for hypothesis; and what may come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from marey.core.errors import UserError

FAST = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""Few examples, the same in every run: what a longer hunt finds becomes an ``@example``."""

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "nan", "1e999", "../x", "\x00", "demo:train"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` with a few bytes flipped, cut out, doubled, put in, or its end missing."""
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        length = draw(st.integers(1, 24))
        kind = draw(st.sampled_from(["flip", "cut", "double", "insert", "end"]))
        if kind == "flip":
            data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + length :]
        elif kind == "double":
            data = data[: at + length] + data[at:]
        elif kind == "insert":
            data = data[:at] + draw(st.binary(min_size=1, max_size=24)) + data[at:]
        else:
            data = data[:at]
    return data


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in nested dictionaries and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*here, key)
        yield from places(inner, (*here, key))


@st.composite
def replaced(draw: st.DrawFn, value: Any) -> Any:
    """A copy of a JSON value with one to three places holding something else, or nothing."""
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(value))
        if not found:
            break
        value = _set(value, draw(st.sampled_from(found)), draw(VALUES), drop=draw(st.booleans()))
    return value


def _set(value: Any, place: tuple[Any, ...], new: Any, *, drop: bool) -> Any:
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(place) > 1:
        copy[place[0]] = _set(copy[place[0]], place[1:], new, drop=drop)
    elif drop:
        del copy[place[0]]
    else:
        copy[place[0]] = new
    return copy


def said(call: Callable[[], Any]) -> str | None:
    """What a refusal says; None where there was none. Anything else that is raised goes through."""
    try:
        call()
    except UserError as error:
        text = str(error)
    else:
        return None
    assert text.strip()
    assert "Traceback" not in text
    return text
