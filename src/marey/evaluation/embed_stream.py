"""Features of whole episodes, frame after frame, from an encoder that remembers the frames before.

Legend: n positions along time (frames over the tubelet size) of an episode, D features.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from marey.core.errors import UserError
from marey.core.progress import Progress
from marey.evaluation.features import FeatureBatch, Per
from marey.evaluation.loading import LoadedEncoder
from marey.models.streaming import StreamingEncoder
from marey.pixels.episodes import EpisodeSource, FrameRequest
from marey.pixels.evalclips import short_side_centre_crop
from marey.pixels.reading import ClipReader, Refusal


def streamed_features(
    loaded: LoadedEncoder, source: EpisodeSource, *, per: Per, device: torch.device | str = "cpu"
) -> Iterator[FeatureBatch]:
    """One batch per episode of ``source``: values ``[1, n, D]`` under ``encoder``, frames at the trained stride.

    per: ``clip`` is the [CLS] output as of each position; ``frame`` that position's mean patch output. The first
    positions, as many as a clip has, are those of the full forward pass; later ones see a window of that length
    (``StreamingEncoder``, sliding). Frames that do not fill a last tubelet are left out, and so is an empty episode.
    Raises UserError for an encoder that cannot be streamed, for features that are not finite, and where no episode
    has a row.
    """
    given = loaded.preprocessing
    positions = given.num_frames // given.tubelet_size
    # Without rotary positions a window cannot move: such a stream holds one clip's length and then starts again.
    stream = StreamingEncoder(loaded.encoder, positions=positions, sliding=loaded.encoder.use_rope)
    return _episodes(stream, loaded, source, per, device)


def _episodes(
    stream: StreamingEncoder, loaded: LoadedEncoder, source: EpisodeSource, per: Per, device: torch.device | str
) -> Iterator[FeatureBatch]:
    reader, empty = ClipReader(source), True
    with Progress("embed", total=len(source.lengths), unit="episodes") as progress:
        for episode in range(len(source.lengths)):
            stream.reset()
            values: list[Tensor] = []
            refusal: Refusal | None = None
            for frames in _clips(reader, loaded, episode):
                if isinstance(frames, Refusal):
                    refusal = frames
                    break
                values += _push(stream, frames.to(device), per)
            progress.advance(1)
            empty = empty and refusal is None and not values
            if refusal is not None:
                nothing = np.empty(0, np.int64)
                yield FeatureBatch({}, nothing, nothing, nothing, [refusal])
            elif values:
                found = torch.cat(values, dim=1).float().cpu()
                if not bool(found.isfinite().all()):
                    raise UserError("the encoder's features are not finite: its training diverged")
                zero = np.zeros(1, np.int64)
                yield FeatureBatch({"encoder": found}, zero + episode, zero, zero, [])
    if empty:
        raise UserError(
            f"no episode of {source.path} has {loaded.preprocessing.tubelet_size} frames at stride "
            f"{loaded.preprocessing.frame_stride}, which one token covers; add longer videos"
        )


def _clips(reader: ClipReader, loaded: LoadedEncoder, episode: int) -> Iterator[Tensor | Refusal]:
    """The episode's frames at the trained stride, normalised ``[1, 3, T, S, S]``, at most a clip's length at a time."""
    given = loaded.preprocessing
    length = int(reader.source.lengths[episode])
    steps = np.arange(0, length, given.frame_stride, dtype=np.int64)
    steps = steps[: len(steps) // given.tubelet_size * given.tubelet_size]
    for first in range(0, len(steps), given.num_frames):
        wanted = steps[first : first + given.num_frames]
        (frames,) = reader.read([FrameRequest(episode, wanted)])
        if isinstance(frames, Refusal):
            yield frames
            return
        cropped = short_side_centre_crop(frames, given.img_size)
        # Normalising knows clips of one length: the last frame stands in for those that are not there.
        missing = cropped[-1:].expand(given.num_frames - len(cropped), -1, -1, -1)
        clip = torch.cat((cropped, missing)).movedim(1, 0).unsqueeze(0)
        yield given.normalize(clip)[:, :, : len(wanted)]


def _push(stream: StreamingEncoder, video: Tensor, per: Per) -> list[Tensor]:
    """``[1, k, D]`` for each push, one tubelet at a time."""
    if not stream.sliding:
        stream.reset()
    values = []
    for frames in torch.split(video, stream.encoder.tubelet_size, dim=2):
        got = stream.push(frames)
        values.append(got.summary if per == "clip" else got.patches.mean(dim=2))
    return values
