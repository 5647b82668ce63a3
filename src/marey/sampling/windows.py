"""The windows of every source, addressed by number: where each lies, how long it is, on which canvas.

A clip's windows start at its ``start`` and every ``stride`` latent frames after it, as long as the shortest
bucket fits. Window numbers run through a source's clips in order, so one running count per clip locates any
of them. Everything here comes from manifests; no video is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.latents.geometry import Geometry
from marey.latents.manifest import Manifest

Ints = NDArray[np.int64]


class Measures(NamedTuple):
    """What the windows of a source hold, each window counted once. None: the manifest does not say."""

    windows: int
    frames: int
    hours: float | None
    tokens: int | None


class Located(NamedTuple):
    """k windows, by column, int64 ``[k]`` each; height and width are 0 where the manifest does not say."""

    row: Ints
    start: Ints
    prefix: Ints
    future: Ints
    height: Ints
    width: Ints


class SourceWindows:
    """The windows of one manifest.

    ``stride`` None: windows do not overlap, they start every ``geometry.longest`` frames; frames after a shorter
    window, up to the next start, belong to none. ``lead`` frames (1 for a program with a condition frame) stay
    free before the first window.
    """

    def __init__(
        self, name: str, manifest: Manifest, geometry: Geometry, *, stride: int | None = None, lead: int = 0
    ) -> None:
        self.name, self.manifest, self.geometry = name, manifest, geometry
        self.stride = geometry.longest if stride is None else stride
        self.lead = lead
        self.first = np.maximum(manifest.start, lead)
        """int64 ``[rows]``: where each clip's first window starts."""
        room = manifest.length_frames - self.first - geometry.shortest
        counts = np.where(room >= 0, room // self.stride + 1, 0)
        self._ends = np.cumsum(counts)
        self.unusable_clips = int((counts == 0).sum())

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def nbytes(self) -> int:
        """Bytes held besides the manifest's own."""
        return self._ends.nbytes + self.first.nbytes

    def locate(self, windows: Ints) -> Located:
        """Row, start, geometry and canvas of ``windows`` (int64 ``[k]``, each below ``len(self)``)."""
        row = np.searchsorted(self._ends, windows, side="right")
        before = np.where(row > 0, self._ends[row - 1], 0)
        start = self.first[row] + (windows - before) * self.stride
        manifest = self.manifest
        available = manifest.length_frames[row] - start
        prefix, future = self.geometry.pick(manifest.clip_keys[row], start, available)
        unknown = np.zeros(len(row), dtype=np.int64)
        height = unknown if manifest.height is None else manifest.height[row]
        width = unknown if manifest.width is None else manifest.width[row]
        return Located(row, start, prefix, future, height, width)

    @property
    def longest_room(self) -> int:
        """Latent frames from the first possible start to the end of the clip that has most of them; 0 without clips."""
        return max(0, int((self.manifest.length_frames - self.first).max(initial=0)))

    def measures(self, *, patch: int) -> Measures:
        """Totals over all windows; ``patch`` is the side of a token in latent cells."""
        at = self.locate(np.arange(len(self), dtype=np.int64))
        frames = at.prefix + at.future
        manifest = self.manifest
        return Measures(
            windows=len(self),
            frames=int(frames.sum()),
            hours=None if manifest.fps is None else float((frames / manifest.fps[at.row]).sum() / 3600),
            tokens=None
            if manifest.height is None
            else int((frames * (at.height // patch) * (at.width // patch)).sum()),
        )


class WindowTable:
    """The windows of all sources of a mixture."""

    def __init__(self, sources: Sequence[SourceWindows]) -> None:
        self.sources = tuple(sources)
        names = [source.name for source in sources]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"data.sources: two sources are named {name}; give each a name of its own.")

    @property
    def names(self) -> list[str]:
        """Source names, in order."""
        return [source.name for source in self.sources]

    @property
    def sizes(self) -> list[int]:
        """Windows of each source."""
        return [len(source) for source in self.sources]

    def require_canvas(self, *, why: str, instead: str = "data.shape_bucketed_batching=false") -> None:
        """Raise UserError naming the first source whose manifest has no height and width, and the way out."""
        for source in self.sources:
            if source.manifest.height is None:
                raise UserError(
                    f"{source.manifest.path}: source {source.name} has no columns height and width, which {why} "
                    f"needs; add them, or set {instead}."
                )

    def locate(self, source: NDArray[np.int32], windows: Ints) -> Located:
        """Row, start, geometry and canvas of each (source, window), int64 ``[k]``."""
        columns = np.zeros((len(Located._fields), len(source)), dtype=np.int64)
        for s in np.unique(source):
            mine = np.flatnonzero(source == s)
            columns[:, mine] = self.sources[s].locate(windows[mine])
        return Located(*columns)

    def weighing(self, meaning: str, *, patch: int, weights: Sequence[float] | None = None) -> list[float]:
        """The number that ``data.weights`` multiplies each source's weight with (1 for ``by_draw``).

        A source of weight 0 in ``weights`` is not asked, and counts 0. Raises UserError naming the source whose
        manifest cannot tell it.
        """
        if meaning == "by_draw":
            return [1.0] * len(self.sources)
        if meaning == "by_size":
            return [float(size) for size in self.sizes]
        field, columns = {
            "by_hours": ("hours", "fps"),
            "by_frames": ("frames", "length_frames"),
            "by_tokens": ("tokens", "height and width"),
        }[meaning]
        found: list[float] = []
        for source, weight in zip(self.sources, weights or [1.0] * len(self.sources), strict=True):
            value = getattr(source.measures(patch=patch), field) if weight > 0 else 0
            if value is None:
                raise UserError(
                    f"{source.manifest.path}: data.weights={meaning} needs the column {columns}, which source "
                    f"{source.name} does not have; add it or weigh by_size or by_draw."
                )
            found.append(float(value))
        return found
