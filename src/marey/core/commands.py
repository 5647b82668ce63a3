"""Commands that a person can copy from what the program says, whatever characters a path has."""

from __future__ import annotations

import re
import shlex

from marey.core.errors import UserError


def override(key: str, value: str) -> str:
    """``key="value"`` in Hydra's grammar, whatever characters a path has.

    Raises UserError for what the grammar cannot carry: a path with ``${``, which Hydra would interpolate.
    """
    if "${" in value:
        raise UserError(f"{value} holds ${{, which the configuration would read as a reference; rename that folder")
    # In Hydra a quote is escaped by a backslash, and backslashes are doubled only where they stand before a quote.
    escaped = ""
    for i, part in enumerate(value.split('"')):
        slashes = len(part) - len(part.rstrip("\\"))
        escaped += ('\\"' if i else "") + part + "\\" * slashes
    return f'{key}="{escaped}"'


def override_word(key: str, value: str) -> str:
    """``key=value`` as one word of a shell's command line: a plain path as it is, any other quoted for both.

    Raises UserError as ``override`` does.
    """
    plain = re.fullmatch(r"[A-Za-z0-9_./-]+", value) and ("/" in value or value.endswith(".lance"))
    return f"{key}={value}" if plain else shlex.quote(override(key, value))
