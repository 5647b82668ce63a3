"""A pretrained encoder from a checkpoint, and its twin with the same architecture and random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from marey.config.schema import ModelConfig
from marey.core.average import average_key
from marey.core.errors import UserError
from marey.evaluation.checkpoint_file import read_checkpoint, starting_share
from marey.evaluation.preprocessing import Preprocessing
from marey.models.vit import VisionTransformer, build_encoder

Weights = Literal["ema", "online"]
PREFIX = "encoder."


@dataclass(frozen=True)
class CheckpointInfo:
    """What a loaded encoder is, in facts."""

    path: Path
    weights: Weights
    """Which of the two state dictionaries was loaded."""
    step: int
    """Optimizer steps of training."""
    epoch: int
    seed: int
    """The training run's seed."""
    starting_share: float
    """Share of the loaded weights that is still where the slow copy started (0 for the online weights)."""
    config: dict[str, Any]
    """The training run's resolved configuration."""

    def remark(self) -> str | None:
        """A sentence when more than 1% of the slow copy is still its starting point, else None."""
        if self.starting_share <= 0.01:
            return None
        return (
            f"{self.starting_share:.0%} of the EMA weights are still the weights the copy started from; "
            "--weights online takes the trained weights themselves"
        )


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder in evaluation mode, what it expects, and what it is."""

    encoder: VisionTransformer
    preprocessing: Preprocessing
    info: CheckpointInfo
    model: ModelConfig


def resolve_device(name: str) -> torch.device:
    """``auto`` is a CUDA device where there is one, else the CPU; anything else is PyTorch's own name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name} is not a device; use auto, cpu, cuda or mps") from error
    present = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if device.type not in present:
        raise UserError(f"--device {name} is not supported; use auto, cpu, cuda or mps")
    if not present[device.type]:
        raise UserError(f"--device {name} was asked for and PyTorch sees no such device here; use cpu or auto")
    return device


def choose_weights(content: dict[str, Any], path: Path, asked: Weights | None) -> Weights:
    """``asked``, or the EMA weights where there are some. UserError for EMA asked for but absent."""
    has_ema = average_key(content) is not None
    if asked == "ema" and not has_ema:
        raise UserError(f"{path} holds no EMA weights (the run had ema.enabled=false); use --weights online")
    return asked if asked is not None else ("ema" if has_ema else "online")


def weights_of(content: dict[str, Any], chosen: Weights) -> dict[str, Any]:
    """The state dictionary of the weights that ``choose_weights`` chose."""
    state: dict[str, Any] = content[(average_key(content) if chosen == "ema" else None) or "state_dict"]
    return state


def load_encoder(
    path: Path | str, *, weights: Weights | None = None, device: torch.device | str = "cpu"
) -> LoadedEncoder:
    """The encoder of a checkpoint, float32, in evaluation mode, without gradients.

    weights: ``ema`` or ``online``; None takes the EMA weights where the checkpoint has them (see
    ``CheckpointInfo.remark`` for when that is doubtful).
    Raises UserError: see ``read_checkpoint``; EMA asked for but absent; weights that do not fit the model.
    """
    path = Path(path)
    content = read_checkpoint(path)
    about = content["marey"]
    chosen = choose_weights(content, path, weights)
    raw = weights_of(content, chosen)
    state = {key.removeprefix(PREFIX): value for key, value in raw.items() if key.startswith(PREFIX)}
    if not state:
        raise UserError(f"{path} holds no `{PREFIX}*` weights; give a checkpoint of an encoder run")
    config = about.get("config") or {}
    try:
        model = ModelConfig.model_validate(config.get("model"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("model", *first["loc"]))
        raise UserError(f"{path} records a configuration that cannot be read ({where}: {first['msg']})") from error
    seed = int(config.get("seed", 0))
    encoder = build_encoder(model, seed=seed)
    try:
        encoder.load_state_dict(state, strict=True)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"the weights in {path} do not fit the model its configuration describes: {reason}") from error
    info = CheckpointInfo(
        path=path,
        weights=chosen,
        step=int(about.get("step", 0)),
        epoch=int(about.get("epoch", 0)),
        seed=seed,
        starting_share=starting_share(about["ema"]) if chosen == "ema" and about.get("ema") else 0.0,
        config=config,
    )
    preprocessing = Preprocessing.from_dict(about.get("preprocessing") or {}, where=str(path))
    return LoadedEncoder(_frozen(encoder, device), preprocessing, info, model)


def random_twin(
    loaded: LoadedEncoder, *, seed: int | None = None, device: torch.device | str = "cpu"
) -> VisionTransformer:
    """The same architecture with fresh weights, ready to evaluate.

    seed: None takes the training run's own, which gives the very weights that a run from scratch began with.
    """
    return _frozen(build_encoder(loaded.model, seed=loaded.info.seed if seed is None else seed), device)


def _frozen(encoder: VisionTransformer, device: torch.device | str) -> VisionTransformer:
    return encoder.to(device=device, dtype=torch.float32).eval().requires_grad_(False)
