"""A causal latent-video program from its checkpoint, ready to roll out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from marey.config.causal import CausalConfig
from marey.core.errors import UserError
from marey.evaluation.checkpoint_file import read_checkpoint, starting_share
from marey.evaluation.loading import Weights, choose_weights, weights_of
from marey.latents.adapter import TextEncoder
from marey.latents.text import configured_encoder
from marey.objectives.video_program import VideoProgram
from marey.objectives.video_registry import build_causal

KIND = "causal"
PREFIX = "model."
BLANK = "blank_text"


@dataclass(frozen=True)
class LoadedCausal:
    """A program in evaluation mode, what it was trained as, and how it reads text."""

    program: VideoProgram
    config: CausalConfig
    text: TextEncoder | None
    path: Path
    weights: Weights
    step: int
    starting_share: float
    """Share of the loaded weights that is still where the slow copy started (0 for the online weights)."""


def load_causal(
    path: Path | str, *, weights: Weights | None = None, device: torch.device | str = "cpu"
) -> LoadedCausal:
    """The program of a causal checkpoint, float32, without gradients.

    weights: ``ema`` or ``online``; None takes the EMA weights where the checkpoint has them.
    Raises UserError: see ``read_checkpoint``; a checkpoint of another objective; EMA asked for but absent; weights
    that do not fit the configuration; a text index that is no longer there.
    """
    path = Path(path)
    content = read_checkpoint(path)
    about = content["marey"]
    if about.get("kind") != KIND:
        raise UserError(
            f"{path} is a checkpoint of kind {about.get('kind')!r}, which predicts no video; give one of `marey train "
            "--config-name causal_video`"
        )
    chosen = choose_weights(content, path, weights)
    online: dict[str, Any] = content["state_dict"]
    chosen_state = weights_of(content, chosen)
    state = {key.removeprefix(PREFIX): value for key, value in chosen_state.items() if key.startswith(PREFIX)}
    if "patch_embed.weight" not in state:
        raise UserError(f"{path} holds no `{PREFIX}*` weights of a video transformer; give another checkpoint")
    try:
        config = CausalConfig.model_validate(about.get("config"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path} records a configuration that cannot be read ({where}: {first['msg']})") from error
    text_embed = state.get("text_embed.weight")
    text = None if text_embed is None else configured_encoder(config.data.text)
    blank: Tensor | None = online.get(BLANK)
    if blank is None and text is not None and config.program.text_dropout > 0:
        blank = text.blank()
    program = build_causal(
        config,
        channels=state["patch_embed.weight"].shape[1] // (config.model.patch_t * config.model.patch**2),
        text_channels=None if text_embed is None else text_embed.shape[1],
        blank_text=blank,
    )
    try:
        program.model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"the weights in {path} do not fit the model its configuration describes: {reason}") from error
    return LoadedCausal(
        program=program.to(device=device, dtype=torch.float32).eval().requires_grad_(False),
        config=config,
        text=text,
        path=path,
        weights=chosen,
        step=int(about.get("step", 0)),
        starting_share=starting_share(about["ema"]) if chosen == "ema" and about.get("ema") else 0.0,
    )
