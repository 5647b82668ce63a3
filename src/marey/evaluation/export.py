"""``marey export``: an encoder for people who do not have Marey, as a folder for `transformers` or one program file."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from marey import __version__
from marey.core.errors import UserError
from marey.core.files import sync_folder, write_json, write_text
from marey.evaluation.checkpoint_file import read_checkpoint
from marey.evaluation.export_card import model_card
from marey.evaluation.export_program import save_program
from marey.evaluation.inspect_export import EXPORTED_TYPE, is_export, is_program
from marey.evaluation.loading import PREFIX, LoadedEncoder, Weights, load_encoder
from marey.evaluation.release.encoder_marey import VideoEncoder, preprocess
from marey.models.vit import EPS, MLP_RATIO
from marey.pixels.evalclips import short_side_centre_crop

Format = Literal["transformers", "torch-export"]
CODE = {"encoder_marey.py": "encoder_marey.py", "modeling_marey.py": "modeling_marey.py.txt"}
"""File of the export -> file of this package."""
FILES = frozenset(
    {
        *CODE,
        "README.md",
        "config.json",
        "example.safetensors",
        "model.safetensors",
        "preprocessor_config.json",
        "receipt.json",
    }
)


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    format: Format
    weights: Weights
    parameters: int
    bytes: int

    def __str__(self) -> str:
        how = (
            f'transformers.AutoModel.from_pretrained("{self.path}", trust_remote_code=True) loads it'
            if self.format == "transformers"
            else f'torch.export.load("{self.path}").module() runs it'
        )
        return (
            f"{self.path}: the encoder's {self.weights} weights, {self.parameters:,} parameters, "
            f"{self.bytes / 1e6:,.1f} MB; {how}"
        )


def export(
    checkpoint: Path | str,
    out: Path | str,
    *,
    format: Format = "transformers",
    weights: Weights | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> Exported:
    """Write the encoder of ``checkpoint`` to ``out``, whole or not at all.

    format: ``transformers`` makes a folder (``FILES``) that `AutoModel` loads without Marey; ``torch-export`` one
    ``.pt2`` file, a traced program for any number of clips. weights: as ``load_encoder`` has it. Before anything is
    written, the code of the export is run beside Marey's encoder on a synthetic clip and must give the same values;
    the model card says how exactly.
    Raises UserError for what loading raises, a causal checkpoint, and an ``out`` that is not free: with ``overwrite``
    an earlier export is replaced, never anything else.
    """
    out = Path(out)
    if format not in get_args(Format):
        raise UserError(f"--format {format} is not known; use {' or '.join(get_args(Format))}")
    (_check_folder if format == "transformers" else _check_file)(out, overwrite=overwrite)
    about = _encoder_entry(Path(checkpoint))
    loaded = load_encoder(checkpoint, weights=weights)
    remark = loaded.info.remark()
    if remark:
        say(f"note: {remark}")
    plain = plain_encoder(loaded)
    video = example_frames(loaded)
    embedding, difference = _compare(loaded, plain, video)
    try:
        if format == "torch-export":
            save_program(out, plain, loaded, about=about)
        else:
            with _whole_folder(out) as folder:
                _write_folder(folder, loaded, about, {"video": video, "embedding": embedding}, difference)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}); give another place") from error
    size = sum(file.stat().st_size for file in ([out] if out.is_file() else out.iterdir()))
    receipt = about.get("receipt") or {}
    if format == "transformers" and receipt and not receipt.get("imported"):  # an import names neither
        say(f"note: {out / 'receipt.json'} names this machine's host and paths; read it before you publish the folder")
    return Exported(out, format, loaded.info.weights, sum(p.numel() for p in plain.parameters()), size)


def plain_encoder(loaded: LoadedEncoder) -> VideoEncoder:
    """The same encoder as the export's own code has it, float32, on the CPU, without gradients."""
    plain = VideoEncoder(**_shape(loaded))
    plain.load_state_dict(loaded.encoder.state_dict(), strict=True)
    return plain.eval().requires_grad_(False)


