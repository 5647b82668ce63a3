"""Refusals a person reads: one sentence with what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """The request cannot be done as asked. Its text is one sentence; the program ends with exit code 2."""


class MachineError(UserError):
    """It is this machine that cannot do it now, whatever the clip or file in hand: never a reason to leave one out."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice closest in spelling to ``name``, or None when nothing is close."""
    found = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return found[0] if found else None
