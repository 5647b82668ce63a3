"""A path to a source of episodes: a frame store, or video files read as they are."""

from __future__ import annotations

from marey.pixels.episodes import EpisodeSource
from marey.pixels.media import expanded
from marey.pixels.store import FrameStore
from marey.pixels.storeformat import is_store

STALL_S = 60.0
"""Seconds without a new frame after which a video's decoder is stopped."""


def open_source(
    path: str,
    *,
    name: str | None = None,
    video_rate: float,
    video_episode_length: int,
    read_stall_s: float = STALL_S,
) -> EpisodeSource:
    """Open ``path``: a ``.lance`` name or a folder holding a Lance table is a store; a file, folder, pattern or
    list of videos is read directly, at ``video_rate`` frames per second in episodes of ``video_episode_length``.
    ``read_stall_s``: see ``VideoEpisodes.open``.

    Raises ``UserError`` where neither works.
    """
    if is_store(expanded(path)):
        return FrameStore.open(path, name=name)
    from marey.pixels.videos import VideoEpisodes

    return VideoEpisodes.open(
        path, name=name, rate=video_rate, episode_length=video_episode_length, read_stall_s=read_stall_s
    )
