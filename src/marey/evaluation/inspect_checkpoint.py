"""Weights files in plain words: Marey's checkpoints, other programs' checkpoints, safetensors."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch
import yaml

from marey.core.average import average_key
from marey.core.errors import UserError
from marey.evaluation.checkpoint_file import read_archive, sealed, starting_share, weights_hash
from marey.evaluation.describing import (
    batch_words,
    data_words,
    experiment,
    input_words,
    known_model,
    model_words,
    program_words,
)
from marey.evaluation.wording import aligned, count, dig, size
from marey.objectives import registry, video_registry

HASH_DIGITS = 16
"""Of a weights hash, shown: enough to tell two runs apart."""
_WHOLE = "complete and undamaged: its content matches the SHA-256 it ends with"
_UNSEALED = "without the completion marker of `marey train`: whether it is undamaged is not known"


def checkpoint_lines(path: Path, *, show_config: bool) -> list[str]:
    """A ``.ckpt`` file: which experiment, how far, which batch, and what each set of weights is for."""
    content = read_archive(path)
    about = content.get("marey") if isinstance(content, dict) else None
    if not isinstance(about, dict):
        return _foreign_lines(path, content, show_config=show_config)
    config = about.get("config") or {}
    rows = [
        ("experiment", experiment(config)),
        ("progress", _progress(about)),
        ("batch", _batch(about)),
        ("model", model_words(known_model(config, about.get("receipt") or {}))),
        ("program", program_words(config)),
        ("input", input_words(about.get("preprocessing") or {})),
        ("data", data_words(config)),
        *_weights(content, about),
        ("run", _run(about, config)),
        ("file", _WHOLE if sealed(path) else _UNSEALED),
    ]
    lines = [f"{path}: a Marey {about.get('kind', '')} checkpoint, {size(path.stat().st_size)}", *aligned(rows)]
    if show_config:
        lines += ["", yaml.safe_dump(config, sort_keys=False, allow_unicode=True).rstrip()]
    else:
        lines.append("--config prints the resolved configuration")
    return lines


def _progress(about: dict[str, Any]) -> str:
    parts = [f"{name} {about[key]:,}" for name, key in _COUNTERS if isinstance(about.get(key), int)]
    return ", ".join(parts)


_COUNTERS = (("optimizer step", "step"), ("epoch", "epoch"), ("micro-step", "micro_step"))


def _batch(about: dict[str, Any]) -> str:
    causal = about.get("kind") == "causal"
    return batch_words(
        unit="samples" if causal else "clips",
        effective=about.get("effective_batch"),
        statistic=None if causal else about.get("statistic_batch"),
        norm_group=about.get("norm_group"),
        world=about.get("world_size"),
        reference=dig(about, "config", "recipe", "reference") or {},
    )


def _weights(content: dict[str, Any], about: dict[str, Any]) -> list[tuple[str, str]]:
    own = video_registry if about.get("kind") == "causal" else registry
    meanings = {**own.summary_keys, **(about.get("keys") or {})}
    rows = []
    average = average_key(content)
    for key in ("state_dict", average or "state_dict_ema"):
        state = content.get(key)
        if not isinstance(state, dict) or not state:
            rows.append((key, "absent" if key == "state_dict" else "absent (ema.enabled=false)"))
            continue
        text = f"{state_words(state)}, SHA-256 {weights_hash(state)[:HASH_DIGITS]}: {meanings[key]}"
        if key == average and about.get("ema"):
            ema = about["ema"]
            text += f"; {count(ema['updates'], 'update')}, {starting_share(ema):.1%} still where it started"
        rows.append((key, text))
    return rows


def state_words(state: dict[str, Any]) -> str:
    """``52 tensors, 803,456 values``."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return f"{count(len(tensors), 'tensor')}, {sum(t.numel() for t in tensors):,} values"


