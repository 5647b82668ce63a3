"""A held-out future, predicted: the rollout of a causal program beside what really followed and two baselines.

Legend: C channels, K known latent frames, F predicted ones, H and W the latent canvas; T frames of pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marey.core.errors import UserError
from marey.evaluation.causal_loading import LoadedCausal
from marey.evaluation.colours import FeatureColours
from marey.evaluation.latent_codec import EncoderCodec
from marey.evaluation.latent_sample import LatentClip, Split
from marey.evaluation.wording import aligned, count
from marey.objectives.chunked_conditioned import ChunkedConditionedObjective
from marey.objectives.prefix_suffix import PrefixSuffixObjective
from marey.objectives.rollout import SamplerSettings, rollout, rollout_chunked

PREDICTION, STILL, COPY = "prediction", "still image", "copy last"
COLOUR_CELL = 8
"""Pixels drawn for a latent cell of which nothing says how many pixels it stands for."""


@dataclass(frozen=True)
class Rollout:
    """One predicted future. Latents are float32 ``[C, ., H, W]``, pictures uint8 ``[T, 3, h, w]``."""

    clip: LatentClip
    predicted: Tensor
    """``[C, F, H, W]``"""
    errors: Mapping[str, list[float]]
    """Mean squared error of each future latent frame, by what guessed it."""
    pixel_errors: Mapping[str, list[float]] | None
    """The same of each decoded future frame, pixels in 0..1; None where the codec gives no pixels."""
    target_pictures: Tensor
    predicted_pictures: Tensor
    known_pictures: int
    """How many of the pictures were given."""
    decoded_by: str
    """How latents became pictures, in words."""

    def mean(self, name: str) -> float:
        """Error of ``name`` over the whole future."""
        return mean(self.errors[name])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "clip": self.clip.name,
            "held_out": self.clip.held_out,
            "known_frames": self.clip.split.known,
            "predicted_frames": self.clip.split.horizon,
            "decoded_by": self.decoded_by,
            "latent_mse": {name: {"mean": mean(values), "frames": values} for name, values in self.errors.items()},
            "pixel_mse": None
            if self.pixel_errors is None
            else {name: {"mean": mean(values), "frames": values} for name, values in self.pixel_errors.items()},
        }


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return sum(values) / len(values)


def splits_of(loaded: LoadedCausal, *, prefix: int | None, horizon: int | None) -> list[Split]:
    """What to try, longest future first: the geometries of training, with what was asked for in place of theirs.

    Raises UserError for a prefix that the program cannot take.
    """
    if isinstance(loaded.program, ChunkedConditionedObjective):
        if prefix not in (None, 1):
            raise UserError(f"--prefix {prefix}: chunked_conditioned starts from one condition frame; leave it out")
        pairs = [(1, sum(bucket)) for bucket in loaded.config.data.buckets]
    else:
        pairs = list(loaded.config.data.buckets)
    wanted = {Split(prefix or known, horizon or future) for known, future in pairs}
    return sorted(wanted, key=lambda split: (split.horizon, split.known), reverse=True)


def lead_frames(loaded: LoadedCausal) -> int:
    """Frames that must come before a clip's first window."""
    return int(isinstance(loaded.program, ChunkedConditionedObjective))


def predict(loaded: LoadedCausal, clip: LatentClip, *, settings: SamplerSettings, text: str | None = None) -> Rollout:
    """Roll out ``clip``'s future from its known frames and measure it.

    ``text`` replaces the clip's own. Raises UserError where the model needs a text and there is none, or was trained
    on another number of channels.
    """
    known, horizon = clip.split
    program = loaded.program
    channels = program.model.size.channels
    if len(clip.latents) != channels:
        raise UserError(
            f"{clip.name} has {len(clip.latents)} latent channels and {loaded.path} was trained on {channels}; give "
            "data of the same codec"
        )
    device = next(program.parameters()).device
    given = clip.latents[:, :known].to(device)
    embedded = _embedded(loaded, clip, text, device)
    if isinstance(program, ChunkedConditionedObjective):
        settings_of = loaded.config.program
        predicted = rollout_chunked(
            program,
            given[:, -1:],
            horizon=horizon,
            max_frames=max(sum(bucket) for bucket in loaded.config.data.buckets),
            chunk_size=settings_of.chunk_size[1],
            window=settings_of.chunk_window[1],
            text=embedded,
            settings=settings,
        )
    else:
        assert isinstance(program, PrefixSuffixObjective)
        predicted = rollout(
            program, given, horizon=horizon, geometries=loaded.config.data.buckets, text=embedded, settings=settings
        )
    predicted = predicted.cpu()
    if not bool(predicted.isfinite().all()):
        raise UserError(f"the future that {loaded.path} predicts for {clip.name} is not finite: its training diverged")
    return measure(clip, predicted)


