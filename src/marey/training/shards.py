"""Checkpoints of sharded runs: folders, written by all ranks together through ``torch.distributed.checkpoint``.

A folder holds what a single-file checkpoint holds, in the same tree: ``values.pt`` is that tree, sealed, with a name in
the place of every sharded tensor; the ``.distcp`` files hold the shards by these names, and can be read on any number
of ranks; ``complete.json`` comes last, with the SHA-256 of every other file. It all happens under a temporary name.
"""

from __future__ import annotations

import errno
import io
import json
import pickle
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from marey.core.files import sha256, sync_folder, write_json
from marey.training.folders import MARKER, VALUES, discard, temporary_beside
from marey.training.sealed import save_sealed

METADATA = ".metadata"
_NAMED = "sharded tensor"
T = TypeVar("T")
Make = Callable[[torch.Size, torch.dtype], Tensor]


def save_folder(content: Mapping[str, Any], path: Path) -> None:
    """Write ``content`` (a tree whose sharded tensors are DTensors) to the folder ``path``, whole or not at all.

    Every rank calls it, with its own shards; what is not sharded is rank 0's.

    Raises:
        OSError: on all ranks, when the disk refuses on any; an earlier checkpoint of that name stays as it was.
    """
    first = dist.get_rank() == 0
    shards: dict[str, Tensor] = {}
    values = _without_shards(content, "", shards)
    names: list[Any] = [secrets.token_hex(4)]
    dist.broadcast_object_list(names, src=0)
    folder = temporary_beside(path, names[0])
    try:
        _together(lambda: folder.mkdir(parents=True) if first else None)
        writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        save(shards, storage_writer=writer)
        _together(lambda: save_sealed(values, folder / VALUES) if first else None)
        listed = _together(lambda: {name: _facts(folder / name) for name in _own_files(folder, dist.get_rank())})
        _together(lambda: _complete(folder, path, listed) if first else None)
    except (CheckpointException, OSError) as error:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
        raise _as_os_error(error, path) from error


def _without_shards(tree: Any, where: str, shards: dict[str, Tensor]) -> Any:
    if isinstance(tree, DTensor):
        shards[where] = tree
        return {_NAMED: where}
    if isinstance(tree, Mapping):
        return {
            key: _without_shards(value, f"{where}/{key}" if where else str(key), shards) for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        return type(tree)(_without_shards(value, f"{where}/{i}", shards) for i, value in enumerate(tree))
    return tree


def _together(work: Callable[[], T]) -> list[T]:
    """Every rank's result of ``work``; an OSError of any is raised by all, so that none waits for another in vain."""
    result: Any = None
    failed: tuple[int | None, str] | None = None
    try:
        result = work()
    except OSError as error:
        failed = (error.errno, error.strerror or str(error))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (failed, result))
    for refused, _ in every:
        if refused is not None:
            raise OSError(*refused)
    return [value for _, value in every]


def _own_files(folder: Path, rank: int) -> list[str]:
    own = [file.name for file in folder.iterdir() if file.name.startswith(f"__{rank}_")]
    return sorted([*own, *((METADATA, VALUES) if rank == 0 else ())])


def _facts(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def _complete(folder: Path, path: Path, listed: list[dict[str, Any]]) -> None:
    files = {name: facts for own in listed for name, facts in own.items()}
    if not all((folder / name).is_file() for name in files):
        raise OSError(errno.ENOENT, "other ranks' files are not there: it must lie on a disk that all nodes share")
    write_json(folder / MARKER, {"format": 1, "files": dict(sorted(files.items()))})
    sync_folder(folder)
    # A folder cannot be renamed onto one that holds something: one of this name is of an abandoned future.
    if path.exists():
        discard(path)
    folder.rename(path)
    sync_folder(path.parent)


def _as_os_error(error: BaseException, path: Path) -> OSError:
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), str(path))
    assert isinstance(error, CheckpointException)
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, OSError):
        return OSError(cause.errno, cause.strerror or str(cause), str(path))
    return OSError(None, " ".join(str(cause).split())[:200] or type(cause).__name__, str(path))


def whole(path: Path) -> bool:
    """Whether every file of the folder is there and is, byte for byte, what was written. Reads all of it.

    Raises:
        OSError: as the system refuses.
    """
    try:
        files = json.loads((path / MARKER).read_text(encoding="utf-8"))["files"]
        return VALUES in files and all(
            Path(name).name == name and (path / name).is_file() and _facts(path / name) == facts
            for name, facts in files.items()
        )
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return False


def load_folder(path: Path, *, make: Make | None = None, only: Collection[str] | None = None) -> dict[str, Any]:
    """What ``save_folder`` wrote. Executes nothing from the files. No rank waits for another.

    make: gives the tensor to read into, whole or sharded, of a global shape and dtype (None: whole, on the CPU). only:
    entries whose sharded tensors are read (None: all); those of the others stay names.
    """
    content: dict[str, Any] = load_values(path)
    reader = _Reader(path)
    known = reader.read_metadata().state_dict_metadata
    wanted = {key: value for key, value in content.items() if only is None or key in only}
    into: dict[str, Any] = {}
    for name in _names(wanted):
        facts: Any = known[name]
        into[name] = (make or _on_cpu)(facts.size, facts.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that every rank reads by itself is what is wanted
        load(into, storage_reader=reader, no_dist=True)
    return {**content, **{key: _with_shards(value, into) for key, value in wanted.items()}}


def load_values(path: Path) -> dict[str, Any]:
    """All but the sharded tensors."""
    content: dict[str, Any] = torch.load(path / VALUES, map_location="cpu", weights_only=True)
    return content


def _on_cpu(size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype)


def _names(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        if tree.keys() == {_NAMED}:
            yield tree[_NAMED]
        else:
            for value in tree.values():
                yield from _names(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _names(value)


def _with_shards(tree: Any, shards: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {_NAMED}:
            return shards[tree[_NAMED]]
        return {key: _with_shards(value, shards) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_with_shards(value, shards) for value in tree)
    return tree


class _Unpickler(pickle.Unpickler):
    """PyTorch keeps the list of shards as a pickle: classes that only describe tensors are let in, nothing else."""

    _modules = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")

    def find_class(self, module: str, name: str) -> Any:
        plain = (module, name) in {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}
        dtype = module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout))
        own = module in self._modules and name in {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
            "_StorageInfo",
        }
        if plain or dtype or own:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"Unsupported global: {module}.{name}")


class _Reader(FileSystemReader):
    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        data = (Path(self.path) / METADATA).read_bytes()
        metadata: Metadata = _Unpickler(io.BytesIO(data)).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
