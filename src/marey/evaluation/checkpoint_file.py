"""Reading a checkpoint file without running what is in it, and saying why one cannot be read."""

from __future__ import annotations

import hashlib
import math
import pickle
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from marey.core.errors import UserError
from marey.core.files import UNREADABLE, read_seal, seal_holds
from marey.evaluation.inspect_export import is_program
from marey.evaluation.run_folder import read_receipt

SHARDED_MARKER = "complete.json"
"""Ends the folder that a sharded run writes as its checkpoint."""
_ZIP_MAGIC = b"PK\x03\x04"
_OLD_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9c"


def is_safetensors(path: Path) -> bool:
    """Whether the file is safetensors: by its suffix, or eight bytes of length and a JSON object."""
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size


def read_archive(path: Path, *, wanted: str = "a .ckpt file written by `marey train`") -> Any:
    """Whatever ``torch.save`` wrote, tensors mapped from disk on demand; executes nothing of the file.

    A file that carries the seal of `marey train` is checked against it, byte for byte; ``sealed`` says whether it
    does. ``wanted``: what a refusal asks for instead.

    Raises UserError: missing, a folder, empty, a safetensors file, not written by ``torch.save``, damaged, or
    holding Python objects that only executing code could rebuild.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; give a checkpoint file (a run keeps them in its checkpoint.dirpath)")
    if (path / SHARDED_MARKER).is_file():
        raise UserError(
            f"{path} is the checkpoint of a sharded run, a folder with a file for each rank; make one file of it with "
            f"`python -m marey.training.consolidate {shlex.quote(str(path))} OUT.ckpt` and give that"
        )
    if path.is_dir():
        places = ("*.ckpt", "checkpoints/*.ckpt", "*/checkpoints/*.ckpt")
        found = next((files for place in places if (files := sorted(path.glob(place)))), [])
        hint = f"try {found[-1]}" if found else _hint_of_run(path)
        raise UserError(f"{path} is a folder, a checkpoint file is needed; {hint}")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; give {wanted}")
    if is_safetensors(path):
        raise UserError(
            f"{path} is a safetensors file, which holds weights without the configuration and preprocessing "
            "that belong to them; give the .ckpt file of the training run instead"
        )
    with path.open("rb") as file:
        magic = file.read(len(_OLD_TORCH_MAGIC))
    if not magic.startswith(_ZIP_MAGIC):
        what = "in PyTorch's format of before 2020" if magic == _OLD_TORCH_MAGIC else "not a PyTorch checkpoint"
        raise UserError(f"{path} is {what}; give {wanted}")
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is damaged: the file ends before its index; copy it again or give another checkpoint")
    if is_program(path):
        raise UserError(
            f"{path} is a program that `marey export` traced, from which weights are not taken back; give {wanted}"
        )
    try:
        damaged = read_seal(path) is not None and not seal_holds(path)
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UNREADABLE as error:
        text = str(error).strip()
        if isinstance(error, pickle.UnpicklingError) and ("nsupported global" in text or "nsupported class" in text):
            raise UserError(
                f"{path} holds Python objects beside tensors and plain values, and rebuilding them would execute "
                f"code from the file; it was not loaded: give {wanted}, or ask its author for the weights alone"
            ) from error
        reason = text.splitlines()[0][:120] if text else type(error).__name__
        raise UserError(f"{path} cannot be read as a PyTorch checkpoint ({reason}); give another one") from error
    if damaged:
        raise UserError(
            f"{path} is damaged: its content is not what was written (its SHA-256 does not match); copy it again or "
            "give another checkpoint"
        )
    return content


def sealed(path: Path) -> bool:
    """Whether the file ends with the seal of `marey train`: written to its end, and checked whenever it is read."""
    return read_seal(path) is not None


def weights_hash(state: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of the tensors of a state dictionary, by name: the name, dtype, shape and bytes of each.

    Equal for two runs that end with the same weights, bit for bit, whenever and wherever they were trained.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hint_of_run(folder: Path) -> str:
    """Where a run folder's receipt says that its checkpoints are."""
    try:
        named = read_receipt(folder).get("checkpoint_dir")
    except UserError:
        named = None
    if not isinstance(named, str) or not named:
        return "`marey inspect` on a run folder says where its checkpoints are"
    files = sorted(Path(named).glob("*.ckpt"))
    return f"this run's are in {named}: try {files[-1]}" if files else f"this run's go to {named}, which holds none"


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A Marey encoder checkpoint: the top-level dictionary, with ``marey``, ``state_dict`` and maybe
    ``state_dict_ema``.

    Raises UserError as ``read_archive`` does, and for a file that is a checkpoint of something else.
    """
    content = read_archive(path)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise UserError(f"{path} has no `state_dict`; give a .ckpt file written by `marey train`")
    about = content.get("marey")
    if not isinstance(about, dict):
        raise UserError(
            f"{path} does not say what it is (no `marey` entry): it was not written by `marey train`, so its "
            "preprocessing is unknown; give a checkpoint that was"
        )
    if about.get("format") != 1:
        raise UserError(
            f"{path} has checkpoint format {about.get('format')!r} and this version reads format 1; "
            "update Marey or give another checkpoint"
        )
    return content


def starting_share(ema: dict[str, Any]) -> float:
    """The share of the slow copy that is still the weights it started from: the product of its decays, 0..1.

    One update keeps ``decay ** update_every`` of the copy when the rule compensates for the steps between two
    updates, ``decay`` when it does not.
    """
    kept = float(ema["decay"])
    if ema.get("compensate", True):
        kept **= int(ema["update_every"])
    return math.pow(kept, int(ema["updates"]))
