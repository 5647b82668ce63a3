"""What is asked of a reader: everything about one window, so that reading it needs no manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from marey.latents.manifest import Clip

if TYPE_CHECKING:
    from marey.core.latents import Identity

Layout = Literal["CTHW", "THWC"]


class WindowRequest(NamedTuple):
    """One appearance of one window. ``alternates`` may stand in for it when its clip cannot be read."""

    clip: Clip
    source: str
    layout: Layout | None
    start: int
    prefix: int
    future: int
    epoch: int = 0
    position: int = 0
    repeat: int = 0
    alternates: tuple[WindowRequest, ...] = ()

    @property
    def frames(self) -> int:
        """Valid latent frames: the length hint, known from the manifest alone."""
        return self.prefix + self.future

    @property
    def identity(self) -> Identity:
        """What names this window in errors and in the exposure log."""
        from marey.core.latents import Identity  # deferred: planning must not wait for torch

        return Identity(self.source, self.clip.clip_id, self.clip.physical_key, self.start)
