"""Videos in a column of a table (Arrow or Parquet), as Hugging Face ``datasets`` keeps them.

A video is a struct of ``bytes`` and ``path``. Bytes are read where they lie: in Arrow as a stretch of the file, in
Parquet a row group at a time.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from marey.core.errors import UserError, nearest
from marey.pixels.footage import Blob, Span, WholeFile
from marey.pixels.media import Unreadable, modified_ns, regular_size


class Row(NamedTuple):
    """A row of a table of videos: bytes, or a path as it is written there, or neither."""

    blob: Blob | None
    path: str | None
    label: str | int | None
    """By its name where the column names its classes."""
    others: dict[str, Any]
    """Further columns of plain values."""


class Columns(NamedTuple):
    """Which column is what."""

    video: str
    label: str | None
    names: list[str] | None
    """Of the labels, where the column is a ``ClassLabel``."""
    others: list[str]

    @property
    def plain(self) -> list[str]:
        """All but the videos'."""
        return ([self.label] if self.label else []) + self.others

    def row(self, blob: Blob | None, path: Any, values: dict[str, Any]) -> Row:
        """A row of these columns."""
        label = values.get(self.label) if self.label else None
        others = {name: values[name] for name in self.others if values.get(name) is not None}
        return Row(blob, path if isinstance(path, str) and path else None, _label(label, self.names), others)


@dataclass(frozen=True)
class Cell:
    """The bytes of one row of a Parquet file. A process holds the row group that it read last."""

    path: str
    group: int
    row: int
    """Within its row group."""
    column: str
    about: float
    """How many bytes, roughly."""

    def size(self) -> float:
        """Bytes, roughly."""
        return self.about

    def identity(self) -> list[Any]:
        """The file's path, size and time of change, and where in it."""
        return [*WholeFile(self.path).identity(), self.group, self.row, self.column]

    def opened(self) -> IO[bytes]:
        """The bytes, in memory."""
        regular_size(self.path)
        try:
            value = _group(self.path, modified_ns(self.path), self.group, self.column)[self.row].as_py()
        except (OSError, ValueError, IndexError, KeyError, pa.ArrowException) as error:
            raise Unreadable(f"cannot be read ({_short(error)})") from None
        if not value:
            raise Unreadable("is empty (0 bytes)")
        return io.BytesIO(value)


@lru_cache(maxsize=1)
def _group(path: str, _modified_ns: int, group: int, column: str) -> Any:
    with pq.ParquetFile(path) as file:
        return _leaf(file.read_row_group(group, columns=[column]).column(0))


def rows_of(file: str, source: str, part: str | None) -> tuple[str, list[Row]]:
    """The name of the column of videos, and every row.

    ``part``: the column, where it was chosen; ``source``: as the dataset was named. Raises ``Unreadable`` for a
    damaged file, ``UserError`` for one without a column of videos, or with several and no choice.
    """
    regular_size(file)
    read = _parquet if file.lower().endswith(".parquet") else _arrow
    try:
        return read(file, source, part)
    except (OSError, ValueError, KeyError, IndexError, TypeError, pa.ArrowException) as error:
        if isinstance(error, UserError):
            raise
        raise Unreadable(f"is damaged ({_short(error)})") from None


def _arrow(file: str, source: str, part: str | None) -> tuple[str, list[Row]]:
    with pa.memory_map(file) as mapped:
        whole = mapped.read_buffer(mapped.size())
        schema, batches = _batches(whole)
        columns = _columns(schema, file, source, part)
        return columns.video, [row for batch in batches for row in _arrow_rows(file, whole, batch, columns)]


def _batches(whole: pa.Buffer) -> tuple[pa.Schema, Iterable[Any]]:
    try:
        stream = pa.ipc.open_stream(pa.BufferReader(whole))  # what save_to_disk writes
    except pa.ArrowInvalid:
        table = pa.ipc.open_file(pa.BufferReader(whole))
        return table.schema, (table.get_batch(number) for number in range(table.num_record_batches))
    return stream.schema, stream


def _arrow_rows(file: str, whole: pa.Buffer, batch: Any, columns: Columns) -> Iterator[Row]:
    batch.validate(full=True)  # offsets of a stranger's file are not to be followed unseen
    column = batch.column(columns.video)
    data, paths = (_below(column, leaf, columns.video) for leaf in _leaves(columns.video, column.type))
    values = batch.select(columns.plain).to_pylist() if columns.plain else [{}] * batch.num_rows
    spans = _spans(file, whole, data) if data is not None else [None] * batch.num_rows
    there = column.is_valid().to_pylist()
    for number, span in enumerate(spans):
        path = paths[number].as_py() if there[number] and paths is not None else None
        yield columns.row(span if there[number] else None, path, values[number])


def _spans(file: str, whole: pa.Buffer, data: Any) -> list[Span | None]:
    """Where in the file each value of a binary array lies; None for an absent one."""
    _, offsets, values = data.buffers()
    valid = data.is_valid().to_pylist()
    if values is None or values.size == 0:
        return [Span(file, 0, 0) if there else None for there in valid]
    start = values.address - whole.address
    if not 0 <= start <= whole.size - values.size:
        raise Unreadable("is compressed, so its videos cannot be read where they lie; save it without compression")
    kind = np.int64 if pa.types.is_large_binary(data.type) else np.int32
    edges = np.frombuffer(offsets, kind)[data.offset : data.offset + len(data) + 1].tolist()
    return [
        Span(file, start + edges[number], edges[number + 1] - edges[number]) if valid[number] else None
        for number in range(len(data))
    ]


