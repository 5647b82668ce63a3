"""``marey import``: an encoder's bare weights, with the published names and shapes, into a checkpoint.

Weights say neither how positions enter nor what attends to what: a wrong ``rope_layout`` or ``attn_mode`` loads
without an error and gives wrong features. So both are taken from what the file says of itself (`marey export` writes
it), else from the ``config.json`` beside it, else they are those of the published weights; and a request for anything
else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from marey import __version__
from marey.config.compose import load_config
from marey.config.schema import EncoderConfig, ModelConfig, describe
from marey.config.sizes import SIZES
from marey.core.errors import UserError
from marey.core.files import SealingWriter, atomic_write, sha256
from marey.core.pixelstats import IMAGENET_MEAN, IMAGENET_STD
from marey.evaluation.loading import PREFIX
from marey.evaluation.weights_file import WeightsFile, check_names_and_shapes, read_weights
from marey.models.vit import build_encoder
from marey.objectives.registry import build

PUBLISHED = {"rope_layout": "tiled", "attn_mode": "block_causal", "use_rope": True}
"""How the published weights (LeVJEPA, VideoMix ViT-L) were trained."""
PUBLISHED_RATE = 15.0
"""Stored frames per second: with a stride of 2, the published 7.5 frames per second."""
_MEANING = tuple(PUBLISHED)
"""Keys of ``model`` that no shape shows."""
_INPUT = {"image_size": "img_size", "img_size": "img_size", "num_frames": "num_frames"}
"""What a ``config.json`` calls the size of the input, which no shape shows either -> key of ``model``."""


@dataclass(frozen=True)
class Stated:
    """What is known of the weights beside their values."""

    by: str
    """Who says so."""
    model: dict[str, Any]
    """Keys of the configuration's ``model`` section."""
    frame_stride: int | None
    rate: float | None


@dataclass(frozen=True)
class Imported:
    """What was written."""

    path: Path
    tensors: int
    parameters: int
    model: ModelConfig
    preprocessing: dict[str, Any]
    by: str

    def __str__(self) -> str:
        model, given = self.model, self.preprocessing
        every = f"one in {given['frame_stride']} of those stored"
        if given["rate"] is not None:
            every = f"{given['rate'] / given['frame_stride']:.6g} per second"
        return (
            f"{self.path}: {self.tensors} tensors, {self.parameters:,} parameters, {model.name}, "
            f"model.rope_layout={model.rope_layout}, model.attn_mode={model.attn_mode} (as {self.by}); it expects "
            f"{given['num_frames']} frames of {given['img_size']} pixels, {every}"
        )


def import_weights(
    file: Path | str,
    out: Path | str,
    *,
    overrides: Sequence[str] = (),
    rate: float | None = None,
    overwrite: bool = False,
) -> Imported:
    """Write the weights in ``file`` as a checkpoint that embed, probe, export and ``resume.weights_only=true`` take.

    file: safetensors or `torch.save`, names ``encoder.*``; half precision is widened to float32. overrides: keys of the
    configuration, ``key=value``; the encoder's size is read from the shapes. rate: stored frames per second that the
    weights expect (None: what is known of them). The projector, which such files do not hold, is drawn from the
    configuration's seed, and the checkpoint says so.
    Raises UserError for a file that ``read_weights`` refuses, for names, shapes, positions or attention that are not
    the weights', and for an ``out`` that is not free.
    """
    path, out = Path(file), Path(out)
    if out.suffix != ".ckpt":
        raise UserError(f"{out} must end in .ckpt")
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists already; give --overwrite to replace it, or another name")
    if rate is not None and not rate > 0:
        raise UserError(f"--rate {rate} must be above 0")
    found = read_weights(path)
    stated = _stated(found)
    config = _configuration(found, stated, overrides)
    _check_size(config.model, found)
    _check_meaning(config.model, stated, path)
    check_names_and_shapes(found, _expected(config.model), model=_words(config.model))
    preprocessing = _preprocessing(config, stated.rate if rate is None else rate)
    content = _checkpoint(found, config, preprocessing, stated)
    try:
        _save_sealed(content, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}); give another place") from error
    parameters = sum(tensor.numel() for tensor in found.tensors.values())
    return Imported(out, len(found.tensors), parameters, config.model, preprocessing, stated.by)


def _stated(file: WeightsFile) -> Stated:
    own = file.metadata.get("marey_model")
    if own is not None:
        try:
            model = ModelConfig.model_validate_json(own).model_dump(mode="json")
            given = json.loads(file.metadata["marey_preprocessing"])
            return Stated("the file itself says", model, int(given["frame_stride"]), given.get("rate"))
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(f"what {file.path} says of itself cannot be read ({error}); export it again") from error
    beside = file.path.with_name("config.json")
    said = _said_beside(beside) if beside.is_file() else {}
    by = f"{beside} says" if set(said) & set(_MEANING) else "the published weights were trained"
    return Stated(by, {**PUBLISHED, **said}, None, PUBLISHED_RATE)


