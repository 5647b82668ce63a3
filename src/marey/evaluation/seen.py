"""What the loader ships for one clip, made visible by the loader itself.

Legend: T frames, V local views, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marey.config.schema import EncoderConfig
from marey.evaluation.pictures import Pixels, kept_patches
from marey.pixels.dataset import build_train_dataset
from marey.pixels.episodes import EpisodeSource


@dataclass(frozen=True)
class Seen:
    """One clip as training sees it; pictures are RGBA ``[T, S, S, 4]``, dropped patches transparent."""

    whole: Pixels
    """The global view before any token is dropped."""
    kept: Pixels
    """The same view, what reaches the encoder."""
    locals_: list[Pixels]
    """Local views, what reaches the encoder."""
    tokens: int
    kept_tokens: int
    local_tokens: int
    kept_local_tokens: int


def what_the_encoder_sees(
    config: EncoderConfig, sources: Sequence[EpisodeSource], *, position: int = 0, local_views: int = 2
) -> Seen:
    """The clip at ``position`` of epoch 0's numbering, of the first source's first usable episode.

    The views and keep-sets are the dataset's own draws for that address; the whole view is the same draw with
    nothing dropped.
    """
    model, side = config.model, config.augmentation.local_size
    draw = (0, position, 0, 0)
    chunk = build_train_dataset(config, sources).__getitems__([draw])
    undropped = config.model_copy(update={"model": model.model_copy(update={"token_drop_rate": 0.0})})
    everything = build_train_dataset(undropped, sources).__getitems__([draw])
    shape = {"frames": model.num_frames, "patch": model.patch_size, "tubelet": model.tubelet_size}
    shown = min(local_views, config.augmentation.local_crops_number)
    return Seen(
        whole=kept_patches(everything.views_global, 0, size=model.img_size, **shape),
        kept=kept_patches(chunk.views_global, 0, size=model.img_size, **shape),
        locals_=[kept_patches(chunk.views_local, view, size=side, **shape) for view in range(shown)],
        tokens=everything.views_global.patches.shape[1],
        kept_tokens=chunk.views_global.patches.shape[1],
        local_tokens=everything.views_local.patches.shape[1],
        kept_local_tokens=chunk.views_local.patches.shape[1],
    )
