"""Small latent videos, models and programs that the tests of the causal programs share. All float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marey.batching.transport import LatentBatch, Mode, collate
from marey.core.keys import torch_generator
from marey.core.latents import Identity, LatentSample
from marey.models.video_transformer import VideoTransformer, VideoTransformerSize, build_video_transformer
from marey.objectives.flow import FlowDraws
from marey.objectives.prefix_suffix import PrefixSuffixObjective
from marey.objectives.video_program import Prepared, ProgramSettings, VideoProgram

CHANNELS, SIDE, TEXT_CHANNELS = 3, 4, 5
GEOMETRIES = [(1, 3), (2, 6), (1, 1), (3, 2), (2, 6), (1, 4), (4, 4), (2, 1)]
WORDS = [3, 1, 5, 3, 2, 4, 3, 1]


def make_sample(i: int, prefix: int, future: int, words: int | None = None, **changes: Any) -> LatentSample:
    g = torch_generator(7, "test-latents", i)
    frames = prefix + future
    fields: dict[str, Any] = {
        "video_latents": torch.randn(CHANNELS, frames, SIDE, SIDE, generator=g, dtype=torch.float64),
        "prefix_frames": prefix,
        "future_frames": future,
        "frame_positions": torch.arange(frames),
        "identity": Identity("source", f"clip{i}", f"clip{i}", 0),
        "length_hint": frames,
        "text": None if words is None else torch.randn(words, TEXT_CHANNELS, generator=g, dtype=torch.float64),
        "position": i,
    }
    return LatentSample(**{**fields, **changes})


def make_samples(count: int = 4, *, text: bool = True) -> list[LatentSample]:
    return [make_sample(i, *GEOMETRIES[i % 8], words=WORDS[i % 8] if text else None) for i in range(count)]


def make_model(*, text: bool = True, seed: int = 0, **size: Any) -> VideoTransformer:
    fields = {"channels": CHANNELS, "width": 24, "depth": 2, "heads": 2, "patch": 2, **size}
    model = build_video_transformer(
        VideoTransformerSize(**fields, text_channels=TEXT_CHANNELS if text else None), seed=seed
    ).double()
    # Away from its initial zeros, so that nothing is equal because it is zero.
    g = torch_generator(seed, "test-weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g, dtype=torch.float64) * 0.1)
    return model


def make_objective(
    mode: Mode,
    *,
    model: VideoTransformer | None = None,
    visibility: str = "full",
    blank: Tensor | None = None,
    **settings: Any,
) -> PrefixSuffixObjective:
    return PrefixSuffixObjective(
        make_model() if model is None else model,
        ProgramSettings(mode=mode, **{"seed": 3, **settings}),
        visibility=visibility,
        blank_text=blank,
    )


class GivenDraws(FlowDraws):
    """Random tensors decided by the test."""

    def __init__(self, noise: Tensor, index: Tensor) -> None:
        self.given = (noise, index)

    def normal(self, *, extra: int = 0) -> Tensor:
        assert extra == 0
        return self.given[0]

    def integers(self, high: int) -> Tensor:
        return self.given[1]


def gradients(program: VideoProgram) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in program.named_parameters()}


def step(program: VideoProgram, batch: LatentBatch, *, micro_step: int = 0) -> tuple[Any, dict[str, Tensor]]:
    program.zero_grad()
    output = program.forward_train_batch(batch, micro_step=micro_step)
    output.loss.backward()
    return output._replace(loss=output.loss.detach()), gradients(program)


def prepared_of(program: VideoProgram, batch: LatentBatch, micro_step: int = 0) -> Prepared:
    """What the program makes of a batch in a training step."""
    settings = program.settings
    return program.prepare(batch, FlowDraws(batch, layout=settings.noise, seed=settings.seed, micro_step=micro_step))


def predictions(program: VideoProgram, batch: LatentBatch, prepared: Prepared, text: Any = None) -> Tensor:
    """Velocity of a batch, given what the program prepared; ``text`` replaces the batch's own flat text."""
    own = (
        None if batch.text is None else torch.cat([t[:n] for t, n in zip(batch.text, batch.text_lengths, strict=True)])
    )
    layout = program.lay_out(prepared, batch.text_lengths)
    return program.predict(prepared, layout, own if text is None else text)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """max|a-b| over all gradients, against the largest gradient entry of the model."""
    assert a.keys() == b.keys()
    scale = max(float(g.abs().max()) for g in a.values())
    assert scale > 0
    return max(float((a[name] - b[name]).abs().max()) for name in a) / scale


def batch_of(samples: Sequence[LatentSample], mode: Mode = "padded", multiple: int = 1) -> LatentBatch:
    return collate(samples, mode=mode, pad_to_multiple_of=multiple)
