"""Sidecars: the file that holds one clip's latents, ``.safetensors``, ``.npy`` or ``.pt`` (weights only).

Shapes and types are checked from the file's header before anything is read, and only the frames asked for
are. Nothing in a sidecar is ever executed: a pickle that holds more than tensors is refused.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch
from safetensors.torch import save

from marey.core.errors import UserError
from marey.core.files import atomic_write, sha256
from marey.latents.requests import Layout

TENSOR = "video_latents"
_OURS = "marey"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NUMPY_FLOATS = ("float16", "float32", "float64")
_SAYS_WHY = (OSError, ValueError, RuntimeError, zipfile.BadZipFile, safetensors.SafetensorError)


class Expected(NamedTuple):
    """What the manifest says about a clip's tensor; None where it does not say."""

    length_frames: int
    height: int | None
    width: int | None


class _Opened(NamedTuple):
    shape: tuple[int, ...]
    read: Callable[[int, int, int], torch.Tensor]
    """(axis, start, stop) -> the tensor cut along ``axis``."""
    metadata: Mapping[str, str]


def read_frames(
    path: Path | str,
    *,
    clip: str,
    expected: Expected,
    start: int,
    frames: int,
    layout: Layout | None = None,
    digest: str | None = None,
) -> torch.Tensor:
    """Frames ``start .. start+frames-1`` of a clip: floating ``[C, frames, H, W]``, contiguous, as stored in type.

    ``layout`` is what the source declares (None: what the file declares, else ``CTHW``). ``digest`` (SHA-256)
    is compared with the whole file when given. Raises UserError naming the clip for a file that is missing,
    damaged, of another shape than the manifest says, not floating, or not finite in these frames.
    """
    file = Path(path)
    where = f"clip {clip} ({file})"
    if not file.is_file():
        raise _absent(where)
    with _reading(file, where):
        if digest is not None and sha256(file) != digest:
            raise UserError(f"{where}: its SHA-256 is not the manifest's; the file was changed, encode it again.")
    opened = _open(file, where)
    axis = _time_axis(opened, layout, expected, where)
    with _reading(file, where):
        latents = opened.read(axis, start, start + frames)
    if axis == 0:
        latents = latents.permute(3, 0, 1, 2)
    latents = latents.contiguous()
    if not bool(torch.isfinite(latents).all()):
        bad = int((~torch.isfinite(latents)).sum())
        raise UserError(
            f"{where}: {bad} of {latents.numel()} values in frames {start}..{start + frames - 1} are NaN or "
            "infinite; encode the clip again or take its row out of the manifest."
        )
    return latents


def read_shape(path: Path | str, *, clip: str, layout: Layout | None = None) -> tuple[int, int, int, int]:
    """(C, T, H, W) of a sidecar, from its header. Raises UserError for a file that is missing or not readable."""
    file = Path(path)
    where = f"clip {clip} ({file})"
    if not file.is_file():
        raise _absent(where)
    opened = _open(file, where)
    _check_rank(opened.shape, where)
    if _declared(opened, layout, where) == "THWC":
        t, h, w, c = opened.shape
    else:
        c, t, h, w = opened.shape
    return c, t, h, w


def write_sidecar(path: Path | str, latents: torch.Tensor, *, metadata: Mapping[str, str]) -> None:
    """Write ``[C, T, H, W]`` as safetensors, whole or not at all; the layout is declared in the file."""
    # One entry: several would be written in any order, and equal latents would not give equal files.
    written = {_OURS: json.dumps({**metadata, "layout": "CTHW"}, sort_keys=True)}
    with atomic_write(path) as file:
        file.write(save({TENSOR: latents.contiguous()}, metadata=written))


def sidecar_metadata(path: Path | str) -> dict[str, str] | None:
    """What a safetensors sidecar says of itself; None when the file is absent or not readable."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return _said(file.metadata())
    except (OSError, ValueError, safetensors.SafetensorError):
        return None


def _said(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """A file's own metadata, ours unfolded. Raises ValueError where ours is not what we write."""
    said = dict(metadata or {})
    ours = json.loads(said.pop(_OURS, "{}"))
    if not isinstance(ours, dict):
        raise ValueError(f"its metadata {_OURS} is not a JSON object")
    return {**said, **ours}


def _check_rank(shape: tuple[int, ...], where: str) -> None:
    if len(shape) != 4 or min(shape) < 1:
        raise UserError(f"{where}: its tensor has shape {list(shape)}, not four axes [C, T, H, W]; store it so.")


def _declared(opened: _Opened, layout: Layout | None, where: str) -> Layout:
    written = opened.metadata.get("layout")
    if written not in (None, "CTHW", "THWC"):
        raise UserError(f"{where}: the file declares layout {written}; only CTHW and THWC are known.")
    if layout is not None and written is not None and layout != written:
        raise UserError(
            f"{where}: the source declares layout {layout} but the file says {written}; correct data.sources."
        )
    return layout or written or "CTHW"  # type: ignore[return-value]


