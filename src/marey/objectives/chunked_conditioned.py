"""The program ``chunked_conditioned``: denoise a latent video chunk by chunk, given clean frames of earlier chunks.

Legend: B samples, C channels, T latent frames, H and W the latent canvas.

Two streams over the same positions: a clean (condition) one, which begins with one external condition frame at offset
-1, chunk 0; and a noisy one, which is predicted. Frame f is in chunk ``floor(f / size) + 1``. Noisy frames see noisy
frames of their own chunk and clean ones of strictly earlier chunks; clean frames see clean ones of the same and
earlier chunks; nobody looks further than ``window`` chunks. Chunk size and window are each sample's own.

The model is given ``T' = 1 + 2 T`` frames: condition, clean stream, noisy stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from marey.batching.layout import program_labels
from marey.batching.transport import LatentBatch
from marey.batching.visibility import Labels
from marey.core.errors import UserError
from marey.core.keys import rng
from marey.models.video_transformer import VideoTransformer
from marey.objectives.flow import TIME_SCALE, FlowDraws, identity_key, noised, per_frame, velocity
from marey.objectives.video_program import Prepared, ProgramSettings, VideoProgram


class ChunkGeometry(NamedTuple):
    """What is drawn for one sample."""

    size: int
    """latent frames of a chunk"""
    window: int
    """chunks that a frame may look back"""
    condition_index: int | None
    """index into the grid of noise levels at which the clean stream is noised; None: it is clean"""


def chunk_labels(geometries: list[ChunkGeometry], frames: int) -> Labels:
    """Labels ``[B, 1 + 2*frames]`` on the CPU: condition, clean stream, noisy stream."""
    size = torch.tensor([geometry.size for geometry in geometries]).unsqueeze(1)
    chunk = torch.arange(frames) // size + 1
    chunks = torch.cat((torch.zeros_like(size), chunk, chunk), dim=1)
    noisy = (torch.arange(1 + 2 * frames) > frames).expand(len(geometries), -1)
    return program_labels(
        torch.ones_like(noisy),
        chunk=chunks,
        noisy=noisy,
        reach=torch.tensor([geometry.window for geometry in geometries]),
    )


class ChunkedConditionedObjective(VideoProgram):
    """``chunk_sizes`` and ``windows`` are inclusive ranges that each sample's are drawn from, uniformly.

    With probability ``condition_noise`` a sample's clean stream is mildly noised, at a level drawn uniformly from the
    indices of the cleaner half of the grid.
    """

    def __init__(
        self,
        model: VideoTransformer,
        settings: ProgramSettings,
        *,
        chunk_sizes: tuple[int, int] = (1, 4),
        windows: tuple[int, int] = (4, 64),
        condition_noise: float = 0.5,
        blank_text: Tensor | None = None,
    ) -> None:
        super().__init__(model, settings, blank_text=blank_text)
        if settings.mode != "strict":
            raise UserError(
                f"program.name=chunked_conditioned works on data.batching.mode=strict alone, not {settings.mode}: set "
                "the mode to strict, or program.name=prefix_suffix"
            )
        if model.size.patch_t != 1:
            raise UserError(
                f"program.name=chunked_conditioned needs temporal patches of one frame, and model.patch_t is "
                f"{model.size.patch_t}: set model.patch_t=1, or program.name=prefix_suffix"
            )
        self.chunk_sizes = chunk_sizes
        self.windows = windows
        self.condition_noise = condition_noise

    def geometry(self, batch: LatentBatch, sample: int, *, of_window: bool = False) -> ChunkGeometry:
        """Keyed by the sample's window and draw, or by the window alone: batch-mates do not enter."""
        key = (identity_key(batch, sample), *(() if of_window else batch.draws[sample]))
        draw = rng(self.settings.seed, "chunk-geometry", *key)
        levels = self.decoder.schedule.levels
        size = int(draw.integers(self.chunk_sizes[0], self.chunk_sizes[1] + 1))
        window = int(draw.integers(self.windows[0], self.windows[1] + 1))
        mild = draw.random() < self.condition_noise
        index = int(draw.integers(levels // 2, levels))
        return ChunkGeometry(size, window, index if mild else None)

    def supervised_frames(self, batch: LatentBatch) -> list[int]:
        """All of them."""
        return list(batch.lengths)

    def prepare(self, batch: LatentBatch, draws: FlowDraws) -> Prepared:
        """Both streams; noise of the noisy stream is drawn first, then its levels, then noise of the clean stream.

        Raises ``UserError`` for a batch without condition frames.
        """
        if batch.condition is None:
            raise UserError(
                f"{batch.identities[0]} has no condition frame, which program.name=chunked_conditioned starts from: "
                "read windows that begin after the clip's first stored frame with LatentAdapter(condition=True), which "
                "takes the frame before each, or set program.name=prefix_suffix"
            )
        assert all(frames == batch.capacity for frames in batch.lengths), batch.lengths
        geometries = [self.geometry(batch, b, of_window=draws.of_windows) for b in range(len(batch))]
        noise = draws.normal()
        level = self.decoder.schedule.levels_at(draws.integers(self.decoder.schedule.levels), batch.latents.dtype)
        clean = torch.cat((batch.condition.to(batch.latents), batch.latents), dim=2)
        mild = self._condition_levels(geometries, batch.latents).unsqueeze(1).expand(-1, clean.shape[2])
        clean = torch.where(per_frame(mild) > 0, noised(clean, draws.normal(extra=1), mild), clean)
        before = batch.frame_positions[:, :1] - 1
        return Prepared(
            inputs=torch.cat((clean, noised(batch.latents, noise, level)), dim=2),
            times=TIME_SCALE * torch.cat((mild, level), dim=1),
            positions=torch.cat((before, batch.frame_positions, batch.frame_positions), dim=1),
            labels=chunk_labels(geometries, batch.capacity),
            target=velocity(batch.latents, noise),
            supervised=batch.frame_mask,
            target_times=TIME_SCALE * level,
        )

    def _condition_levels(self, geometries: list[ChunkGeometry], like: Tensor) -> Tensor:
        """``[B]``: level of each sample's clean stream, 0 where it is clean."""
        grid = self.decoder.schedule.grid()
        levels = [0.0 if g.condition_index is None else float(grid[g.condition_index]) for g in geometries]
        return torch.tensor(levels, dtype=like.dtype).to(like.device, non_blocking=True)
