"""Codecs: frames to latents and back, by name.

A codec is one factory in a registry; ``patch`` and ``wan`` are here. One that needs a model lives in the room that
owns models, or in another package: those are found by the entry points of group ``marey.codecs``.
Legend: C channels of the latent, T frames, T' latent frames, H' and W' the latent canvas.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import torch

from marey.core.errors import UserError, nearest
from marey.core.files import sha256


class Codec(Protocol):
    """What an encoder of frames offers."""

    name: str
    channels: int
    fingerprint: str
    """Names the codec, its settings and weights; equal fingerprints give equal latents."""
    spatial: int
    """Pixels per latent cell, along height and width; frames given to ``encode`` must be multiples of it."""
    temporal: int
    """Frames per latent frame; the first latent frame stands for one frame alone when this is above 1."""

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """uint8 ``[T, 3, H, W]``, T = 1 + temporal*(T'-1) -> floating ``[C, T', H/spatial, W/spatial]``."""
        ...

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Floating ``[C, T', H', W']`` -> uint8 ``[T, 3, H, W]``."""
        ...


Factory = Callable[..., Codec]
_FACTORIES: dict[str, Factory] = {}
_GROUP = "marey.codecs"


def register(name: str, factory: Factory) -> None:
    """Make a codec known under ``name``; ``factory`` takes the codec's options as keywords."""
    _FACTORIES[name] = factory


def build_codec(name: str, options: Mapping[str, Any] | None = None) -> Codec:
    """The codec called ``name``. Raises UserError for an unknown name or option."""
    factory = _FACTORIES.get(name) or _installed(name)
    if factory is None:
        known = {*_FACTORIES, *entry_points(group=_GROUP).names}
        close = nearest(name, known)
        hint = f"did you mean {close}?" if close else f"choose one of {', '.join(sorted(known))}"
        raise UserError(f"codec {name} is not known; {hint}")
    try:
        return factory(**(options or {}))
    except TypeError as error:
        raise UserError(f"codec {name} cannot be made from {dict(options or {})}: {error}.") from None


def _installed(name: str) -> Factory | None:
    """The factory that an installed package, this one included, names so."""
    for found in entry_points(group=_GROUP, name=name):
        factory: Factory = found.load()
        return factory
    return None


def latent_frames(frames: int, codec: Codec) -> int:
    """Latent frames that ``frames`` frames give; 0 when there are none."""
    return 0 if frames < 1 else (frames - 1) // codec.temporal + 1


def _check_canvas(frames: torch.Tensor, codec: Codec) -> None:
    assert frames.ndim == 4, frames.shape
    assert frames.shape[1] == 3, frames.shape
    assert frames.dtype == torch.uint8, frames.dtype
    height, width = frames.shape[2:]
    if height % codec.spatial or width % codec.spatial:
        raise UserError(
            f"codec {codec.name}: frames of {height}x{width} pixels do not divide into cells of {codec.spatial}; "
            "crop or resize them to a multiple."
        )


