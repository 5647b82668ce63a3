"""Weights from a file that Marey did not write: safetensors or `torch.save`, names and tensors, nothing executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from marey.core.errors import UserError, nearest
from marey.evaluation.checkpoint_file import is_safetensors, read_archive
from marey.evaluation.inspect_checkpoint import safetensors_header


@dataclass(frozen=True)
class WeightsFile:
    """The tensors of a file by name, and the text that a safetensors file carries beside them."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_weights(path: Path) -> WeightsFile:
    """All tensors of ``path``, on the CPU.

    Raises UserError: missing, a folder, damaged, holding objects that only executing code could rebuild, a checkpoint
    of Marey's own, no tensors, or several sets of them.
    """
    if (path / "model.safetensors").is_file():
        raise UserError(f"{path} is a folder; give the weights in it, {path / 'model.safetensors'}")
    if path.is_file() and path.stat().st_size and is_safetensors(path):
        header = safetensors_header(path)
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read as safetensors ({error}); copy it again") from error
        return WeightsFile(path, tensors, dict(header.get("__metadata__") or {}))
    return WeightsFile(path, _one_set(path, read_archive(path, wanted="a .safetensors or .pt file of weights")), {})


def _one_set(path: Path, content: Any) -> dict[str, Tensor]:
    """The state dictionary in ``content``: itself, or the only one inside."""
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds one {type(content).__name__}; a dictionary of tensors by name is needed")
    if "marey" in content and "state_dict" in content:
        raise UserError(f"{path} is a Marey checkpoint already; use it as it is")
    if _tensors(content):
        return _tensors(content)
    sets = {str(key): _tensors(value) for key, value in content.items() if isinstance(value, Mapping)}
    sets = {key: value for key, value in sets.items() if value}
    if len(sets) == 1:
        return next(iter(sets.values()))
    if not sets:
        raise UserError(f"{path} holds no tensors; give a file of weights")
    raise UserError(
        f"{path} holds several sets of weights ({', '.join(sets)}) and does not say which is meant; save one of them "
        "alone, with torch.save or safetensors"
    )


def _tensors(value: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {str(name): tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}


def check_names_and_shapes(file: WeightsFile, expected: Mapping[str, tuple[int, ...]], *, model: str) -> None:
    """UserError unless ``file`` holds exactly the ``expected`` names and shapes, floating and finite.

    ``model`` is what is expected, in words. The first difference is named, missing names first.
    """
    path, found = file.path, file.tensors
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing:
        close = nearest(missing[0], extra)
        raise UserError(
            f"{path} has no {missing[0]}{_more(missing)}, which {model} needs"
            + (f"; its nearest name is {close}" if close else f"; it holds {len(found)} tensors")
            + ": give a file with the published names"
        )
    if extra:
        close = nearest(extra[0], expected)
        raise UserError(
            f"{path} holds {extra[0]}{_more(extra)}, which {model} does not have"
            + (f" (its nearest name is {close})" if close else "")
            + "; leave out what is not the encoder's"
        )
    for name, shape in expected.items():
        tensor = found[name]
        if tuple(tensor.shape) != tuple(shape):
            raise UserError(
                f"{name} in {path} has shape {list(tensor.shape)} and {model} needs {list(shape)}; "
                "give weights of one whole encoder"
            )
        if not tensor.is_floating_point():
            raise UserError(f"{name} in {path} holds {tensor.dtype} values; floating-point weights are needed")
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{name} in {path} holds values that are not finite; give another file")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if names[1:] else ""
