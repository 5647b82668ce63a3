"""Features of frozen encoders and baselines over the clips of a source: from the cache, or in one pass over the frames.

Legend: n clips, N tokens, D features (E of a token).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from marey import __version__
from marey.core.errors import UserError
from marey.core.progress import Progress
from marey.evaluation.classifiers import Floats
from marey.evaluation.feature_cache import (
    Entry,
    FeatureCache,
    Key,
    mapped_tokens,
    refuse_full_disk,
    unwritable,
)
from marey.evaluation.featurizers import Featurizer
from marey.evaluation.preprocessing import Preprocessing
from marey.evaluation.spatial import SpatialViews
from marey.evaluation.token_features import Tokens
from marey.pixels.evalclips import EvalClips
from marey.pixels.reading import Refusal


@dataclass(frozen=True)
class FrozenFeatures:
    """Features of the clips that could be read, by featurizer; ``episodes``: int64 ``[n]``, of the source itself."""

    values: dict[str, Floats]
    tokens: dict[str, Tokens]
    """Empty where they were not asked for."""
    episodes: NDArray[np.int64]
    refused: list[Refusal]
    reused: list[str]
    """Which came from the cache."""


def features_key(featurizer: Featurizer, preprocessing: Preprocessing, clips: EvalClips) -> dict[str, Any]:
    """Everything that decides the features of a source's clips."""
    source = clips.source
    return {
        "marey": __version__,
        "features": featurizer.identity,
        "preprocessing": asdict(preprocessing),
        "source": os.path.realpath(source.path),
        "version": source.version,
        "clips_per_episode": clips.clips_per_episode,
        "clips": len(clips),
    }


def frozen_features(
    featurizers: Mapping[str, Featurizer],
    preprocessing: Preprocessing,
    clips: EvalClips,
    *,
    tokens: bool,
    cache: FeatureCache | None,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    label: str = "features",
) -> FrozenFeatures:
    """Features of ``clips`` (those of ``SpatialViews`` too). cache: None keeps everything in memory.

    Features of a source of which something cannot be read are not cached: the next attempt may read it.
    Raises UserError where no clip can be read, for features that are not finite, and where the cache cannot be written.
    """
    entries: dict[str, Entry] = {}
    keys = {name: features_key(one, preprocessing, clips) for name, one in featurizers.items()}
    for name, key in keys.items():
        found = None if cache is None else cache.find(key, tokens=tokens)
        if found is not None:
            entries[name] = found
    reused = list(entries)
    missing = {name: one for name, one in featurizers.items() if name not in entries}
    refused: list[Refusal] = []
    if missing:
        made, refused = _compute(
            missing,
            preprocessing,
            clips,
            keys=keys,
            tokens=tokens,
            cache=cache,
            batch_size=batch_size,
            device=device,
            label=label,
        )
        entries |= made
    rows = _shared_rows(list(entries.values()))
    first = next(iter(entries.values()))
    views = clips.source.views if isinstance(clips.source, SpatialViews) else 1
    return FrozenFeatures(
        {name: entries[name].summary[rows[place]] for place, name in _order(entries, featurizers)},
        {
            name: Tokens(values, entries[name].offset, rows[place])
            for place, name in _order(entries, featurizers)
            if tokens and (values := entries[name].tokens) is not None
        },
        first.episodes[rows[0]] // views,
        refused,
        reused,
    )


def _order(entries: Mapping[str, Entry], featurizers: Mapping[str, Featurizer]) -> list[tuple[int, str]]:
    """(place among the entries, name), in the order in which they were asked for."""
    places = {name: place for place, name in enumerate(entries)}
    return [(places[name], name) for name in featurizers]


def _shared_rows(entries: Sequence[Entry]) -> list[NDArray[np.int64]]:
    """For each entry, its rows of the clips that all of them have, in one order."""
    clips = [list(zip(e.episodes.tolist(), e.clips.tolist(), strict=True)) for e in entries]
    shared = set(clips[0]).intersection(*clips[1:])
    return [np.array([row for row, clip in enumerate(own) if clip in shared], dtype=np.int64) for own in clips]


