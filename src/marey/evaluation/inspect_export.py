"""An exported encoder, a folder or one program, in plain words. No torch here: the answer comes from its JSON."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from marey.core.errors import UserError
from marey.core.files import UNREADABLE
from marey.evaluation.describing import input_words, model_words
from marey.evaluation.wording import aligned, dig, size

EXPORTED_TYPE = "marey"
"""``model_type`` of an export's configuration."""
ABOUT = "marey.json"
"""The extra file inside an exported program: what it is and what it expects."""


def is_export(folder: Path) -> bool:
    """Whether `marey export` wrote ``folder``, as far as its configuration tells."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == EXPORTED_TYPE


def export_lines(folder: Path) -> list[str]:
    """What encoder it is, what it takes, and which run it came from."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise UserError(f"{folder} is an export without its model.safetensors; write it again with `marey export`")
    rows = [
        ("encoder", _encoder(config)),
        ("input", f"{config.get('num_frames')} x {config.get('image_size')} x {config.get('image_size')}"),
        ("weights", _weights(config, weights)),
        ("from", _run(folder)),
        ("use", f'transformers.AutoModel.from_pretrained("{folder}", trust_remote_code=True)'),
    ]
    return [f"{folder}: an encoder that `marey export` wrote", *aligned(rows)]


def is_program(path: Path) -> bool:
    """Whether ``path`` is a program that `marey export` wrote, by the list of what is in it."""
    return _about(path) is not None


def program_lines(path: Path) -> list[str]:
    """What encoder a traced program is, what it takes and gives, and which run it came from."""
    name = _about(path)
    assert name is not None
    try:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read(name))
    except (*UNREADABLE, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error}); write it again with `marey export`") from error
    receipt = facts.get("receipt") or {}
    rows = [
        ("encoder", model_words(facts.get("model") or {})),
        ("trained on", input_words(facts.get("preprocessing") or {})),
        ("takes", str(facts.get("input"))),
        ("gives", str(facts.get("output"))),
        ("weights", f"{facts.get('weights')}, step {facts.get('step')}, {size(path.stat().st_size)}"),
        ("from", _identity(receipt)),
        ("use", f'torch.export.load("{path}").module()'),
    ]
    return [f"{path}: an encoder as one program, which `marey export` wrote", *aligned(rows)]


def _about(path: Path) -> str | None:
    """The name of the extra file in a program, None where ``path`` is something else."""
    try:
        with zipfile.ZipFile(path) as archive:
            return next((name for name in archive.namelist() if name.endswith(f"extra/{ABOUT}")), None)
    except (*UNREADABLE, zipfile.BadZipFile):
        return None


def _encoder(config: dict[str, Any]) -> str:
    return (
        f"width {config.get('hidden_size')}, {config.get('num_hidden_layers')} blocks, "
        f"{config.get('num_attention_heads')} heads, patches of {config.get('tubelet_size')} x "
        f"{config.get('patch_size')} x {config.get('patch_size')}, {config.get('attn_mode')} attention, "
        f"{config.get('rope_layout')} positions"
    )


def _weights(config: dict[str, Any], path: Path) -> str:
    which, step = dig(config, "marey", "weights"), dig(config, "marey", "step")
    return f"{which}, step {step}, {size(path.stat().st_size)}"


def _run(folder: Path) -> str:
    try:
        receipt = json.loads((folder / "receipt.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return _identity(receipt)


def _identity(receipt: dict[str, Any]) -> str:
    identity, recipe = dig(receipt, "run_id"), dig(receipt, "recipe", "name")
    return ", ".join(f"{what} {value}" for what, value in (("run", identity), ("recipe", recipe)) if value)
