"""What the programs on latent video share: a step from a batch to a loss, in every batching mode.

Legend: B samples, C channels, T latent frames, H and W the latent canvas; T' >= T frames that the model is given:
a program may put frames of its own before those that are predicted, which are always the last T.

A program says what the model sees and predicts (``prepare``). The layout says how samples share the forward pass, the
model does the work, the video decoder owns the reduction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from marey.batching.budget import cut_by_tokens, refuse_over_budget
from marey.batching.layout import VideoLayout, video_layout
from marey.batching.transport import LatentBatch, Mode
from marey.batching.visibility import Labels
from marey.core.errors import UserError
from marey.models.video_transformer import VideoTransformer
from marey.objectives.flow import FlowDraws, NoiseLayout
from marey.objectives.video_decoder import VideoDecoder, VideoStepOutput
from marey.objectives.video_text import dropped_texts, flat_text, refuse_text_settings


class Prepared(NamedTuple):
    """What a program gives the model, and what it wants back."""

    inputs: Tensor
    """``[B, C, T', H, W]``, 0 where there is nothing"""
    times: Tensor
    """model times ``[B, T'/pt]``, 0 where there is nothing"""
    positions: Tensor
    """temporal positions ``[B, T'/pt]``"""
    labels: Labels
    """``[B, T'/pt]`` on the CPU"""
    target: Tensor
    """``[B, C, T, H, W]``, 0 where nothing is supervised"""
    supervised: Tensor
    """bool ``[B, T]``"""
    target_times: Tensor
    """model times of the predicted frames ``[B, T]``"""

    def part(self, start: int, stop: int) -> Prepared:
        """Samples ``start..stop-1``."""
        rows = slice(start, stop)
        labels = self.labels.at(rows)
        return Prepared(
            inputs=self.inputs[rows],
            times=self.times[rows],
            positions=self.positions[rows],
            labels=labels._replace(sample=labels.sample - start),
            target=self.target[rows],
            supervised=self.supervised[rows],
            target_times=self.target_times[rows],
        )


class _Chunk(NamedTuple):
    prepared: Prepared
    layout: VideoLayout
    text: Tensor | None
    weight: float


@dataclass(frozen=True, kw_only=True)
class ProgramSettings:
    """What every program is told. None of it decides a parameter or a checkpoint key."""

    mode: Mode
    """how samples share a forward pass"""
    seed: int
    decoder: VideoDecoder = field(default_factory=VideoDecoder)
    noise: NoiseLayout = "collated"
    """what random tensors are keyed by"""
    text_dropout: float = 0.0
    """probability that the blank embedding replaces a sample's text"""
    max_tokens: int | None = None
    """video tokens of one forward pass (``packed`` alone; None: no bound)"""


class VideoProgram(nn.Module, ABC):
    """Base of the programs. Submodule ``model``; buffer ``blank_text`` ``[L, D]`` where a blank embedding was given.

    With ``max_tokens`` a batch beyond it is cut into chunks whose activations are recomputed in the backward pass,
    with the loss and gradient of the undivided batch.
    """

    blank_text: Tensor | None

    def __init__(self, model: VideoTransformer, settings: ProgramSettings, *, blank_text: Tensor | None = None) -> None:
        super().__init__()
        mode, max_tokens = settings.mode, settings.max_tokens
        if mode == "packed" and model.size.patch_t != 1:
            raise UserError(
                f"data.batching.mode=packed needs temporal patches of one frame, and model.patch_t is "
                f"{model.size.patch_t}: set model.patch_t=1, or choose strict, padded or bucket"
            )
        if max_tokens is not None and mode != "packed":
            raise UserError(
                f"data.batching.max_tokens={max_tokens} bounds packed tokens, and data.batching.mode is {mode}: set "
                "the mode to packed, or max_tokens to null"
            )
        refuse_text_settings(dropout=settings.text_dropout, blank=blank_text, text_channels=model.size.text_channels)
        self.model = model
        self.settings = settings
        self.decoder = settings.decoder
        self.register_buffer("blank_text", blank_text)

    @abstractmethod
    def prepare(self, batch: LatentBatch, draws: FlowDraws) -> Prepared:
        """What the model sees and predicts, given this step's random tensors."""

    @abstractmethod
    def supervised_frames(self, batch: LatentBatch) -> list[int]:
        """How many frames of each sample are supervised."""

    def predict(self, prepared: Prepared, layout: VideoLayout, text: Tensor | None) -> Tensor:
        """Velocity of the predicted frames, ``[B, C, T, H, W]``; zero where the layout shows nothing."""
        out: Tensor = self.model(
            prepared.inputs, times=prepared.times, positions=prepared.positions, layout=layout, text=text
        )
        return out[:, :, -prepared.target.shape[2] :]

    def lay_out(self, prepared: Prepared, text_lengths: tuple[int, ...] | None) -> VideoLayout:
        """How these samples share a forward pass in this program's mode."""
        return video_layout(
            prepared.labels,
            mode=self.settings.mode,
            tokens_per_position=self.model.tokens_per_position(*prepared.inputs.shape[-2:]),
            text_lengths=text_lengths,
            device=prepared.inputs.device,
        )

    def forward_train_batch(self, batch: LatentBatch, *, micro_step: int) -> VideoStepOutput:
        """One micro-step: random tensors, forward pass and loss of ``batch``.

        ``micro_step`` counts optimizer micro-steps from the start of the run. Raises ``UserError`` for a batch that
        the model was not built for (channels, canvas, text) or that the program cannot use.
        """
        dropped = dropped_texts(batch, dropout=self.settings.text_dropout, seed=self.settings.seed)
        draws = FlowDraws(batch, layout=self.settings.noise, seed=self.settings.seed, micro_step=micro_step)
        return self._step(batch, self.prepare(batch, draws), dropped)

    @torch.no_grad()
    def forward_validation_batch(self, batch: LatentBatch) -> VideoStepOutput:
        """The same loss with each window's own fixed random draws and its own text, whatever the epoch or batch."""
        prepared = self.prepare(batch, FlowDraws.fixed(batch, seed=self.settings.seed))
        return self._step(batch, prepared, [False] * len(batch))

    def _refuse_channels(self, batch: LatentBatch) -> None:
        channels = batch.latents.shape[1]
        if channels != self.model.size.channels:
            raise UserError(
                f"{batch.identities[0]} has latents of {channels} channels and the model reads "
                f"{self.model.size.channels}: encode all sources with one codec, or declare the source's layout if it "
                "is not CTHW"
            )

    def _step(self, batch: LatentBatch, prepared: Prepared, dropped: list[bool]) -> VideoStepOutput:
        self._refuse_channels(batch)
        chunks = self._chunks(batch, prepared, dropped)
        totals = [
            chunk.weight
            * (
                self._total(chunk)
                if len(chunks) == 1
                else checkpoint(self._total, chunk, use_reentrant=False, preserve_rng_state=False)
            )
            for chunk in chunks
        ]
        total = torch.stack(totals).sum() if len(totals) > 1 else totals[0]
        channels, _, height, width = batch.latents.shape[1:]
        elements = sum(self.supervised_frames(batch)) * channels * height * width
        layouts = [chunk.layout for chunk in chunks if chunk.weight]
        return VideoStepOutput(
            loss=self.decoder.loss(total, elements),
            parts={"flow": total.detach() / elements},
            embeddings=None,
            features=None,
            clips=len(batch),
            tokens=sum(layout.valid_tokens for layout in layouts),
            total=total.detach(),
            elements=elements,
            divided=self.decoder.normalize_over == "microbatch",
            tokens_seen=sum(layout.tokens for layout in layouts),
            pairs=sum(layout.attention.needed_pairs for layout in layouts),
            pairs_seen=sum(layout.attention.pairs_on(batch.latents.device) for layout in layouts),
        )

    def _total(self, chunk: _Chunk) -> Tensor:
        prepared = chunk.prepared
        return self.decoder.total(
            self.predict(prepared, chunk.layout, chunk.text),
            prepared.target,
            supervised=prepared.supervised,
            times=prepared.target_times,
        )

    def _chunks(self, batch: LatentBatch, prepared: Prepared, dropped: list[bool]) -> list[_Chunk]:
        ranges = [(0, len(batch))]
        agreed = 1
        max_tokens = self.settings.max_tokens
        if max_tokens is not None:
            per_frame = self.model.tokens_per_position(*prepared.inputs.shape[-2:])
            tokens = [per_frame * frames for frames in batch.lengths]
            refuse_over_budget(batch.identities, tokens, max_tokens=max_tokens)
            own = len(cut_by_tokens(tokens, max_tokens=max_tokens))
            agreed = _largest_of_all_ranks(own, batch.latents.device)
            ranges = cut_by_tokens(tokens, max_tokens=max_tokens, at_least=agreed)
        # Sharded parameters are gathered once for each call, by all ranks together: a rank with fewer samples than
        # calls makes the missing ones with a sample that counts nothing.
        weights = [1.0] * len(ranges) + [0.0] * (agreed - len(ranges))
        ranges += [(0, 1)] * (agreed - len(ranges))
        return [
            self._chunk(batch, prepared, dropped, start, stop, weight)
            for (start, stop), weight in zip(ranges, weights, strict=True)
        ]

    def _chunk(
        self, batch: LatentBatch, prepared: Prepared, dropped: list[bool], start: int, stop: int, weight: float
    ) -> _Chunk:
        whole = stop - start == len(batch)
        part = prepared if whole else prepared.part(start, stop)
        text, text_lengths = flat_text(
            batch if whole else batch.part(start, stop),
            text_channels=self.model.size.text_channels,
            dropped=dropped[start:stop],
            blank=self.blank_text,
        )
        return _Chunk(part, self.lay_out(part, text_lengths), text, weight)


def _largest_of_all_ranks(own: int, device: torch.device) -> int:
    if not (distributed.is_available() and distributed.is_initialized()):
        return own
    most = torch.tensor(own, device=device)
    distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
    return int(most)
