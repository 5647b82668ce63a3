"""What Lance raises over a damaged table, as one sentence. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

FAULTS = (OSError, ValueError, RuntimeError, LookupError, pa.ArrowException)
"""What reading a table raises. A panic of Rust's is none of these, not even an ``Exception``: see ``is_panic``."""


def is_panic(error: BaseException) -> bool:
    """Whether ``error`` is a panic in Rust code, whose class cannot be imported."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, cut to a readable length."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def refusing(make: Callable[[str], Exception]) -> Iterator[None]:
    """Lance's errors and panics become ``make(first line)``; other exceptions pass."""
    try:
        yield
    except FAULTS as error:
        raise make(first_line(error)) from None
    except BaseException as error:
        if not is_panic(error):
            raise
        raise make(first_line(error)) from None
