"""An exported encoder's folder in plain words. No torch here: the answer comes from its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from marey.core.errors import UserError
from marey.evaluation.wording import aligned, dig, size

EXPORTED_TYPE = "marey"
"""``model_type`` of an export's configuration."""


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
    identity, recipe = dig(receipt, "run_id"), dig(receipt, "recipe", "name")
    return ", ".join(f"{what} {value}" for what, value in (("run", identity), ("recipe", recipe)) if value)
