"""What of each clip reached the optimizer on this rank: measured from batches, written at every checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from marey.batching.transport import LatentBatch
from marey.config.causal import ProgramConfig, VideoModelConfig
from marey.latents.dataset import Replacement
from marey.sampling.exposure import Appearance, ExposureLog, cut_spans
from marey.sampling.planner import Ints, MicrobatchPlanner, PlannedBatch
from marey.sampling.video_tokens import frames_seen
from marey.training.latent_ledger import LatentLedger


class Measured(NamedTuple):
    """One micro-step of this rank."""

    seen: list[Appearance]
    refused: list[tuple[str, str]]
    """(source, clip) of what could not be read."""
    stand_ins: list[list[int]]
    """(source, row that could not be read, row of the same source that stands in for it)"""
    rows: Ints
    """int64 ``[b]``: rows of the clips that were read."""
    starts: Ints
    """int64 ``[b]``: the frame that each window was read from."""


class Exposure:
    """Measures micro-steps; between :meth:`start` and the end of a run it keeps the log of this rank."""

    def __init__(self, planner: MicrobatchPlanner, model: VideoModelConfig, program: ProgramConfig) -> None:
        self._planner, self._model, self._program = planner, model, program
        self._sources = planner.windows.sources
        self._log: ExposureLog | None = None
        self._rank = 0

    def measure(
        self,
        batch: LatentBatch,
        planned: PlannedBatch,
        replaced: Sequence[tuple[int, Replacement]],
        *,
        supervised: Sequence[int],
    ) -> Measured:
        """What the model saw. ``supervised``: frames of each sample."""
        model = self._model
        channels, _, height, width = batch.latents.shape[1:]
        per_frame = (height // model.patch) * (width // model.patch)
        rows = planned.at.row.tolist()
        stand_ins = []
        for b, item in replaced:
            source = int(planned.source[b])
            used = self._row(source, item.used.clip_id)
            stand_ins.append([source, rows[b], used])
            rows[b] = used
        in_model = frames_seen(self._program, np.asarray(batch.lengths, dtype=np.int64) // model.patch_t)
        seen = [
            Appearance(
                source=identity.source,
                clip_id=identity.clip_id,
                frames=frames,
                tokens=int(seen_frames) * per_frame,
                seconds=self._seconds(int(planned.source[b]), rows[b], frames),
                supervised=supervised[b] * channels * height * width,
                turn=int(planned.turn[b]),
                repeat=int(planned.repeat[b]),
            )
            for b, (identity, frames, seen_frames) in enumerate(
                zip(batch.identities, batch.lengths, in_model, strict=True)
            )
        ]
        return Measured(
            seen,
            [(item.asked.source, item.asked.clip_id) for _, item in replaced],
            stand_ins,
            np.asarray(rows, dtype=np.int64),
            np.asarray([identity.start for identity in batch.identities], dtype=np.int64),
        )

    def _row(self, source: int, clip_id: str) -> int:
        return int(self._sources[source].manifest.table.column("clip_id").index(clip_id).as_py())

    def _seconds(self, source: int, row: int, frames: int) -> float:
        fps = self._sources[source].manifest.fps
        return 0.0 if fps is None else float(frames / fps[row])

    def start(self, run_dir: Path, *, rank: int, micro_steps: int) -> None:
        """Go on after ``micro_steps``; rank 0 removes what an abandoned future had counted."""
        folder = run_dir / "exposure"
        if rank == 0:
            cut_spans(folder, step=micro_steps)
        self._log, self._rank = ExposureLog.resumed(folder, step=micro_steps, rank=rank), rank

    def count(self, measured: Measured, *, ledger: LatentLedger, epoch: int, micro_step: int, skipped: bool) -> None:
        """Add one micro-step; draws that no step takes are rank 0's to count, at the end of their epoch."""
        assert self._log is not None
        self._log.record(measured.seen, reached=not skipped)
        for source, clip_id in measured.refused:
            self._log.record_replaced(source, clip_id)
        left = ledger.dropped_at(epoch, micro_step) if self._rank == 0 else None
        if left is None:
            return
        drawn, at = left
        self._log.record_dropped(
            [
                (self._sources[s].name, self._sources[s].manifest.clip(row).clip_id, turn)
                for s, row, turn in zip(drawn.source.tolist(), at.row.tolist(), drawn.turn.tolist(), strict=True)
            ]
        )

    def flush(self, micro_steps: int) -> None:
        """Write what was counted up to ``micro_steps``."""
        if self._log is not None:
            self._log.flush(micro_steps)
