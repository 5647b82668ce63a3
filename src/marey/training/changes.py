"""Two configurations key by key: which keys there are, which differ, which ones a name stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from marey.core.errors import UserError, nearest


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """``(dotted key, value in old, value in new)`` for every key that differs; a key that one lacks counts as None."""
    before, after = dict(flat_keys(old)), dict(flat_keys(new))
    for key in sorted(before.keys() | after.keys()):
        a, b = before.get(key), after.get(key)
        if a != b:
            yield key, a, b


def flat_keys(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)`` of every leaf; tuples as lists."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from flat_keys(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(inner) if isinstance(inner, tuple) else inner


def covers(names: Collection[str], key: str) -> bool:
    """Whether ``key`` is one of ``names``, or lies in a section that is."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def check_names(names: Sequence[str], *configs: Mapping[str, Any]) -> None:
    """Refuse a name in ``resume.allow_changes`` that is neither a key nor a section of one of ``configs``.

    Raises:
        UserError: naming it, and the nearest key.
    """
    keys = {key for config in configs for key, _ in flat_keys(config)}
    known = {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 2)}
    for name in names:
        if name not in known:
            close = nearest(name, sorted(known))
            raise UserError(
                f"resume.allow_changes names {name}, which is no key of the configuration; "
                + (f"did you mean {close}?" if close else "name keys as they are written on the command line")
            )