def _time_axis(opened: _Opened, layout: Layout | None, expected: Expected, where: str) -> int:
    shape = opened.shape
    _check_rank(shape, where)
    declared = _declared(opened, layout, where)
    axis, t, h, w = (0, *shape[:3]) if declared == "THWC" else (1, *shape[1:])
    wrong = [
        f"{name} {said} in the manifest, {found} in the file"
        for name, said, found in (
            ("length_frames", expected.length_frames, t),
            ("height", expected.height, h),
            ("width", expected.width, w),
        )
        if said is not None and said != found
    ]
    if wrong:
        raise UserError(
            f"{where}: {'; '.join(wrong)} (shape {list(shape)} read as {declared}); correct the manifest, or "
            "declare the source's layout if it is another one."
        )
    return axis


def _absent(where: str) -> UserError:
    return UserError(f"{where}: the file does not exist; restore it or take its row out of the manifest.")


@contextlib.contextmanager
def _reading(file: Path, where: str) -> Iterator[None]:
    """A damaged file's exceptions as one refusal."""
    try:
        yield
    except UserError:
        raise
    except pickle.UnpicklingError:
        raise UserError(
            f"{where}: it is damaged, or holds objects whose loading could run code, so it was not opened; store a "
            "plain tensor with torch.save, or use safetensors."
        ) from None
    except FileNotFoundError:  # it went away after it was looked for
        raise _absent(where) from None
    except Exception as error:  # three foreign parsers on bytes that may be anything: no list of theirs is complete
        told = isinstance(error, _SAYS_WHY) and str(error)
        reason = str(error).splitlines()[0] if told else f"damaged, {type(error).__name__}"
        raise UserError(f"{where}: not a readable {file.suffix} file ({reason}); encode the clip again.") from None


def _open(file: Path, where: str) -> _Opened:
    kinds = {".safetensors": _open_safetensors, ".npy": _open_npy}
    with _reading(file, where):
        return kinds.get(file.suffix.lower(), _open_pt)(file, where)


def _open_safetensors(file: Path, where: str) -> _Opened:
    with safetensors.safe_open(file, framework="pt") as opened:
        name = _only(list(opened.keys()), where)
        piece = opened.get_slice(name)
        shape, kind = tuple(piece.get_shape()), piece.get_dtype()
        metadata = _said(opened.metadata())
    if kind not in ("F16", "BF16", "F32", "F64"):
        raise UserError(f"{where}: its tensor is {kind}, not floating; store float16, bfloat16 or float32.")

    def read(axis: int, start: int, stop: int) -> torch.Tensor:
        with safetensors.safe_open(file, framework="pt") as opened:
            piece = opened.get_slice(name)
            cut: torch.Tensor = piece[start:stop] if axis == 0 else piece[:, start:stop]
        return cut

    return _Opened(shape, read, metadata)


def _open_npy(file: Path, where: str) -> _Opened:
    with np.errstate(over="raise"):  # of a header that declares more than there is
        array: Any = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise UserError(f"{where}: it is an archive of arrays (.npz), not one; store one array with numpy.save.")
    if array.dtype.name not in _NUMPY_FLOATS:
        raise UserError(f"{where}: its array is {array.dtype.name}, not floating; store float16 or float32.")

    def read(axis: int, start: int, stop: int) -> torch.Tensor:
        cut = array[start:stop] if axis == 0 else array[:, start:stop]
        return torch.from_numpy(np.array(cut, dtype=cut.dtype.newbyteorder("=")))

    return _Opened(tuple(array.shape), read, {})


def _open_pt(file: Path, where: str) -> _Opened:
    archive = zipfile.is_zipfile(file)
    if archive:
        with zipfile.ZipFile(file) as members:
            if any(member.compress_type != zipfile.ZIP_STORED for member in members.infolist()):
                raise UserError(
                    f"{where}: it is a compressed archive, which may unpack to any size; store it with torch.save."
                )
    # Mapped where the format allows (zip archives): pages come in as frames are cut out.
    with warnings.catch_warnings():
        # Torch warns about the pickle protocol of a stranger's file before refusing it; the refusal is
        # enough.
        warnings.simplefilter("ignore", UserWarning)
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=archive)
    metadata: dict[str, str] = {}
    if isinstance(stored, dict):
        if "layout" in stored and not isinstance(stored["layout"], torch.Tensor):
            metadata["layout"] = str(stored["layout"])
        tensors = {str(k): v for k, v in stored.items() if isinstance(v, torch.Tensor)}
        stored = tensors[_only(list(tensors), where)]
    if not isinstance(stored, torch.Tensor):
        raise UserError(f"{where}: it holds a {type(stored).__name__}, not a tensor; store the tensor itself.")
    tensor = stored.detach()
    if tensor.dtype not in _FLOATS:
        raise UserError(f"{where}: its tensor is {tensor.dtype}, not floating; store float16 or float32.")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else tensor.layout
        raise UserError(f"{where}: its tensor is {kind}, not dense; store tensor.to_dense() or the like.")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UserError(
            f"{where}: its tensor of shape {list(tensor.shape)} repeats the few values it holds; store "
            "tensor.contiguous()."
        )

    def read(axis: int, start: int, stop: int) -> torch.Tensor:
        return tensor.narrow(axis, start, stop - start).clone()

    return _Opened(tuple(tensor.shape), read, metadata)


def _only(names: list[str], where: str) -> str:
    """The name of the latents among several tensors."""
    if TENSOR in names:
        return TENSOR
    if len(names) != 1:
        found = ", ".join(sorted(names)) or "none"
        raise UserError(f"{where}: it holds several tensors or none ({found}); name one of them {TENSOR}.")
    return names[0]