def _embedded(loaded: LoadedCausal, clip: LatentClip, text: str | None, device: torch.device) -> Tensor | None:
    if loaded.text is None:
        if text is not None:
            raise UserError(f"--text: {loaded.path} was trained with data.text_conditioning=disabled; leave it out")
        return None
    words = text if text is not None else clip.text
    if words is None:
        raise UserError(f"{clip.name} has no text and {loaded.path} is conditioned on one; give --text")
    return loaded.text.encode(words, clip=clip.name).to(device)


def measure(clip: LatentClip, predicted: Tensor) -> Rollout:
    """Errors and pictures of a predicted future ``[C, F, H, W]``.

    The still image holds the last known frame. Copy last guesses each frame to be the true one before it: it sees
    the future up to then, which the prediction does not.
    """
    known = clip.split.known
    past, target = clip.latents[:, :known], clip.latents[:, known:]
    guesses = {
        PREDICTION: predicted,
        STILL: past[:, -1:].expand_as(target),
        COPY: clip.latents[:, known - 1 : -1],
    }
    errors = {name: _per_frame((guess - target).double(), axis=1) for name, guess in guesses.items()}
    decoder, words, pixels = _decoder(clip)
    shown = decoder.decode(clip.latents)
    first = len(decoder.decode(past))
    pictured = {PREDICTION: decoder.decode(torch.cat((past, predicted), dim=1))}
    pixel_errors = None
    if pixels:
        pictured[STILL] = decoder.decode(torch.cat((past, guesses[STILL]), dim=1))
        pictured[COPY] = torch.cat((shown[:1], shown[:-1]))
        truth = shown[first:].double()
        pixel_errors = {
            name: _per_frame((guess[first:].double() - truth) / 255, axis=0) for name, guess in pictured.items()
        }
    return Rollout(
        clip=clip,
        predicted=predicted,
        errors=errors,
        pixel_errors=pixel_errors,
        target_pictures=shown,
        predicted_pictures=pictured[PREDICTION],
        known_pictures=first,
        decoded_by=words,
    )


def _per_frame(difference: Tensor, *, axis: int) -> list[float]:
    others = [dim for dim in range(difference.ndim) if dim != axis]
    return [float(value) for value in difference.square().mean(dim=others)]


def _decoder(clip: LatentClip) -> tuple[Any, str, bool]:
    """Something with ``decode``, how it does it, and whether it gives pixels."""
    codec = clip.codec
    if codec is not None and not isinstance(codec, EncoderCodec):
        return codec, f"decoded by codec {codec.name}", True
    colours = FeatureColours.fit(clip.latents, cell=COLOUR_CELL if codec is None else codec.spatial)
    reason = "features of an encoder" if codec is not None else "latents of a codec that nothing names"
    return colours, f"{reason}, as colours: the three principal components of the true clip", False


def summary_lines(rollouts: Sequence[Rollout]) -> list[str]:
    """The errors in words, averaged over all of ``rollouts``."""
    first = rollouts[0]
    known, horizon = first.clip.split
    kept = all(item.clip.held_out for item in rollouts)
    names = ", ".join(item.clip.name for item in rollouts[:3]) + (", ..." if rollouts[3:] else "")
    rows = [
        ("clips", f"{len(rollouts)} ({names})" + ("" if kept else "; whether training saw them is not known here")),
        ("known", count(known, "latent frame")),
        ("predicted", count(horizon, "latent frame")),
        ("pictures", first.decoded_by),
    ]
    still = mean([item.mean(STILL) for item in rollouts])
    for name in (PREDICTION, STILL, COPY):
        error = mean([item.mean(name) for item in rollouts])
        text = f"latent MSE {error:.4g}"
        if name != STILL and still > 0:
            text += f" ({error / still:.2f} of the still image's)"
        pixels = [item.pixel_errors for item in rollouts]
        if all(values is not None for values in pixels):
            text += f", pixel MSE {mean([mean(values[name]) for values in pixels if values is not None]):.4g}"
        rows.append((name, text))
    return aligned(rows, indent=2)
