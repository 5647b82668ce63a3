"""Draws in, training chunks out: read the clips, make their views, keep the patches that survive.

What a chunk holds depends on its draws alone, not on workers, batch-mates or what was read before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch.utils.data import Dataset

from marey.config.schema import AugmentationConfig, EncoderConfig, ModelConfig, SourceConfig
from marey.core.errors import UserError
from marey.core.keys import rng
from marey.core.pixelstats import normalize_patches
from marey.core.tokencount import kept_count
from marey.core.tokens import TokenGroup, ViewChunk, grid_positions, grid_shape, keep_indices
from marey.pixels.clips import ClipIndex, index_clips
from marey.pixels.episodes import EpisodeSource, FrameRequest
from marey.pixels.evalclips import EvalBatch, EvalClips
from marey.pixels.reading import ClipReader, Refusal
from marey.pixels.views import draw_view, view_patches

__all__ = ["ClipDataset", "EvalBatch", "EvalClips", "build_train_dataset", "collate"]

REPLACEMENT_TRIES = 16

Item = TypeVar("Item")


def collate(item: Item) -> Item:
    """Nothing to do: ``__getitems__`` already returns whole chunks."""
    return item


class Grid(NamedTuple):
    """The tokens of one kind of view."""

    size: int
    tokens: int
    kept: int
    steps: int
    """Of time."""
    positions: torch.Tensor


class ClipDataset(Dataset[ViewChunk]):
    """Chunks of training clips from one source or a mixture.

    Used with a batch sampler that yields lists of draws ``(epoch, position, source, usable episode)`` and
    ``collate_fn=collate``. ``sizes`` and ``clips_per_video`` are what the epoch's order is planned from.
    """

    def __init__(
        self,
        sources: Sequence[EpisodeSource],
        indexes: Sequence[ClipIndex],
        clips_per_video: Sequence[int],
        *,
        augmentation: AugmentationConfig,
        model: ModelConfig,
        seed: int,
        normalize: bool,
    ) -> None:
        """``normalize``: ship float32 normalised patches rather than uint8."""
        assert len(sources) == len(indexes) == len(clips_per_video) > 0
        self.sources, self.indexes = list(sources), list(indexes)
        self._readers = [ClipReader(source) for source in self.sources]
        self.clips_per_video = list(clips_per_video)
        self.augmentation, self.model, self.seed, self.normalize = augmentation, model, seed, normalize
        self.local_views = augmentation.local_crops_number
        self.grids = (self._grid(model.img_size), self._grid(augmentation.local_size))
        # Clips this process failed to read: not tried again. By their first step too: other frames of the episode
        # may well be readable, and whether they are asked for must not depend on what this process saw before.
        self._refused: dict[tuple[int, int, int], Refusal] = {}

    def _grid(self, size: int) -> Grid:
        model = self.model
        grid = grid_shape(model.num_frames, size, size, patch=model.patch_size, tubelet=model.tubelet_size)
        tokens = grid[0] * grid[1] * grid[2]
        kept = kept_count(tokens, model.token_drop_rate, mode=model.token_drop_mode, steps=grid[0])
        return Grid(size, tokens, kept, grid[0], grid_positions(grid))

    @property
    def sizes(self) -> list[int]:
        """Usable episodes of each source."""
        return [len(index) for index in self.indexes]

    def __len__(self) -> int:
        """Clips of one epoch."""
        return sum(n * k for n, k in zip(self.sizes, self.clips_per_video, strict=True))

    def __getitem__(self, draw: tuple[int, int, int, int]) -> ViewChunk:
        """A chunk of one clip."""
        return self.__getitems__([draw])

    def __getitems__(self, draws: Sequence[tuple[int, int, int, int]]) -> ViewChunk:
        """The chunk of these clips, in the order of ``draws``.

        A clip that cannot be read is replaced by one of another episode of its source, drawn by
        (seed, "replace", epoch, position, try). Raises UserError where sixteen in a row fail.
        """
        views = self.local_views
        patch_values = 3 * self.model.tubelet_size * self.model.patch_size**2
        globals_, locals_ = self.grids
        kept_global = torch.empty(len(draws), globals_.kept, patch_values, dtype=torch.uint8)
        kept_local = torch.empty(len(draws), views, locals_.kept, patch_values, dtype=torch.uint8)
        at_global = torch.empty(len(draws), globals_.kept, 3, dtype=torch.int64)
        at_local = torch.empty(len(draws), views, locals_.kept, 3, dtype=torch.int64)
        clips = torch.empty(len(draws), 5, dtype=torch.int64)
        replaced: dict[int, tuple[int, int, int, str]] = {}
        for source in sorted({draw[2] for draw in draws}):
            rows = [row for row, draw in enumerate(draws) if draw[2] == source]
            for block in self._readers[source].blocks(rows):
                for row, frames in zip(block, self._read(source, block, draws, clips, replaced), strict=True):
                    epoch, position = draws[row][:2]
                    for view in range(views + 1):
                        grid = globals_ if view == 0 else locals_
                        patches, positions = self._view(frames, grid, epoch, position, view)
                        if view == 0:
                            kept_global[row], at_global[row] = patches, positions
                        else:
                            kept_local[row, view - 1], at_local[row, view - 1] = patches, positions
        order = sorted(replaced)
        return ViewChunk(
            views_global=self._group(kept_global, at_global),
            views_local=self._group(kept_local.flatten(0, 1), at_local.flatten(0, 1)),
            clips=clips,
            replaced=torch.tensor([replaced[row][:3] for row in order], dtype=torch.int64).reshape(-1, 3),
            reasons=[replaced[row][3] for row in order],
        )

    def _group(self, patches: torch.Tensor, positions: torch.Tensor) -> TokenGroup:
        return TokenGroup(normalize_patches(patches) if self.normalize else patches, positions)

    def _view(
        self, frames: torch.Tensor, grid: Grid, epoch: int, position: int, view: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 ``[K, P]`` and int64 ``[K, 3]``."""
        model = self.model
        keep = keep_indices(
            grid.tokens,
            model.token_drop_rate,
            seed=self.seed,
            epoch=epoch,
            position=position,
            view=view,
            mode=model.token_drop_mode,
            steps=grid.steps,
        )
        height, width = frames.shape[-2:]
        draw = draw_view(height, width, self.augmentation, seed=self.seed, epoch=epoch, position=position, view=view)
        tokens = grid.positions[keep]
        patches = view_patches(
            frames,
            draw,
            tokens,
            size=grid.size,
            patch=model.patch_size,
            tubelet=model.tubelet_size,
            sparse=self.augmentation.sparse,
        )
        return patches, tokens

    def request(self, source: int, usable: int, epoch: int, position: int) -> FrameRequest:
        """The frames of the clip at (epoch, position), if it is one of ``usable`` episode of ``source``."""
        index = self.indexes[source]
        steps = index.window(usable, seed=self.seed, epoch=epoch, position=position)
        return FrameRequest(int(index.episodes[usable]), steps)

    def _read(
        self,
        source: int,
        rows: Sequence[int],
        draws: Sequence[tuple[int, int, int, int]],
        clips: torch.Tensor,
        replaced: dict[int, tuple[int, int, int, str]],
    ) -> list[torch.Tensor]:
        """Frames of the clips ``rows`` of one source; fills their rows of ``clips`` and ``replaced``."""
        results: dict[int, torch.Tensor] = {}
        usable = {row: draws[row][3] for row in rows}
        for attempt in range(REPLACEMENT_TRIES + 1):
            missing = [row for row in rows if row not in results]
            if not missing:
                return [results[row] for row in rows]
            if attempt:
                for row in missing:
                    epoch, position = draws[row][:2]
                    key = rng(self.seed, "replace", epoch, position, attempt)
                    usable[row] = int(key.integers(len(self.indexes[source])))
            requests = [self.request(source, usable[row], *draws[row][:2]) for row in missing]
            for row, request, frames in zip(missing, requests, self._try(source, requests), strict=True):
                if isinstance(frames, Refusal):
                    wanted, reason = replaced[row][1::2] if row in replaced else (request.episode, frames.reason)
                    replaced[row] = (source, int(wanted), -1, str(reason))
                    continue
                results[row] = frames
                epoch, position = draws[row][:2]
                clips[row] = torch.tensor([source, request.episode, int(request.steps[0]), epoch, position])
                if row in replaced:
                    replaced[row] = (source, replaced[row][1], request.episode, replaced[row][3])
        last = replaced[next(row for row in rows if row not in results)][3]
        raise UserError(
            f"{self.sources[source].name} ({self.sources[source].path}): {REPLACEMENT_TRIES + 1} episodes in "
            f"a row cannot be read, the first for this reason: {last}; check that the files are still there, "
            "or build the store again with marey ingest"
        )

    def _try(self, source: int, requests: Sequence[FrameRequest]) -> list[torch.Tensor | Refusal]:
        keys = [(source, request.episode, int(request.steps[0])) for request in requests]
        known = [self._refused.get(key) for key in keys]
        ask = [request for request, refusal in zip(requests, known, strict=True) if refusal is None]
        fresh = iter(self._readers[source].read(ask))
        results = [next(fresh) if refusal is None else refusal for refusal in known]
        for key, result in zip(keys, results, strict=True):
            if isinstance(result, Refusal):
                self._refused[key] = result
        return results


def build_train_dataset(
    config: EncoderConfig,
    sources: Sequence[EpisodeSource],
    *,
    data: str | Sequence[SourceConfig] | None = None,
) -> ClipDataset:
    """The training clips of ``config`` from its opened sources, in the order of ``data`` (None: its
    ``data.train``).

    A source of a mixture may have its own clips per video, stride and rule for short episodes. Raises
    UserError for a source without an episode long enough.
    """
    data = config.data.train if data is None else data
    entries = [SourceConfig(path=data)] if isinstance(data, str) else list(data)
    assert len(entries) == len(sources), (len(entries), len(sources))
    indexes = [
        index_clips(
            source,
            num_frames=config.model.num_frames,
            frame_stride=entry.frame_stride or config.frame_stride,
            pad_short=entry.pad_short or config.data.pad_short,
        )
        for entry, source in zip(entries, sources, strict=True)
    ]
    return ClipDataset(
        sources,
        indexes,
        [entry.clips_per_video or config.loader.clips_per_video for entry in entries],
        augmentation=config.augmentation,
        model=config.model,
        seed=config.seed,
        normalize=not config.loader.normalize_on_gpu,
    )