@torch.inference_mode()
def _compute(
    featurizers: Mapping[str, Featurizer],
    preprocessing: Preprocessing,
    clips: EvalClips,
    *,
    keys: Mapping[str, Key],
    tokens: bool,
    cache: FeatureCache | None,
    batch_size: int,
    device: torch.device | str,
    label: str,
) -> tuple[dict[str, Entry], list[Refusal]]:
    refused: list[Refusal] = []
    episodes: list[NDArray[np.int64]] = []
    numbers: list[NDArray[np.int64]] = []
    with contextlib.ExitStack() as stack:
        folders = {
            name: None if cache is None else stack.enter_context(cache.writing(keys[name], tokens=tokens))
            for name in featurizers
        }
        promised: list[int] = []
        sinks = {
            name: stack.enter_context(_sink(folder, tokens=tokens, promised=promised))
            for name, folder in folders.items()
        }
        progress = stack.enter_context(Progress(label, total=len(clips), unit="clips"))
        for first in range(0, len(clips), batch_size):
            items = range(first, min(first + batch_size, len(clips)))
            found = clips.__getitems__(items)
            refused += found.refused
            if len(found.episodes):
                video = preprocessing.normalize(found.video.to(device))
                for name, featurizer in featurizers.items():
                    sinks[name].add(name, featurizer, video, expected=len(clips))
                episodes.append(found.episodes)
                numbers.append(found.clips)
            progress.advance(len(items))
        if not episodes:
            raise UserError(f"no clip of {clips.source.path} could be read; the first: {refused[0].reason}")
        which = (np.concatenate(episodes), np.concatenate(numbers))
        entries = {name: sink.entry(*which) for name, sink in sinks.items()}
        if cache is not None and not refused:
            for name, entry in entries.items():
                folder = folders[name]
                assert folder is not None
                cache.keep(folder, keys[name], entry=entry)
    return entries, refused


class _Sink:
    """Where one featurizer's features go, batch by batch.

    file: for tokens; None keeps them in memory. promised: bytes that the sinks of this pass will write, shared by them.
    """

    def __init__(self, file: IO[bytes] | None, *, tokens: bool, promised: list[int]) -> None:
        self._file, self._tokens, self._promised = file, tokens, promised
        self._summaries: list[Floats] = []
        self._parts: list[NDArray[np.float16]] = []
        self._offset: NDArray[np.float32] | None = None
        self._shape: tuple[int, ...] = ()

    def add(self, name: str, featurizer: Featurizer, video: torch.Tensor, *, expected: int) -> None:
        """Features of a batch ``[B, 3, T, S, S]``; ``expected``: clips in all."""
        if not self._tokens:
            self._summaries.append(_finite(name, featurizer.summary(video)))
            return
        summary, tokens = featurizer.both(video)
        self._summaries.append(_finite(name, summary))
        values = _finite(name, tokens)
        if self._offset is None:
            # Of the first clip alone, so that it does not depend on the size of a batch.
            self._offset, self._shape = values[0].mean(axis=0), values.shape[1:]
            if self._file is not None:
                self._promised.append(2 * expected * int(np.prod(self._shape)))
                refuse_full_disk(
                    Path(self._file.name).parents[1],
                    sum(self._promised),
                    what=f"patch tokens of {expected:,} clips",
                )
        with np.errstate(over="ignore"):
            half = (values - self._offset).astype(np.float16)
        if not bool(np.isfinite(half).all()):
            raise UserError(
                f"the {name} features reach beyond 65,504, more than the half precision of the token cache holds; "
                "give --no-attentive"
            )
        if self._file is None:
            self._parts.append(half)
            return
        try:
            self._file.write(half.tobytes())
        except OSError as error:
            raise unwritable(Path(self._file.name).parents[1], error) from error

    def entry(self, episodes: NDArray[np.int64], clips: NDArray[np.int64]) -> Entry:
        """Everything that was added, for the clips that it was added for."""
        summary, tokens = np.concatenate(self._summaries), None
        if self._file is not None and self._tokens:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise unwritable(Path(self._file.name).parents[1], error) from error
            tokens = mapped_tokens(Path(self._file.name), shape=(len(summary), *self._shape))
        elif self._tokens:
            tokens = np.concatenate(self._parts)
        offset = np.zeros(0, dtype=np.float32) if self._offset is None else self._offset
        return Entry(summary, tokens, offset, episodes, clips)


@contextlib.contextmanager
def _sink(folder: Path | None, *, tokens: bool, promised: list[int]) -> Iterator[_Sink]:
    if folder is None or not tokens:
        yield _Sink(None, tokens=tokens, promised=promised)
        return
    with (folder / "tokens.f16").open("wb") as file:
        yield _Sink(file, tokens=True, promised=promised)


def _finite(name: str, values: torch.Tensor) -> Floats:
    if not bool(values.isfinite().all()):
        raise UserError(f"the {name} encoder's features are not finite: its training diverged")
    return np.asarray(values.float().cpu().numpy())
