"""``marey embed``: features of every clip, or of every frame, in a file that other tools read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save

from marey import __version__
from marey.core.errors import UserError
from marey.core.files import atomic_write
from marey.evaluation.embed_stream import streamed_features
from marey.evaluation.features import (
    FeatureBatch,
    Per,
    capped_remark,
    evaluation_clips,
    open_clips,
    rate_remark,
    refusal_remark,
    short_remark,
    stream_features,
)
from marey.evaluation.loading import LoadedEncoder, Weights, load_encoder, resolve_device
from marey.pixels.episodes import EpisodeSource
from marey.pixels.reading import Refusal

SUFFIXES = (".parquet", ".safetensors")


@dataclass(frozen=True)
class Embedded:
    """What was written."""

    path: Path
    rows: int
    width: int
    per: Per

    def __str__(self) -> str:
        return f"{self.path}: {self.rows:,} rows, one per {self.per}, {self.width} features each"


def embed(
    checkpoint: Path | str,
    source: str,
    out: Path | str,
    *,
    per: Per = "clip",
    weights: Weights | None = None,
    clips_per_video: int = 1,
    batch_size: int = 16,
    device: str = "auto",
    overwrite: bool = False,
    stream: bool = False,
    say: Callable[[str], None] = print,
) -> Embedded:
    """Write the features of ``source`` to ``out`` (``.parquet`` or ``.safetensors``), whole or not at all.

    per: ``clip`` is the [CLS] output of each clip; ``frame`` the mean patch output at each position along
    time. stream: feed each episode frame by frame to a block-causal encoder that remembers the newest frames,
    as many as a clip has: a row per position along time, with the [CLS] output as of then (``clip``) or that
    position's mean patch output (``frame``). Columns (or, in safetensors, tensors): source, episode, clip,
    frame (one row per frame only), start_step, start_s (null, or NaN, where the source has no rate), label
    (-1: none), embedding. start_step and start_s say where the row's own pixels begin. Raises UserError for
    another suffix, an existing ``out`` without ``overwrite``, an encoder that cannot be streamed, and what
    loading and reading raise.
    """
    out = Path(out)
    if per not in ("clip", "frame"):
        raise UserError(f"--per {per} is not known; use clip or frame")
    if out.suffix not in SUFFIXES:
        raise UserError(f"{out} must end in {' or '.join(SUFFIXES)}; what it ends in decides the format")
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists already; give --overwrite to replace it, or another name")
    where = resolve_device(device)
    loaded = load_encoder(checkpoint, weights=weights, device=where)
    episodes = open_clips(source, loaded.preprocessing)
    remarks = [loaded.info.remark(), rate_remark(episodes, loaded.preprocessing)]
    if stream:
        if clips_per_video != 1:
            raise UserError(f"--clips-per-video {clips_per_video} does not go with --stream, which takes every frame")
        features = streamed_features(loaded, episodes, per=per, device=where)
        rows_per: Per = "frame"
    else:
        clips = evaluation_clips(episodes, loaded.preprocessing, clips_per_episode=clips_per_video)
        remarks += [short_remark(clips), capped_remark(clips)]
        features = stream_features(
            {"encoder": loaded.encoder}, loaded.preprocessing, clips, per=per, batch_size=batch_size, device=where
        )
        rows_per = per
    for remark in remarks:
        if remark:
            say(f"note: {remark}")
    refused: list[Refusal] = []
    write = _write_parquet if out.suffix == ".parquet" else _write_safetensors
    streamed = {"of": "patches" if per == "frame" else "cls", "frames": loaded.preprocessing.num_frames}
    metadata = _metadata(loaded, source, rows_per, stream=streamed if stream else None)
    rows = write(out, _tables(features, episodes, loaded, rows_per, refused), metadata)
    remark = refusal_remark(refused)
    if remark:
        say(f"note: {remark}")
    return Embedded(out, rows, loaded.encoder.embed_dim, rows_per)


def _metadata(loaded: LoadedEncoder, source: str, per: Per, *, stream: dict[str, Any] | None) -> dict[str, str]:
    info = loaded.info
    return {
        "marey": json.dumps(
            {
                "version": __version__,
                "checkpoint": str(info.path.resolve()),
                "weights": info.weights,
                "step": info.step,
                "model": loaded.model.model_dump(mode="json"),
                "source": source,
                "per": per,
                "stream": stream,
            }
        )
    }


def _tables(
    stream: Iterator[FeatureBatch],
    source: EpisodeSource,
    loaded: LoadedEncoder,
    per: Per,
    refused: list[Refusal],
) -> Iterator[pa.Table]:
    """A table per batch that has rows. UserError at the end when none had."""
    empty = True
    for found in stream:
        refused.extend(found.refused)
        if len(found.episodes):
            empty = False
            yield _rows(found, source, loaded, per)
    if empty:
        raise UserError(f"no clip of {source.path} could be read; the first: {refused[0].reason}")


def _rows(found: FeatureBatch, source: EpisodeSource, loaded: LoadedEncoder, per: Per) -> pa.Table:
    """One batch as a table: a row per clip, or per position along time of each clip."""
    value = found.values["encoder"]
    each = value.shape[1] if per == "frame" else 1
    episode, clip, start = (np.repeat(x, each) for x in (found.episodes, found.clips, found.starts))
    columns: dict[str, Any] = {
        "source": pa.array([source.files[e] for e in episode], pa.string()),
        "episode": pa.array(episode, pa.int64()),
        "clip": pa.array(clip, pa.int64()),
    }
    if per == "frame":
        frame = np.tile(np.arange(each), len(found.episodes))
        columns["frame"] = pa.array(frame, pa.int64())
        start = start + frame * loaded.preprocessing.tubelet_size * loaded.preprocessing.frame_stride
        # A short episode's last frame stands in for those it lacks; so do its step and time.
        start = np.minimum(start, np.asarray(source.lengths)[episode] - 1)
    columns["start_step"] = pa.array(start, pa.int64())
    columns["start_s"] = (
        pa.nulls(len(start), pa.float64()) if source.rate is None else pa.array(start / source.rate, pa.float64())
    )
    labels = np.full(len(episode), -1) if source.labels is None else np.asarray(source.labels)[episode]
    columns["label"] = pa.array(labels, pa.int64())
    flat = value.reshape(-1, value.shape[-1])
    offsets = pa.array(np.arange(len(flat) + 1, dtype=np.int64) * flat.shape[1], pa.int32())
    columns["embedding"] = pa.ListArray.from_arrays(offsets, pa.array(flat.numpy().reshape(-1), pa.float32()))
    return pa.table(columns)


def _write_parquet(out: Path, tables: Iterator[pa.Table], metadata: dict[str, str]) -> int:
    rows = 0
    first = next(tables)
    with _whole(out) as file, pq.ParquetWriter(file, first.schema.with_metadata(metadata)) as writer:
        table: pa.Table | None = first
        while table is not None:
            writer.write_table(table.cast(writer.schema))
            rows += len(table)
            table = next(tables, None)
    return rows


def _write_safetensors(out: Path, tables: Iterator[pa.Table], metadata: dict[str, str]) -> int:
    table = pa.concat_tables(tables).combine_chunks()
    width = len(table["embedding"][0])
    flat = np.concatenate([chunk.values.to_numpy() for chunk in table["embedding"].chunks])
    tensors = {"embedding": torch.from_numpy(flat.reshape(-1, width).copy())}
    for name in table.column_names:
        if name not in ("embedding", "source"):
            values = table[name].cast(pa.float64() if name == "start_s" else pa.int64())
            tensors[name] = (
                torch.from_numpy(values.fill_null(np.nan).to_numpy().copy())
                if name == "start_s"
                else (torch.from_numpy(values.to_numpy().copy()))
            )
    # Tensors hold no text: the files are listed once, and `source` says which of them each row is from.
    names = table["source"].to_pylist()
    files = list(dict.fromkeys(names))
    place = {name: i for i, name in enumerate(files)}
    tensors["source"] = torch.tensor([place[name] for name in names], dtype=torch.int64)
    with _whole(out) as file:
        file.write(save(tensors, metadata={**metadata, "sources": json.dumps(files, ensure_ascii=False)}))
    return len(names)


@contextmanager
def _whole(out: Path) -> Iterator[IO[Any]]:
    try:
        with atomic_write(out) as file:
            yield file
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}); give another place") from error
