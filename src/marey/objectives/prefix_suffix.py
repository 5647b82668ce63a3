"""The program ``prefix_suffix``: given the first frames of a latent video and a text, denoise the rest.

Legend: B samples, C channels, T latent frames, H and W the latent canvas; a sample has its own prefix and future.

Prefix frames are clean, at time 0. Every future frame has its own noise level and is supervised. Padding is 0 at
time 0 and never supervised.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from marey.batching.layout import program_labels
from marey.batching.transport import LatentBatch
from marey.batching.visibility import UNBOUNDED, Labels
from marey.models.video_transformer import VideoTransformer
from marey.objectives.flow import TIME_SCALE, FlowDraws, noised, per_frame, refuse_odd_geometry, velocity
from marey.objectives.video_program import Prepared, ProgramSettings, VideoProgram

Visibility = Literal["full", "prefix_causal"]


class PrefixSuffixObjective(VideoProgram):
    """``visibility`` full: every valid frame of a sample sees every other; prefix_causal: prefix sees prefix alone."""

    def __init__(
        self,
        model: VideoTransformer,
        settings: ProgramSettings,
        *,
        visibility: Visibility = "full",
        blank_text: Tensor | None = None,
    ) -> None:
        super().__init__(model, settings, blank_text=blank_text)
        self.visibility: Visibility = visibility

    def labels(self, lengths: tuple[int, ...], prefixes: tuple[int, ...], capacity: int) -> Labels:
        """Labels ``[B, capacity/pt]`` on the CPU; all three counted in latent frames."""
        pt = self.model.size.patch_t
        position = torch.arange(capacity // pt)
        valid = position < torch.tensor(lengths).unsqueeze(1) // pt
        future = position >= torch.tensor(prefixes).unsqueeze(1) // pt
        return program_labels(
            valid,
            chunk=future if self.visibility == "prefix_causal" else torch.zeros_like(future),
            noisy=torch.zeros_like(valid),
            reach=torch.full((len(lengths),), UNBOUNDED),
        )

    def supervised_frames(self, batch: LatentBatch) -> list[int]:
        """The future frames of each sample."""
        return [frames - prefix for frames, prefix in zip(batch.lengths, batch.prefixes, strict=True)]

    def prepare(self, batch: LatentBatch, draws: FlowDraws) -> Prepared:
        """Noise the future of every sample, each frame at its own level; noise is drawn first, then levels.

        Raises ``UserError`` for frames that temporal patches cannot hold.
        """
        pt = self.model.size.patch_t
        refuse_odd_geometry(batch, patch_t=pt)
        noise = draws.normal()
        index = draws.integers(self.decoder.schedule.levels)
        if pt > 1:  # a temporal patch has the level of its first frame
            index = index[:, ::pt].repeat_interleave(pt, dim=1)
        level = self.decoder.schedule.levels_at(index, batch.latents.dtype) * batch.future_mask
        supervised = per_frame(batch.future_mask)
        times = TIME_SCALE * level
        return Prepared(
            inputs=torch.where(supervised, noised(batch.latents, noise, level), batch.latents),
            times=times[:, ::pt],
            positions=batch.frame_positions[:, ::pt],
            labels=self.labels(batch.lengths, batch.prefixes, batch.capacity),
            target=torch.where(supervised, velocity(batch.latents, noise), 0.0),
            supervised=batch.future_mask,
            target_times=times,
        )
