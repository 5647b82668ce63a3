"""``marey inspect``: any store, manifest, checkpoint or run folder in plain words."""

from __future__ import annotations

import json
from pathlib import Path

from marey.core.errors import UserError
from marey.evaluation.wording import aligned, size

VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".gif", ".ts")


def inspect_text(path: Path, *, show_config: bool = False) -> str:
    """What ``path`` is, in about ten lines. show_config: a run's or checkpoint's resolved configuration too.

    Raises UserError where there is nothing at ``path`` or nothing known, and what reading it raises.
    """
    path = path.expanduser()
    return "\n".join(_lines(path, show_config=show_config))


def _lines(path: Path, *, show_config: bool) -> list[str]:
    # Each kind's reader is imported when it is met: a receipt needs no torch, and torch takes seconds.
    if path.name.endswith((".lance", ".lance.partial")) or (path / "_versions").is_dir():
        from marey.evaluation.inspect_store import store_lines

        if not path.exists() and not path.with_name(path.name + ".partial").exists():
            raise UserError(f"{path} does not exist; build a store with `marey ingest FOLDER {path}`")
        _no_config(show_config, path, "a frame store")
        return store_lines(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; give a frame store, a manifest, a checkpoint or a run folder")
    if path.is_dir():
        if (path / "receipt.json").exists():
            from marey.evaluation.inspect_run import run_lines

            return run_lines(path, show_config=show_config)
        if (path / "manifest.csv").exists():
            return _manifest_lines(path / "manifest.csv", show_config=show_config)
        return _folder_lines(path, show_config=show_config)
    if path.suffix == ".json":
        from marey.evaluation.inspect_run import run_lines

        return run_lines(path, show_config=show_config)
    if path.suffix == ".csv":
        from marey.evaluation.inspect_manifest import csv_columns, is_manifest

        if not is_manifest(csv_columns(path)):
            raise UserError(
                f"{path} is a CSV and no manifest of latents (clip_id, path, length_frames); if it lists videos, "
                f"`marey ingest {path} OUT.lance` makes a store of them"
            )
        return _manifest_lines(path, show_config=show_config)
    if path.suffix in (".parquet", ".pq"):
        return _parquet_lines(path, show_config=show_config)
    if path.suffix.lower() in VIDEO_SUFFIXES:
        raise UserError(f"{path} is a video; `marey ingest {path} OUT.lance` makes a store of it")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; give a frame store, a manifest, a checkpoint or a run folder")
    from marey.evaluation.checkpoint_file import is_safetensors
    from marey.evaluation.inspect_checkpoint import checkpoint_lines, safetensors_lines

    if is_safetensors(path):
        _no_config(show_config, path, "a safetensors file")
        return safetensors_lines(path)
    return checkpoint_lines(path, show_config=show_config)


def _manifest_lines(path: Path, *, show_config: bool) -> list[str]:
    from marey.evaluation.inspect_manifest import manifest_lines

    _no_config(show_config, path, "a manifest")
    return manifest_lines(path)


def _no_config(asked: bool, path: Path, what: str) -> None:
    if asked:
        raise UserError(f"{path} is {what} and holds no run's configuration; leave out --config")


def _folder_lines(path: Path, *, show_config: bool) -> list[str]:
    """A folder that is none of ours, but may hold some."""
    stores = sorted(path.glob("*.lance"))
    latents = sorted(path.glob("*/manifest.csv"))
    checkpoints = sorted(path.glob("*.ckpt"))
    runs = sorted(receipt.parent for receipt in path.glob("*/receipt.json"))
    videos = sum(1 for file in path.iterdir() if file.suffix.lower() in VIDEO_SUFFIXES)
    found = [
        (name, f"{len(items)}, the last {items[-1]}")
        for name, items in (("runs", runs), ("checkpoints", checkpoints), ("stores", stores), ("latents", latents))
        if items
    ]
    if videos:
        found.append(("videos", f"{videos}; `marey ingest {path} OUT.lance` makes a store of them"))
    if not found:
        raise UserError(
            f"{path} is a folder that holds no run, checkpoint, store, manifest or video; give one of those"
        )
    _no_config(show_config, path, "a folder")
    return [f"{path}: a folder; give one of these to see more", *aligned(found)]


def _parquet_lines(path: Path, *, show_config: bool) -> list[str]:
    import pyarrow.parquet as pq
    from pyarrow.lib import ArrowException

    from marey.evaluation.inspect_manifest import is_manifest

    try:
        file = pq.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file ({error}); write it again") from error
    if is_manifest(list(file.schema_arrow.names)):
        return _manifest_lines(path, show_config=show_config)
    _no_config(show_config, path, "a table")
    own = (file.schema_arrow.metadata or {}).get(b"marey")
    rows = [("rows", f"{file.metadata.num_rows:,}"), ("columns", ", ".join(file.schema_arrow.names))]
    if own is None:
        return [f"{path}: a Parquet table that Marey did not write", *aligned(rows)]
    about = json.loads(own)
    rows += [
        ("one per", str(about.get("per"))),
        ("from", f"{about.get('source')} through {about.get('checkpoint')} ({about.get('weights')} weights)"),
    ]
    return [
        f"{path}: features written by `marey embed`, {size(path.stat().st_size)}",
        *aligned(rows),
    ]
