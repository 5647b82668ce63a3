"""From a finished demonstration run to what its page and its summary say.

Legend: n clips, T frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from marey.core.keys import rng
from marey.core.progress import duration
from marey.evaluation.demo_page import Neighbours, Picture
from marey.evaluation.features import ClipFeatures, video_names
from marey.evaluation.future_page import Future
from marey.evaluation.measure import ProbeResult
from marey.evaluation.neighbours import nearest_clips
from marey.evaluation.pictures import frames_last
from marey.evaluation.probe import PRETRAINED, RANDOM
from marey.pixels.episodes import FrameRequest
from marey.pixels.evalclips import EvalClips, short_side_centre_crop
from marey.pixels.reading import Refusal, read_clips

WATCHED_FRAMES, WATCHED_STRIDE, WATCHED_SIDE = 12, 2, 96


def headline(result: ProbeResult, *, what: str) -> str:
    """The result in a sentence, and the plain truth where the encoder did not get better."""
    scores, baseline = result.encoders[PRETRAINED].linear, result.encoders[RANDOM].linear
    gain = result.gains["linear"]
    figures = f"{scores.accuracy:.0%} of held-out clips, against {baseline.accuracy:.0%} with random weights"
    if gain.low > 0:
        return f"Without reading one label, it learned to tell {what} apart: {figures}"
    if gain.high < 0:
        return f"This run made its features worse at telling {what} apart: {figures}"
    return f"This run shows no certain gain in telling {what} apart: {figures}"


def headline_without_labels(videos: int, *, rank: float, width: int) -> str:
    """The same where nobody has labelled the videos: what can be said is whether it collapsed."""
    watched = f"A video encoder of your own, from {videos:,} of your video{'s' if videos != 1 else ''}"
    if rank < 2:
        return f"{watched}: it collapsed, so its features say nothing"
    return f"{watched}: its embedding uses {rank:.0f} of {width} dimensions"


def lede(*, clips: int, steps: int, seconds: float, kept: float, videos: str) -> str:
    """How long it took and what it was shown."""
    return (
        f"A small video encoder trained on {clips:,} clips drawn from {videos} in {steps:,} steps, "
        f"{duration(seconds)} on this machine. It saw {kept:.0%} of the patches of each view, and no label."
    )


def verdict(future: Future) -> str:
    """What the errors of predicted futures say, plainly, in a clause."""
    error, still = future.errors["prediction"], future.errors["still image"]
    share = error / still if still > 0 else math.inf
    if share < 1:
        return f"predicted futures have {share:.2f} of the error of a still image"
    return f"predicted futures are no better than a still image yet ({share:.2f} of its error)"


def pick(labels: Sequence[str], *, count: int, seed: int, purpose: str) -> list[int]:
    """Rows for show, drawn by the seed and not chosen: of different labels while there are such."""
    order = rng(seed, purpose).permutation(len(labels)).tolist()
    chosen: list[int] = []
    while order and len(chosen) < count:
        seen = set()
        for row in list(order):
            if labels[row] not in seen and len(chosen) < count:
                seen.add(labels[row])
                chosen.append(row)
                order.remove(row)
    return chosen


@dataclass(frozen=True)
class Gallery:
    """Clips that can be shown and compared, by row ``[n]``."""

    clips: EvalClips
    features: ClipFeatures
    captions: Sequence[str]
    labels: Sequence[str]
    """Empty strings where nobody labelled the videos."""

    @property
    def videos(self) -> list[str]:
        """The video of each row."""
        names = video_names(self.clips.source)
        if len(set(names)) == 1:  # of a single video, episodes are all there is to tell apart
            names = [f"{name}#{episode}" for episode, name in enumerate(names)]
        return [names[episode] for episode in self.features.episodes]

    def picture(self, row: int) -> Picture | None:
        """The clip of a row; None where it can no longer be read."""
        usable = int(np.searchsorted(self.clips.index.episodes, self.features.episodes[row]))
        found = self.clips[self.clips.item(usable, int(self.features.clips[row]))]
        if not len(found.video):
            return None
        return Picture(frames_last(found.video[0]), self.captions[row], self.labels[row])

    def motion(self, row: int) -> Picture | None:
        """A longer stretch of the same episode than the encoder's clip, for people to watch; None if unreadable."""
        episode = int(self.features.episodes[row])
        length = int(self.clips.source.lengths[episode])
        stride = max(1, min(WATCHED_STRIDE, length // WATCHED_FRAMES))
        steps = np.arange(min(WATCHED_FRAMES, length), dtype=np.int64) * stride
        (frames,) = read_clips(self.clips.source, [FrameRequest(episode, steps)])
        if isinstance(frames, Refusal):
            return None
        square = short_side_centre_crop(frames, WATCHED_SIDE)  # [T, 3, S, S]
        return Picture(frames_last(square.movedim(1, 0)), self.captions[row], self.labels[row])

    def pictures(self, rows: Sequence[int]) -> list[Picture]:
        """Those of ``rows`` that can be read."""
        return [shown for row in rows if (shown := self.picture(row)) is not None]


def neighbour_sets(asked: Gallery, among: Gallery, rows: Sequence[int], *, count: int = 5) -> list[Neighbours]:
    """For each of ``rows`` of one gallery, the nearest clips of other videos in the other, by each encoder."""
    videos, others = asked.videos, among.videos
    near = {
        name: nearest_clips(
            values[list(rows)],
            among.features.values[name],
            count=count,
            query_videos=[videos[row] for row in rows],
            base_videos=others,
        )
        for name, values in asked.features.values.items()
    }
    sets = []
    for place, row in enumerate(rows):
        query = asked.picture(row)
        found = {
            name: among.pictures([other for other in table[place].tolist() if other >= 0])
            for name, table in near.items()
        }
        if query is not None and any(found.values()):
            sets.append(Neighbours(query, found))
    return sets
