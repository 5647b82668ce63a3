"""Rollouts: from known frames to predicted ones, by Euler steps along the flow.

Legend: C channels, T latent frames, H and W the latent canvas, L text tokens, D text channels.

From pure noise to s = 0 on the shifted grid of training, in ``steps`` steps: ``x += (s' - s) * velocity``. Known frames
are put back before every step, clean and at time 0. Horizons longer than what was trained on are reached by feeding
back what was generated, in geometries of training only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from marey.batching.layout import VideoLayout, program_labels, video_layout
from marey.batching.visibility import Labels
from marey.core.errors import UserError
from marey.core.keys import torch_generator
from marey.objectives.chunked_conditioned import ChunkedConditionedObjective
from marey.objectives.flow import TIME_SCALE
from marey.objectives.prefix_suffix import PrefixSuffixObjective
from marey.objectives.video_program import VideoProgram


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """How a rollout is drawn."""

    steps: int = 25
    """Euler steps of each block"""
    guidance: float = 1.0
    """g of ``u + g (c - u)``, u without the text and c with it; 1: the text as trained"""
    seed: int = 0
    """of the noise that every block starts from"""


class Block(NamedTuple):
    """One call of the sampler: given frames, then generated ones, as a geometry of training has them."""

    prefix: int
    future: int


def plan_blocks(given: int, horizon: int, geometries: Sequence[tuple[int, int]]) -> list[Block]:
    """Geometries of training that reach ``horizon`` latent frames beyond ``given`` ones; the last may overshoot.

    Each block takes the shortest future that reaches the end, or the longest there is, then the longest prefix that
    is known by then. Raises ``UserError`` when no trained prefix is as short as what is given.
    """
    blocks: list[Block] = []
    known, wanted = given, given + horizon
    while known < wanted:
        fitting = [Block(*geometry) for geometry in geometries if geometry[0] <= known]
        if not fitting:
            shortest = min(prefix for prefix, _ in geometries)
            raise UserError(
                f"a rollout from {known} latent frames is shorter than any trained prefix ({shortest} frames): give "
                f"at least {shortest} frames"
            )
        missing = wanted - known
        reaching = [block for block in fitting if block.future >= missing]
        future = min(block.future for block in reaching) if reaching else max(block.future for block in fitting)
        block = max(block for block in fitting if block.future == future)
        blocks.append(block)
        known += block.future
    return blocks


class _Guide:
    """Velocity of one video under guidance: the video once for each text, in one forward pass."""

    def __init__(
        self,
        program: VideoProgram,
        *,
        labels: Labels,
        positions: Tensor,
        canvas: tuple[int, int],
        text: Tensor | None,
        guidance: float,
    ) -> None:
        texts = [] if text is None else [text]
        if guidance != 1:
            if text is None or program.blank_text is None or program.settings.text_dropout == 0:
                raise UserError(
                    f"guidance {guidance} compares with and without the text, which this model was not trained for: "
                    "use guidance 1, or a model trained with text dropout and a text"
                )
            texts.append(program.blank_text.to(text))
        self._model = program.model
        self._guidance = guidance
        self._copies = max(1, len(texts))
        self._text = torch.cat(texts) if texts else None
        self._positions = positions.expand(self._copies, -1)
        copied = Labels(*(field.expand(self._copies, -1) for field in labels))
        sample = torch.arange(self._copies, dtype=torch.int32).unsqueeze(1).expand_as(copied.sample)
        self._layout: VideoLayout = video_layout(
            copied._replace(sample=sample),
            mode="strict",
            tokens_per_position=program.model.tokens_per_position(*canvas),
            text_lengths=[len(t) for t in texts] or None,
            device=positions.device,
        )

    def __call__(self, x: Tensor, times: Tensor) -> Tensor:
        """``[C, T, H, W]`` and model times ``[T/pt]`` -> ``[C, T, H, W]``."""
        out = self._model(
            x.expand(self._copies, *x.shape),
            times=times.expand(self._copies, -1),
            positions=self._positions,
            layout=self._layout,
            text=self._text,
        )
        if self._copies == 1:
            return out[0]  # type: ignore[no-any-return]
        with_text, without = out
        guided: Tensor = without + self._guidance * (with_text - without)
        return guided


def _noise(like: Tensor, frames: int, settings: SamplerSettings, block: int) -> Tensor:
    c, _, h, w = like.shape
    generator = torch_generator(settings.seed, "rollout", block)
    return torch.randn((c, frames, h, w), generator=generator).to(like)


@torch.no_grad()
def rollout(
    program: PrefixSuffixObjective,
    prefix: Tensor,
    *,
    horizon: int,
    geometries: Sequence[tuple[int, int]],
    text: Tensor | None = None,
    settings: SamplerSettings | None = None,
) -> Tensor:
    """The ``horizon`` latent frames after ``prefix``: ``[C, P, H, W]`` -> ``[C, horizon, H, W]``.

    ``geometries`` are the (prefix, future) pairs of training; ``text`` is ``[L, D]``, None for a model without text.
    Inputs are on the model's device.
    """
    settings = settings or SamplerSettings()
    known = prefix
    for number, block in enumerate(plan_blocks(prefix.shape[1], horizon, geometries)):
        start = known[:, -block.prefix :]
        known = torch.cat((known, _future(program, start, block, text, settings, number)), dim=1)
    return known[:, prefix.shape[1] : prefix.shape[1] + horizon]


def _future(
    program: PrefixSuffixObjective,
    prefix: Tensor,
    block: Block,
    text: Tensor | None,
    settings: SamplerSettings,
    number: int,
) -> Tensor:
    pt = program.model.size.patch_t
    frames = block.prefix + block.future
    guide = _Guide(
        program,
        labels=program.labels((frames,), (block.prefix,), frames),
        positions=torch.arange(frames, device=prefix.device)[::pt],
        canvas=(prefix.shape[2], prefix.shape[3]),
        text=text,
        guidance=settings.guidance,
    )
    grid = program.decoder.schedule.sampling_grid(settings.steps).tolist()
    future = torch.arange(frames // pt, device=prefix.device) >= block.prefix // pt
    x = _noise(prefix, block.future, settings, number)
    for s, following in pairwise(grid):
        video = torch.cat((prefix, x), dim=1)
        x = x + (following - s) * guide(video, (TIME_SCALE * s) * future.to(x.dtype))[:, block.prefix :]
    return x


@torch.no_grad()
def rollout_chunked(
    program: ChunkedConditionedObjective,
    condition: Tensor,
    *,
    horizon: int,
    max_frames: int,
    chunk_size: int,
    window: int,
    text: Tensor | None = None,
    settings: SamplerSettings | None = None,
) -> Tensor:
    """``horizon`` latent frames after the condition frame ``[C, 1, H, W]``, chunk by chunk: ``[C, horizon, H, W]``.

    ``max_frames`` is the longest video of training: beyond it, the last generated frame is the next condition frame.
    """
    settings = settings or SamplerSettings()
    known = condition
    number = 0
    while known.shape[1] - 1 < horizon:
        clean = known[:, -1:]
        while clean.shape[1] - 1 < min(max_frames, horizon - (known.shape[1] - 1)):
            done = clean.shape[1] - 1
            size = min(chunk_size, max_frames - done)
            chunk = _chunk(program, clean, size, chunk_size, window, text, settings, number)
            clean = torch.cat((clean, chunk), dim=1)
            number += 1
        known = torch.cat((known, clean[:, 1:]), dim=1)
    return known[:, 1 : 1 + horizon]


def _chunk(
    program: ChunkedConditionedObjective,
    clean: Tensor,
    size: int,
    chunk_size: int,
    window: int,
    text: Tensor | None,
    settings: SamplerSettings,
    number: int,
) -> Tensor:
    """The next ``size`` frames, given the condition frame and the whole chunks after it, ``[C, 1 + frames, H, W]``."""
    frames = clean.shape[1] - 1
    device = clean.device
    positions = torch.cat((torch.arange(-1, frames), torch.arange(frames, frames + size)))
    noisy = torch.arange(1 + frames + size) > frames
    chunk = torch.div(positions, chunk_size, rounding_mode="floor") + 1
    labels = program_labels(
        torch.ones_like(noisy).unsqueeze(0),
        chunk=chunk.unsqueeze(0),
        noisy=noisy.unsqueeze(0),
        reach=torch.tensor([window]),
    )
    guide = _Guide(
        program,
        labels=labels,
        positions=positions.to(device),
        canvas=(clean.shape[2], clean.shape[3]),
        text=text,
        guidance=settings.guidance,
    )
    grid = program.decoder.schedule.sampling_grid(settings.steps).tolist()
    active = noisy.to(device)
    x = _noise(clean, size, settings, number)
    for s, following in pairwise(grid):
        video = torch.cat((clean, x), dim=1)
        x = x + (following - s) * guide(video, (TIME_SCALE * s) * active.to(x.dtype))[:, 1 + frames :]
    return x