class PatchCodec:
    """Weightless: each frame's ``patch`` x ``patch`` blocks of pixels become channels. ``decode`` inverts exactly.

    Channels are ordered (colour, row, column) within the block. Values are pixels in 0..1, less ``mean``, over
    ``std``: -1..1 as it stands; with those of the data, of unit variance, as the noise that flow matching adds.
    """

    name = "patch"
    temporal = 1

    def __init__(self, *, patch: int = 4, mean: float = 0.5, std: float = 0.5) -> None:
        if patch < 1:
            raise UserError(f"codec patch: patch={patch} pixels is not possible; use 1 or more.")
        if not (0 <= mean <= 1 and 0.01 <= std <= 1):
            raise UserError(f"codec patch: mean={mean:g} and std={std:g} are of pixels in 0..1; give std 0.01 or more.")
        self.patch = self.spatial = patch
        self.mean, self.std = mean, std
        self.channels = 3 * patch * patch
        scale = "" if (mean, std) == (0.5, 0.5) else f" mean={mean:g} std={std:g}"
        self.fingerprint = f"patch-1 patch={patch}{scale}"

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """uint8 ``[T, 3, H, W]`` -> float32 ``[3*p*p, T, H/p, W/p]``."""
        _check_canvas(frames, self)
        t, _, height, width = frames.shape
        p = self.patch
        blocks = frames.reshape(t, 3, height // p, p, width // p, p).permute(1, 3, 5, 0, 2, 4)
        pixels = blocks.reshape(self.channels, t, height // p, width // p).to(torch.float32)
        return (pixels - 255 * self.mean) / (255 * self.std)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Floating ``[3*p*p, T, H', W']`` -> uint8 ``[T, 3, H'*p, W'*p]``, clamped to what a pixel can hold."""
        _, t, rows, columns = latents.shape
        p = self.patch
        values = latents.to(torch.float32) * (255 * self.std) + 255 * self.mean
        pixels = values.round().clamp(0, 255).to(torch.uint8)
        blocks = pixels.reshape(3, p, p, t, rows, columns).permute(3, 0, 4, 1, 5, 2)
        return blocks.reshape(t, 3, rows * p, columns * p)


class WanCodec:
    """A causal video autoencoder in diffusers' format (``AutoencoderKLWan``) from a local folder.

    Latents are the mode of the posterior (so encoding is deterministic), normalised per channel by the mean
    and deviation in the model's configuration. ``device`` and ``dtype`` say where and how it computes.
    """

    name = "wan"

    def __init__(self, *, path: str, device: str = "cpu", dtype: str = "float32") -> None:
        folder = Path(path)
        if not (folder / "config.json").is_file():
            raise UserError(
                f"codec wan: {folder} holds no config.json; give the local folder of an AutoencoderKLWan (its `vae` "
                "folder)."
            )
        try:
            diffusers: Any = importlib.import_module("diffusers")
        except ImportError:
            raise UserError("codec wan needs diffusers; install it with `pip install marey[wan]`.") from None
        kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if dtype not in kinds:
            raise UserError(f"codec wan: dtype={dtype} is not one of {', '.join(kinds)}.")
        try:
            model = diffusers.AutoencoderKLWan.from_pretrained(
                str(folder), local_files_only=True, torch_dtype=kinds[dtype], low_cpu_mem_usage=False
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"codec wan: {folder} is not a readable AutoencoderKLWan ({str(error).splitlines()[0]})."
            ) from None
        self._model: Any = model.to(device).eval().requires_grad_(False)
        self._device, self._dtype = torch.device(device), kinds[dtype]
        config = model.config
        self.channels = int(config.z_dim)
        self.spatial, self.temporal = int(config.scale_factor_spatial), int(config.scale_factor_temporal)
        self._mean = torch.tensor(config.latents_mean, dtype=torch.float32).view(-1, 1, 1, 1)
        self._std = torch.tensor(config.latents_std, dtype=torch.float32).view(-1, 1, 1, 1)
        self.fingerprint = f"wan-1 weights={_weights_digest(folder)} dtype={dtype}"

    @torch.no_grad()
    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """uint8 ``[T, 3, H, W]``, T = 1 + 4k -> float32 ``[C, 1 + k, H/8, W/8]`` (4 and 8 as the model says)."""
        _check_canvas(frames, self)
        assert (len(frames) - 1) % self.temporal == 0, frames.shape
        video = frames.to(self._device).permute(1, 0, 2, 3)[None].to(self._dtype) / 127.5 - 1
        mode = self._model.encode(video).latent_dist.mode()[0].to("cpu", torch.float32)
        latents: torch.Tensor = (mode - self._mean) / self._std
        return latents

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Floating ``[C, T', H', W']`` -> uint8 ``[1 + 4(T'-1), 3, 8H', 8W']``."""
        raw = (latents.to("cpu", torch.float32) * self._std + self._mean)[None].to(self._device, self._dtype)
        video = self._model.decode(raw).sample[0].to("cpu", torch.float32)
        pixels: torch.Tensor = ((video.permute(1, 0, 2, 3) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return pixels


def _weights_digest(folder: Path) -> str:
    """A short hash of the model's configuration and weight files."""
    whole = hashlib.sha256()
    for file in sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")):
        whole.update(f"{file.name} {sha256(file)}\n".encode())
    return whole.hexdigest()[:16]


register("patch", PatchCodec)
register("wan", WanCodec)