def _run(about: dict[str, Any], config: dict[str, Any]) -> str:
    receipt = about.get("receipt") or {}
    code = dig(receipt, "code", "commit") or dig(receipt, "commit") or ""
    identity = receipt.get("run_id") or receipt.get("run") or ""
    parts = [f"{identity}", f"Marey {about.get('version')}", f"code {str(code)[:12]}" if code else ""]
    return ", ".join([part for part in parts if part] + [f"seed {config.get('seed')}"])


def _foreign_lines(path: Path, content: Any, *, show_config: bool) -> list[str]:
    if show_config:
        raise UserError(f"{path} was not written by Marey and holds no configuration to print; leave out --config")
    if not isinstance(content, dict):
        return [f"{path}: a PyTorch file that holds one {type(content).__name__}; Marey did not write it"]
    lines = [f"{path}: a PyTorch checkpoint that Marey did not write, {size(path.stat().st_size)}"]
    version = content.get("pytorch-lightning_version")
    rows = [("written by", f"Lightning {version}" if version else "")]
    if "global_step" in content:
        rows.append(("progress", f"step {content['global_step']}, epoch {content.get('epoch')}"))
    groups = {key: value for key, value in content.items() if isinstance(value, dict) and _has_tensors(value)}
    if _has_tensors(content):
        rows.append(("weights", f"{state_words(content)}, at the top level"))
    rows += [(str(key), state_words(value)) for key, value in groups.items()]
    rest = [str(key) for key in content if key not in groups and not isinstance(content[key], torch.Tensor)]
    if rest:
        rows.append(("also", ", ".join(rest[:12]) + (f" and {len(rest) - 12} more" if rest[12:] else "")))
    rows.append(("use", "it does not say what input its weights expect, so Marey does not load it"))
    return lines + aligned(rows)


def _has_tensors(tree: dict[Any, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in tree.values())


def safetensors_header(path: Path) -> dict[str, Any]:
    """The JSON in front of a safetensors file: tensor names with dtype and shape, and ``__metadata__``.

    Raises UserError for a file whose header cannot be read.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(path.stat().st_size - 8, 100_000_000):
                raise ValueError("the header's length does not fit the file")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is no table of tensors")
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); copy it again") from error
    return header


def safetensors_lines(path: Path) -> list[str]:
    """A safetensors file, from its header alone."""
    header = safetensors_header(path)
    metadata = header.pop("__metadata__", None) or {}
    values = 0
    for entry in header.values():
        total = 1
        for side in entry.get("shape", []):
            total *= side
        values += total
    dtypes = sorted({str(entry.get("dtype")) for entry in header.values()})
    rows = [("tensors", f"{len(header):,}, {values:,} values, {', '.join(dtypes)}")]
    what = "a safetensors file"
    own = metadata.get("marey")
    if own is not None and "embedding" in header:
        about = json.loads(own)
        what = "features written by `marey embed`"
        rows += [
            ("rows", f"{header['embedding']['shape'][0]:,}, one per {about.get('per')}"),
            ("from", f"{about.get('source')} through {about.get('checkpoint')} ({about.get('weights')} weights)"),
        ]
    elif "encoder.cls_token" in header and "encoder.patch_embed.proj.weight" in header:
        width, _, tubelet, patch, _ = header["encoder.patch_embed.proj.weight"]["shape"]
        depth = len({name.split(".")[2] for name in header if name.startswith("encoder.blocks.")})
        rows.append(
            (
                "encoder",
                f"the names and shapes of a video encoder: width {width}, {depth} blocks, patches of "
                f"{tubelet} x {patch} x {patch}",
            )
        )
        own_words = "rope_layout, attn_mode and preprocessing are what it says of itself"
        others = "weights alone: rope_layout, attn_mode and preprocessing must come from elsewhere"
        told = own_words if "marey_model" in metadata else others
        rows.append(("use", f"`marey import {shlex.quote(str(path))} OUT.ckpt`; {told}"))
    else:
        names = list(header)
        rows.append(("names", ", ".join(names[:6]) + (f" and {len(names) - 6} more" if names[6:] else "")))
    rows += [(key, str(value)[:200]) for key, value in metadata.items() if own is None]
    return [f"{path}: {what}, {size(path.stat().st_size)}", *aligned(rows)]