def _parquet(file: str, source: str, part: str | None) -> tuple[str, list[Row]]:
    with pq.ParquetFile(file) as reader:
        columns = _columns(reader.schema_arrow, file, source, part)
        return columns.video, [
            row
            for group in range(reader.num_row_groups)
            for row in _group_rows(file, reader, group, columns, reader.schema_arrow.field(columns.video).type)
        ]


def _group_rows(file: str, reader: Any, group: int, columns: Columns, kind: pa.DataType) -> Iterator[Row]:
    data, path = _leaves(columns.video, kind)
    at = {str(reader.schema.column(i).path): i for i in range(len(reader.schema))}
    about = reader.metadata.row_group(group)
    count = about.num_rows
    table = reader.read_row_group(group, columns=columns.plain + ([path] if path else []))
    paths = _leaf(table.column(columns.video)).to_pylist() if path else [None] * count
    values = table.select(columns.plain).to_pylist() if columns.plain else [{}] * count
    there = _held(reader, about, group, at[data], data) if data else [False] * count
    each = about.column(at[data]).total_compressed_size / max(1, sum(there)) if data else 0.0
    for row in range(count):
        yield columns.row(Cell(file, group, row, data, each) if data and there[row] else None, paths[row], values[row])


def _held(reader: Any, about: Any, group: int, leaf: int, name: str) -> list[bool]:
    """For each row, whether it holds bytes; by the statistics where they decide, which costs no reading."""
    statistics = about.column(leaf).statistics
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else None
    if nulls in (0, about.num_rows):
        return [nulls == 0] * about.num_rows
    return [bool(value.is_valid) for value in _leaf(reader.read_row_group(group, columns=[name]).column(0))]


def _leaf(column: Any) -> Any:
    """The one field that was read of a struct, null where the struct is; any other column as it is."""
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], column.type)
    return values.flatten()[0] if pa.types.is_struct(values.type) else values


def _columns(schema: pa.Schema, file: str, source: str, part: str | None) -> Columns:
    raw = (schema.metadata or {}).get(b"huggingface")
    try:
        found = json.loads(raw)["info"]["features"] if raw else {}
        features = {name: found[name] for name in schema.names if isinstance(found.get(name), dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        features = {}
    kinds = {name: feature.get("_type") for name, feature in features.items()}
    video = _chosen(schema, file, part) if part is not None else _only(schema, kinds, file, source)
    plain = [name for name in schema.names if name != video and _is_plain(schema.field(name).type)]
    classes = [name for name in plain if kinds.get(name) == "ClassLabel"]
    label = "label" if "label" in plain else classes[0] if len(classes) == 1 else None
    names = features[label].get("names") if label in classes and label is not None else None
    good = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return Columns(video, label, names if good else None, [name for name in plain if name != label])


def _chosen(schema: pa.Schema, file: str, part: str) -> str:
    if part not in schema.names:
        close = nearest(part, schema.names)
        hint = f"did you mean {close}?" if close else f"it has {', '.join(schema.names) or 'none'}"
        raise UserError(f"{file} has no column {part!r}; {hint}")
    kind = schema.field(part).type
    if not (_is_video(kind) or _is_bytes(kind) or _is_text(kind)):
        raise UserError(f"{file}: column {part!r} holds {kind}, and a video is bytes, a path, or both; choose another")
    return part


def _only(schema: pa.Schema, kinds: dict[str, Any], file: str, source: str) -> str:
    fitting = [name for name in schema.names if _is_video(schema.field(name).type)]
    # Images are kept in the same way, and say that they are.
    found = [name for name in fitting if kinds.get(name, "Video") == "Video"]
    if len(found) > 1:
        raise UserError(
            f"{source} has {len(found)} columns of videos ({', '.join(found)}); choose one, as in {source}:{found[0]}"
        )
    if not found:
        raise UserError(
            f"{file} has no column of videos (its columns: {', '.join(schema.names) or 'none'}); name one that holds "
            f"bytes or paths of video files, as in {source}:COLUMN"
        )
    return str(found[0])


def _leaves(video: str, kind: pa.DataType) -> tuple[str | None, str | None]:
    """Where a column of videos keeps bytes and paths: its fields, itself, or nowhere."""
    if not pa.types.is_struct(kind):
        return (None, video) if _is_text(kind) else (video, None)
    fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    # A column in which every row leaves one of them out may have no type for it.
    data, path = fields.get("bytes", pa.null()), fields.get("path", pa.null())
    return (None if pa.types.is_null(data) else f"{video}.bytes", None if pa.types.is_null(path) else f"{video}.path")


def _below(column: Any, leaf: str | None, video: str) -> Any:
    """The array of a leaf; None where there is none."""
    if leaf is None:
        return None
    return column if leaf == video else column.field(leaf.removeprefix(f"{video}."))


def _is_video(kind: pa.DataType) -> bool:
    """A struct of bytes, a path, or both."""
    if not pa.types.is_struct(kind):
        return False
    fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    known = {"bytes": _is_bytes, "path": _is_text}
    fitting = all(name in known and (known[name](inner) or pa.types.is_null(inner)) for name, inner in fields.items())
    return fitting and any(not pa.types.is_null(inner) for inner in fields.values())


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_plain(kind: pa.DataType) -> bool:
    return _is_text(kind) or bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _label(value: Any, names: list[str] | None) -> str | int | None:
    if isinstance(value, str):
        return value or None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return None
    return value if names is None else names[value] if value < len(names) else None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