def _said_beside(path: Path) -> dict[str, Any]:
    """What a ``config.json`` says of positions, attention and input, at its top or in its model's section."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}, beside the weights, cannot be read ({error}); mend it or move it away") from error
    tree = tree if isinstance(tree, dict) else {}
    sections = [tree, *(tree[key] for key in ("model", "encoder") if isinstance(tree.get(key), dict))]
    said: dict[str, Any] = {}
    for section in sections:
        said.update({key: section[key] for key in _MEANING if key in section})
        said.update({key: section[name] for name, key in _INPUT.items() if type(section.get(name)) is int})
    return said


def _configuration(file: WeightsFile, stated: Stated, overrides: Sequence[str]) -> EncoderConfig:
    """The configuration of a run that would start from these weights; what is asked for stands over what is known."""
    known: dict[str, Any] = {f"model.{key}": value for key, value in stated.model.items()}
    known |= _shape(file)
    if stated.frame_stride is not None:
        known["frame_stride"] = stated.frame_stride
    asked = {word.partition("=")[0].lstrip("+~") for word in overrides}
    words = [f"{key}={_value(value)}" for key, value in known.items() if key not in asked]
    return load_config([*words, *overrides])


def _value(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | str) else str(value)


def _shape(file: WeightsFile) -> dict[str, Any]:
    """Size, patch and tubelet as the tensors have them, where they are of an encoder at all."""
    cls, kernel = (file.tensors.get(f"{PREFIX}{name}") for name in ("cls_token", "patch_embed.proj.weight"))
    if cls is None or kernel is None or cls.ndim != 3 or kernel.ndim != 5:
        return {"model.name": "vit_large"}  # the published size; comparing names, or shapes, says what is wrong
    width = cls.shape[2]
    depth = len({name.split(".")[2] for name in file.tensors if name.startswith(f"{PREFIX}blocks.")})
    name = next((name for name, size in SIZES.items() if (size.width, size.depth) == (width, depth)), None)
    if name is None:
        known = ", ".join(f"{name} {size.width}/{size.depth}" for name, size in SIZES.items())
        raise UserError(
            f"{file.path} holds an encoder of width {width} and {depth} blocks, which is none of {known}; "
            "give weights of one of these sizes, with all their blocks"
        )
    return {"model.name": name, "model.tubelet_size": kernel.shape[2], "model.patch_size": kernel.shape[3]}


def _check_size(model: ModelConfig, file: WeightsFile) -> None:
    for key, true in _shape(file).items():
        asked = getattr(model, key.removeprefix("model."))
        if asked != true:
            raise UserError(f"{key}={asked} is not what {file.path} holds: its shapes say {true}; leave {key} out")


def _check_meaning(model: ModelConfig, stated: Stated, path: Path) -> None:
    for key in _MEANING:
        asked, true = getattr(model, key), stated.model[key]
        if asked != true:
            raise UserError(
                f"model.{key}={_plain(asked)} is not what {path} needs: {stated.by} {_plain(true)}, and with anything "
                f"else the weights would load without an error and give wrong features; leave model.{key} out"
            )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _expected(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        encoder = build_encoder(model, seed=0)
    return {f"{PREFIX}{name}": tuple(value.shape) for name, value in encoder.state_dict().items()}


def _words(model: ModelConfig) -> str:
    patch = model.patch_size
    return f"{model.name} with patches of {model.tubelet_size} x {patch} x {patch}"


def _preprocessing(config: EncoderConfig, rate: float | None) -> dict[str, Any]:
    model = config.model
    return {
        "format": 1,
        "mean": list(IMAGENET_MEAN),
        "std": list(IMAGENET_STD),
        "layout": "B,C,T,H,W",
        "num_frames": model.num_frames,
        "frame_stride": config.frame_stride,
        "rate": rate,
        "img_size": model.img_size,
        "patch_size": model.patch_size,
        "tubelet_size": model.tubelet_size,
        "resize": "short side to img_size, bicubic, antialias",
        "crop": "centre",
    }


def _checkpoint(
    file: WeightsFile, config: EncoderConfig, preprocessing: dict[str, Any], stated: Stated
) -> dict[str, Any]:
    encoder: dict[str, Tensor] = {name: tensor.float() for name, tensor in file.tensors.items()}
    digest = sha256(file.path)
    plain = describe(config)
    plain["recipe"] = {
        "name": "imported",
        "source": f"weights imported from {file.path.name}",
        "public": "",
        "not_public": "",
        "claims": "that these are the weights of that file, unchanged; what they were trained on is for it to say",
        "reference": {"effective_batch": None, "statistic_batch": None, "norm_group": None},
    }
    plain["data"] |= {"name": "not recorded", "train": "", "val": None}
    taken = f"imported from {file.path.name}"
    return {
        "state_dict": {**build(config).state_dict(), **encoder},
        "state_dict_ema": encoder,
        "epoch": 0,
        "global_step": 0,
        "marey": {
            "format": 1,
            "kind": "encoder",
            "version": __version__,
            "config": plain,
            "receipt": {
                "format": 1,
                "kind": "encoder",
                "run_id": f"import-{digest[:12]}",
                "imported": {
                    "file": file.path.name,
                    "sha256": digest,
                    "bytes": file.path.stat().st_size,
                    "tensors": len(encoder),
                    "meaning": f"rope_layout and attn_mode as {stated.by}",
                },
                "recipe": plain["recipe"],
                "data": {"name": "not recorded", "train": [], "val": None},
            },
            "preprocessing": preprocessing,
            "step": 0,
            "epoch": 0,
            "micro_step": 0,
            "world_size": None,
            "effective_batch": None,
            "statistic_batch": None,
            "norm_group": None,
            "ema": None,
            "keys": {
                "state_dict": f"encoder.* {taken}; projector.* drawn from seed {config.seed}, not trained: start a run "
                "from these (resume.weights_only=true)",
                "state_dict_ema": f"encoder.* {taken}: evaluate and release these",
            },
        },
    }


def _save_sealed(content: dict[str, Any], path: Path) -> None:
    with atomic_write(path) as file:
        writer = SealingWriter(file)
        try:
            torch.save(content, cast("IO[bytes]", writer))  # all that it uses is write and flush
        except RuntimeError as error:
            if writer.error is None:
                raise
            raise writer.error from error
        writer.seal()
