"""``marey inspect``: any store, manifest, checkpoint or run folder in plain words."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from marey.core.errors import UserError
from marey.evaluation.run_folder import run_part_lines
from marey.evaluation.wording import aligned, size


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
            raise UserError(f"{path} does not exist; build a store with `marey ingest FOLDER {shlex.quote(str(path))}`")
        _no_config(show_config, path, "a frame store")
        return store_lines(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; give a frame store, a manifest, a checkpoint or a run folder")
    if path.is_dir():
        from marey.evaluation.inspect_export import export_lines, is_export

        if is_export(path):
            _no_config(show_config, path, "an exported encoder")
            return export_lines(path)
        if (path / "receipt.json").exists():
            from marey.evaluation.inspect_run import run_lines

            return run_lines(path, show_config=show_config)
        if (path / "complete.json").is_file():
            from marey.evaluation.inspect_checkpoint import checkpoint_lines

            return checkpoint_lines(path, show_config=show_config)
        if (path / "manifest.csv").exists():
            return _manifest_lines(path / "manifest.csv", show_config=show_config)
        return run_part_lines(path) or _folder_lines(path, show_config=show_config)
    part = run_part_lines(path)
    if part:
        _no_config(show_config, path, "a file of a run")
        return part
    if path.suffix == ".json":
        from marey.evaluation.inspect_run import run_lines

        return run_lines(path, show_config=show_config)
    if path.suffix == ".csv":
        from marey.evaluation.inspect_manifest import csv_columns, is_manifest

        if is_manifest(csv_columns(path)):
            return _manifest_lines(path, show_config=show_config)
    if path.suffix in (".parquet", ".pq"):
        return _parquet_lines(path, show_config=show_config)
    from marey.pixels.listfile import LIST_SUFFIXES
    from marey.pixels.media import VIDEO_SUFFIXES

    if path.suffix.lower() in {*VIDEO_SUFFIXES, ".tar"}:
        what = "an archive" if path.suffix.lower() == ".tar" else "a video"
        raise UserError(f"{path} is {what}; `{_ingest(path)}` makes a store of it")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; give a frame store, a manifest, a checkpoint or a run folder")
    if path.suffix.lower() in LIST_SUFFIXES:
        _no_config(show_config, path, "a list")
        return _list_lines(path)
    from marey.evaluation.inspect_export import is_program, program_lines

    if is_program(path):
        _no_config(show_config, path, "an exported program")
        return program_lines(path)
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
    from marey.evaluation.inspect_export import is_export

    stores = sorted(path.glob("*.lance"))
    latents = sorted(path.glob("*/manifest.csv"))
    checkpoints = sorted(path.glob("*.ckpt"))
    exports = sorted(config.parent for config in path.glob("*/config.json") if is_export(config.parent))
    runs = sorted(receipt.parent for receipt in path.glob("*/receipt.json") if receipt.parent not in exports)
    found = [
        (name, f"{len(items)}, the last {items[-1]}")
        for name, items in (
            ("runs", runs),
            ("checkpoints", checkpoints),
            ("exports", exports),
            ("stores", stores),
            ("latents", latents),
        )
        if items
    ]
    videos = _videos_in(path)
    if videos:
        found.append(("videos", f"{videos}; `{_ingest(path)}` makes a store of them"))
    if not found:
        raise UserError(
            f"{path} is a folder that holds no run, checkpoint, store, manifest or video; give one of those"
        )
    _no_config(show_config, path, "a folder")
    return [f"{path}: a folder; give one of these to see more", *aligned(found)]


def _ingest(path: Path) -> str:
    return f"marey ingest {shlex.quote(str(path))} OUT.lance"


def _videos_in(folder: Path) -> str:
    """What an ingest would find there and how it would read it; empty where there is no video."""
    from marey.pixels.sources import discover

    try:
        (reading,) = discover([str(folder)]).readings
    except UserError:
        return ""
    return reading.removeprefix(f"{folder}: ")


def _list_lines(path: Path) -> list[str]:
    from marey.pixels.listfile import read_list

    try:
        _, how = read_list(path)
    except UserError as error:
        what = "a CSV, no manifest of latents" if path.suffix == ".csv" else "a text file"
        raise UserError(f"{path} is {what} and, as a list of videos, faulty: {error}") from error
    return [f"{path}: a list of videos", *aligned([("read as", how), ("store", _ingest(path))])]


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
