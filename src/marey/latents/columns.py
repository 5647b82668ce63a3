"""Reading and checking the columns of a manifest, whole columns at a time."""

from __future__ import annotations

import codecs
import csv
import io
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from marey.core.errors import UserError, nearest

REQUIRED = ("clip_id", "path", "length_frames")
OPTIONAL = ("height", "width", "physical_key", "text", "start", "fps", "sha256", "augmentation")


def fail(file: Path, row: int, column: str, problem: str) -> UserError:
    """The error of one cell."""
    return UserError(f"{file}, row {row}, column {column}: {problem}.")


def refuse(file: Path, column: str, bad: NDArray[np.bool_], values: Any, problem: str) -> None:
    """Raise UserError for the first row where ``bad`` (bool ``[rows]``) is true, with its entry of ``values``."""
    if bad.any():
        row = int(bad.argmax())
        value = values[row].as_py() if hasattr(values, "type") else values[row].item()
        raise fail(file, row + 1, column, f"{value!r} {problem}")


def _reason(error: BaseException) -> str:
    """A parser's complaint in one printable line."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return "".join(char if char.isprintable() else "?" for char in line)[:160].rstrip(". ")


def _header(file: Path) -> list[str]:
    """Column names. The whole file is checked to be UTF-8, because the CSV parser cannot say which row is not."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    first: str | None = None
    try:
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                text = decoder.decode(block)
                first = text if first is None else first
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _not_utf8(file) from None
    return _rows(first or "", limit=1)[0]


def _rows(text: str, *, limit: int | None = None) -> list[list[str]]:
    """Fields of the first rows that are not blank, at least one row of one field."""
    try:
        return list(islice(filter(None, csv.reader(io.StringIO(text, newline=""))), limit)) or [[""]]
    except csv.Error:  # a field without end: the parser of the whole file says so better
        return [[""]]


def _not_utf8(file: Path) -> UserError:
    raw = file.read_bytes()
    if raw[:4] == b"PAR1":
        return UserError(f"{file}: it is a Parquet file; give it a name that ends in .parquet.")
    if raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return UserError(f"{file}: it is written in UTF-16; save it as UTF-8.")
    try:
        raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # A mark in the place of the bad byte: it is then in the last field of the last row.
        rows = _rows(raw[: error.start].decode("utf-8-sig") + "?")
    if len(rows) < 2:
        return UserError(f"{file}: its header is not UTF-8; save the manifest as UTF-8.")
    column = rows[0][min(len(rows[-1]), len(rows[0])) - 1]
    return fail(file, len(rows) - 1, column, "the value is not UTF-8; save the manifest as UTF-8")


def read_csv(file: Path) -> pa.Table:
    """Every column as strings, quoted commas and line breaks kept; a row of another width is refused.

    Raises UserError naming file, row and column.
    """
    bad: list[Any] = []

    def remember(row: Any) -> str:
        bad.append(row)
        return "skip"

    names = _header(file)
    try:
        table = pa.csv.read_csv(
            file,
            # One thread: only then does the parser know row numbers; a million rows still take a second.
            read_options=pa.csv.ReadOptions(use_threads=False),
            parse_options=pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=remember),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
    except (pa.ArrowException, KeyError) as error:
        raise UserError(
            f"{file}: not a readable CSV manifest ({_reason(error)}); write UTF-8 with a header row."
        ) from None
    if bad:
        # The parser counts the header as row 1.
        row = "" if bad[0].number is None else f", row {bad[0].number - 1}"
        raise UserError(
            f"{file}{row}, column {names[min(bad[0].actual_columns, len(names)) - 1]}: the row has "
            f"{bad[0].actual_columns} fields where the header has {bad[0].expected_columns}; "
            "quote a text that holds a comma."
        )
    return table


def read_parquet(file: Path) -> pa.Table:
    """The table as stored. Raises UserError for a file that is none."""
    try:
        return pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable Parquet manifest ({_reason(error)}); write it again.") from None