def example_frames(loaded: LoadedEncoder) -> Tensor:
    """uint8 ``[T, 3, H, W]``: a bright square that moves over a drifting gradient; no pixel is drawn at random.

    Wider than high and larger than the encoder's input, so that resize and crop take part.
    """
    frames, side = loaded.preprocessing.num_frames, loaded.preprocessing.img_size
    height, width = side + side // 4, side + side // 2
    t, c, y, x = torch.meshgrid(*(torch.arange(n) for n in (frames, 3, height, width)), indexing="ij")
    video = (2 * y + 3 * x + 7 * t + 60 * c) % 200
    left, top, edge = (5 * t) % (width // 2), (3 * t) % (height // 2), side // 4
    inside = (x >= left) & (x < left + edge) & (y >= top) & (y < top + edge)
    return torch.where(inside, 255 - 40 * c, video).to(torch.uint8)


def _encoder_entry(path: Path) -> dict[str, Any]:
    about: dict[str, Any] = read_checkpoint(path)["marey"]
    if about.get("kind") not in (None, "encoder"):
        raise UserError(
            f"{path} is a checkpoint of kind {about['kind']}, a predictor of latents, and only encoders are exported; "
            "give a checkpoint of an encoder run"
        )
    return about


def _shape(loaded: LoadedEncoder) -> dict[str, Any]:
    encoder = loaded.encoder
    return {
        "width": encoder.embed_dim,
        "depth": encoder.depth,
        "num_heads": encoder.num_heads,
        "mlp_width": MLP_RATIO * encoder.embed_dim,
        "patch_size": encoder.patch_size,
        "tubelet_size": encoder.tubelet_size,
        "use_rope": encoder.use_rope,
        "rope_layout": encoder.rope_layout,
        "attn_mode": encoder.attn_mode,
        "eps": EPS,
    }


@torch.inference_mode()
def _compare(loaded: LoadedEncoder, plain: VideoEncoder, frames: Tensor) -> tuple[Tensor, float]:
    """Marey's [CLS] output of ``frames``, float32 ``[1, D]``, and the largest difference of any token of ``plain``."""
    given = loaded.preprocessing
    video = given.normalize(short_side_centre_crop(frames, given.img_size).movedim(1, 0).unsqueeze(0))
    theirs = preprocess(frames, size=given.img_size, mean=given.mean, std=given.std)
    tokens: Tensor = loaded.encoder(video)
    if not bool(tokens.isfinite().all()):
        raise UserError(f"the features of {loaded.info.path} are not finite: its training diverged; give another one")
    difference = float((plain(theirs) - tokens).abs().max())
    # On x86 it is 0; other matrix libraries may round by the shape in which a product is asked for.
    assert difference <= 1e-4 * float(tokens.abs().max()), f"the exported code gives other values, by {difference}"
    return tokens[:, 0].clone(), difference


def _write_folder(
    folder: Path, loaded: LoadedEncoder, about: dict[str, Any], example: dict[str, Tensor], difference: float
) -> None:
    for name, source in CODE.items():
        write_text(folder / name, files("marey.evaluation.release").joinpath(source).read_text(encoding="utf-8"))
    shape, given, info = _shape(loaded), loaded.preprocessing, loaded.info
    write_json(
        folder / "config.json",
        {
            "architectures": ["MareyModel"],
            "model_type": EXPORTED_TYPE,
            "auto_map": {"AutoConfig": "modeling_marey.MareyConfig", "AutoModel": "modeling_marey.MareyModel"},
            "hidden_size": shape["width"],
            "num_hidden_layers": shape["depth"],
            "num_attention_heads": shape["num_heads"],
            "intermediate_size": shape["mlp_width"],
            "image_size": given.img_size,
            "num_frames": given.num_frames,
            "patch_size": shape["patch_size"],
            "tubelet_size": shape["tubelet_size"],
            "use_rope": shape["use_rope"],
            "rope_layout": shape["rope_layout"],
            "attn_mode": shape["attn_mode"],
            "layer_norm_eps": shape["eps"],
            "image_mean": list(given.mean),
            "image_std": list(given.std),
            "dtype": "float32",
            "marey": {"version": __version__, "weights": info.weights, "step": info.step, "epoch": info.epoch},
        },
    )
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "MareyVideoProcessor",
            "auto_map": {"AutoImageProcessor": "modeling_marey.MareyVideoProcessor"},
            "do_resize": True,
            "size": {"shortest_edge": given.img_size},
            "resample": 3,  # bicubic, in Pillow's numbering
            "do_center_crop": True,
            "crop_size": {"height": given.img_size, "width": given.img_size},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(given.mean),
            "image_std": list(given.std),
            "layout": "B,C,T,H,W",
            "num_frames": given.num_frames,
            "frame_stride": given.frame_stride,
            "rate": given.rate,
        },
    )
    state = {f"{PREFIX}{name}": value.contiguous() for name, value in loaded.encoder.state_dict().items()}
    _save_tensors(
        folder / "model.safetensors",
        state,
        {
            "format": "pt",
            "written_by": f"marey {__version__} export",
            "marey_model": json.dumps(loaded.model.model_dump(mode="json")),
            "marey_preprocessing": json.dumps(about["preprocessing"]),
            "marey_weights": json.dumps({"weights": info.weights, "step": info.step, "epoch": info.epoch}),
        },
    )
    _save_tensors(folder / "example.safetensors", example, {"format": "pt"})
    write_json(folder / "receipt.json", about.get("receipt") or {})
    write_text(folder / "README.md", model_card(loaded, about, difference=difference))


def _save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.touch()  # a new file gets the permissions that this person gives; the library would make it private
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # how the library says that the disk is full
        raise OSError(str(error)) from error
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _check_folder(out: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(out):
        return
    if not out.is_dir() or out.is_symlink():
        raise UserError(f"{out} is not a folder of its own; name a new folder")
    if out.resolve() == Path.cwd():
        raise UserError(f"{out} is the folder that this command runs in, which it would replace; name a new folder")
    names = {path.name for path in out.iterdir()}
    if not names:
        return
    if not _is_export(out, names):
        raise UserError(f"{out} holds other files; name a new or empty folder")
    if not overwrite:
        raise UserError(f"{out} holds an export already; give --overwrite to replace it, or name another folder")


def _is_export(folder: Path, names: set[str]) -> bool:
    return names <= FILES and is_export(folder)


def _check_file(out: Path, *, overwrite: bool) -> None:
    if out.suffix != ".pt2":
        raise UserError(f"{out} must end in .pt2 for --format torch-export")
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file")
    if not out.exists():
        return
    if not is_program(out):
        raise UserError(f"{out} is a file of another kind; give another name")
    if not overwrite:
        raise UserError(f"{out} holds an export already; give --overwrite to replace it, or another name")


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its place at the end, and is removed on any exception."""
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    tag = secrets.token_hex(4)
    temporary, old = (out.with_name(f".{out.name}.{tag}.{what}") for what in ("tmp", "old"))
    temporary.mkdir()
    try:
        yield temporary
        sync_folder(temporary)
        if out.exists():
            out.rename(old)
        try:
            temporary.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        raise
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)
