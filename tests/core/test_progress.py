from __future__ import annotations

import pytest

from marey.core.progress import Progress


@pytest.mark.parametrize(
    ("done", "unit", "words"),
    [(12345678, "files", "12,345,678 of 98,765,432 files"), (1234567.25, "MB", "1,234,567.2 of 98,765,432.0 MB")],
)
def test_large_counts_keep_every_digit(done, unit, words, capsys):
    with Progress("work", total=98_765_432, unit=unit) as progress:
        progress.advance(done)
        assert words in progress.line()
    assert f"work: {words.split(' of ')[0]} {unit} in" in capsys.readouterr().err