def check_columns(file: Path, names: list[str]) -> tuple[str, ...]:
    """The columns that a manifest does not know. Raises UserError for a missing, repeated or misspelt one."""
    known = REQUIRED + OPTIONAL
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{file}: column {twice[0] or repr('')} appears twice; keep one.")
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        # As written: a blank, a capital or another separator is then seen.
        found = ", ".join(repr(name) for name in names[:12])[:160]
        raise UserError(
            f"{file}: column {missing[0]} is missing among {found}; a manifest needs {', '.join(REQUIRED)}, "
            "separated by commas."
        )
    ignored = tuple(name for name in names if name not in known)
    for name in ignored:
        close = nearest(name.lower(), known)
        # A near miss of a known column is a typing error; anything else is the user's own and is left alone.
        if close is not None and close not in names and abs(len(close) - len(name)) <= 2:
            raise UserError(f"{file}: column {name} is not one a manifest knows; did you mean {close}?")
    return ignored


def _as_strings(column: Any) -> Any:
    """Strings with surrounding blanks removed and empty values null."""
    flat = pc.utf8_trim_whitespace(column.cast(pa.string()).combine_chunks())
    return pc.if_else(pc.equal(flat, ""), pa.scalar(None, pa.string()), flat)


def texts(file: Path, name: str, column: Any) -> Any:
    """A text column as Arrow strings ``[rows]``, empty values null.

    Raises UserError for another type, a missing value in a required column, or a checksum that is none.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_null(column.type)):
        raise fail(file, 1, name, f"holds {column.type}, not text; store it as strings")
    if name == "text":  # blanks inside a text are its own
        flat = column.cast(pa.string()).combine_chunks()
        values = pc.if_else(pc.equal(pc.utf8_trim_whitespace(flat), ""), pa.scalar(None, pa.string()), flat)
    else:
        values = _as_strings(column)
    if name in REQUIRED:
        absent = values.is_null().to_numpy(zero_copy_only=False)
        if absent.any():
            raise fail(file, int(absent.argmax()) + 1, name, "the value is missing")
    if name == "sha256":
        values = pc.utf8_lower(values)
        bad = pc.invert(pc.match_substring_regex(values, "^[0-9a-f]{64}$")).fill_null(False)
        refuse(file, name, bad.to_numpy(zero_copy_only=False), values, "is not 64 hexadecimal digits")
    return values


def whole_numbers(file: Path, name: str, column: Any, least: int) -> NDArray[np.int64]:
    """int64 ``[rows]``. Raises UserError for a value that is missing, no whole number or below ``least``."""
    if pa.types.is_integer(column.type):
        values = column.combine_chunks()
        wide = pa.types.is_uint64(values.type)
        if wide:
            too_big = pc.greater(values, pa.scalar(2**63 - 1, pa.uint64())).fill_null(False)
            refuse(file, name, too_big.to_numpy(zero_copy_only=False), values, "is too large")
    elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        text = _as_strings(column)
        bad = pc.invert(pc.match_substring_regex(text, r"^[+-]?[0-9]{1,18}$")).fill_null(False)
        refuse(file, name, bad.to_numpy(zero_copy_only=False), text, "is not a whole number")
        values = pc.cast(pc.utf8_ltrim(text, "+"), pa.int64())
    else:
        raise fail(file, 1, name, f"holds {column.type}, not whole numbers")
    absent = values.is_null().to_numpy(zero_copy_only=False)
    if absent.any():
        raise fail(file, int(absent.argmax()) + 1, name, "the value is missing")
    numbers: NDArray[np.int64] = values.to_numpy(zero_copy_only=False).astype(np.int64)
    refuse(file, name, numbers < least, numbers, f"is below {least}")
    return numbers


def rates(file: Path, column: Any) -> NDArray[np.float64]:
    """float64 ``[rows]``. Raises UserError for a value that is missing or no positive finite number."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        text = _as_strings(column)
        number = r"^[+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
        bad = pc.invert(pc.match_substring_regex(text, number)).fill_null(False)
        refuse(file, "fps", bad.to_numpy(zero_copy_only=False), text, "is not a positive number")
        values = pc.cast(pc.utf8_ltrim(text, "+"), pa.float64())
    elif pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
        values = column.combine_chunks().cast(pa.float64())
    else:
        raise fail(file, 1, "fps", f"holds {column.type}, not numbers")
    absent = values.is_null().to_numpy(zero_copy_only=False)
    if absent.any():
        raise fail(file, int(absent.argmax()) + 1, "fps", "the value is missing")
    rates: NDArray[np.float64] = values.to_numpy(zero_copy_only=False).astype(np.float64)
    refuse(file, "fps", ~(np.isfinite(rates) & (rates > 0)), rates, "is not a positive number")
    return rates
