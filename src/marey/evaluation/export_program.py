"""The encoder as one traced program: a `torch.export` file that runs without its source code."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from marey import __version__
from marey.core.files import atomic_write
from marey.evaluation.inspect_export import ABOUT
from marey.evaluation.loading import LoadedEncoder
from marey.evaluation.release.encoder_marey import VideoEncoder


class ClipProgram(nn.Module):
    """uint8 clips ``[B, 3, T, S, S]``, cropped already -> all tokens ``[B, 1+N, D]``, [CLS] first; normalises."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: VideoEncoder, *, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1, 1))

    def forward(self, clips: Tensor) -> Tensor:
        """See the class."""
        tokens: Tensor = self.encoder((clips.float() / 255.0 - self.mean) / self.std)
        return tokens


def save_program(out: Path, encoder: VideoEncoder, loaded: LoadedEncoder, *, about: dict[str, Any]) -> None:
    """Trace ``encoder`` for any number of clips of the trained size and write it to ``out``, whole or not at all."""
    given = loaded.preprocessing
    module = ClipProgram(encoder, mean=given.mean, std=given.std).eval()
    clips = torch.zeros(2, 3, given.num_frames, given.img_size, given.img_size, dtype=torch.uint8)
    with torch.no_grad():
        program = torch.export.export(
            module, (clips,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},), strict=False
        )
    facts = {
        "version": __version__,
        "weights": loaded.info.weights,
        "step": loaded.info.step,
        "input": "uint8 [B, 3, T, S, S], resized and cropped; the program normalises",
        "output": "float32 [B, 1+N, D], [CLS] first",
        "model": loaded.model.model_dump(mode="json"),
        "preprocessing": about["preprocessing"],
        "receipt": about.get("receipt") or {},
    }
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={ABOUT: json.dumps(facts)})
    with atomic_write(out) as file:
        file.write(buffer.getbuffer())
