"""Frames to sidecars and a manifest, through a codec: resumable, one file per clip, each whole or absent.

The work on one episode is a pure function of the source, the codec and the episode, so it can be mapped
over many workers; a second run skips what a first one finished.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from marey.core.errors import MachineError, UserError
from marey.core.files import atomic_write, write_json
from marey.core.progress import Progress
from marey.latents.codecs import Codec, latent_frames
from marey.latents.manifest import recording_of
from marey.latents.sidecar import read_shape, sidecar_metadata, write_sidecar

STATE = "encode.json"
MANIFEST = "manifest.csv"
SKIPPED = "skipped.csv"
_SKIPPED_COLUMNS = ["clip_id", "reason"]
_SHORT = "give fewer than two latent frames"
_COLUMNS = ("clip_id", "path", "length_frames", "height", "width", "physical_key", "text", "fps")


class FramesWanted(NamedTuple):
    """Frames of one episode, by their stored steps."""

    episode: int
    steps: NDArray[np.int64]


class FrameSource(Protocol):
    """Episodes of stored frames: what this module needs of a frame store."""

    @property
    def name(self) -> str:
        """What clips are named after."""

    @property
    def version(self) -> str:
        """Changes whenever the content does."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``[episodes]``: stored frames of each."""

    @property
    def files(self) -> list[str]:
        """``[episodes]``: the video that each came from."""

    @property
    def rate(self) -> float | None:
        """Stored frames per second."""

    def read(self, requests: Sequence[Any]) -> list[torch.Tensor]:
        """uint8 ``[T, 3, H, W]`` for each (episode, steps)."""


@runtime_checkable
class DescribedSource(Protocol):
    """A source that knows what its episodes show."""

    @property
    def texts(self) -> Sequence[str | None] | None:
        """``[episodes]``: what each shows, in words; None where none is known."""


class Encoded(NamedTuple):
    """What was done: the manifest, clips in it, how many a former run had made, and the skipped ones with reasons.

    ``skipped.csv`` beside the manifest lists the last, where there are any.
    """

    manifest: Path
    clips: int
    reused: int
    skipped: list[tuple[str, str]]


def encode(
    source: FrameSource,
    out: Path | str,
    codec: Codec,
    *,
    texts: Sequence[str | None] | None = None,
    dtype: torch.dtype = torch.float16,
) -> Encoded:
    """Encode every episode of ``source`` into ``out``: ``latents/*.safetensors`` and ``manifest.csv``.

    Frames are cut at the centre to a multiple of the codec's cells, and at the end to whole latent frames.
    ``texts`` gives each episode its text (None: the source's own, where it has any). Episodes of fewer than two
    latent frames, and those that cannot be read or encoded, are skipped and listed; the next run tries them again.
    Raises UserError when ``out`` holds the work of another source or codec, when nothing could be encoded,
    and when a file cannot be written: the next run goes on from what is complete.
    """
    if texts is None and isinstance(source, DescribedSource):
        texts = source.texts
    folder = Path(out)
    _claim(folder, source, codec, dtype)
    rows: list[dict[str, object]] = []
    skipped: list[tuple[str, str]] = []
    reused = 0
    digits = max(6, len(str(len(source.lengths))))
    with Progress("encode", total=len(source.lengths), unit="clips") as progress:
        for episode in range(len(source.lengths)):
            clip = f"{source.name}-{episode:0{digits}d}"
            frames = latent_frames(int(source.lengths[episode]), codec)
            if frames < 2:
                skipped.append((clip, f"{int(source.lengths[episode])} frames {_SHORT}"))
                progress.advance()
                continue
            path = Path("latents") / f"{episode:0{digits}d}.safetensors"
            if _finished(folder / path, clip):
                reused += 1
            else:
                reason = _failure(source, codec, episode, folder / path, clip=clip, dtype=dtype)
                if reason is not None:
                    skipped.append((clip, reason))
                    progress.advance()
                    continue
            _, length, height, width = read_shape(folder / path, clip=clip)
            rows.append(
                {
                    "clip_id": clip,
                    "path": path.as_posix(),
                    "length_frames": length,
                    "height": height,
                    "width": width,
                    "physical_key": recording_of(source.files[episode]),
                    "text": (texts[episode] or "") if texts is not None else "",
                    "fps": "" if source.rate is None else f"{source.rate / codec.temporal:.6g}",
                }
            )
            progress.advance()
    if not rows:
        raise UserError(_nothing(source, skipped))
    _write_skipped(folder / SKIPPED, skipped)
    _write_manifest(folder / MANIFEST, rows)
    return Encoded(folder / MANIFEST, len(rows), reused, skipped)


def _nothing(source: FrameSource, skipped: Sequence[tuple[str, str]]) -> str:
    """The refusal of a source of which nothing could be encoded."""
    failed = [entry for entry in skipped if not entry[1].endswith(_SHORT)]
    if not failed:
        return f"{source.name}: no episode gives two latent frames; encode longer videos."
    clip, reason = failed[0]
    said = reason if reason.startswith(f"clip {clip}") else f"clip {clip}: {reason}"
    return f"{source.name}: none of its {len(skipped)} episodes could be encoded, the first because of {said}"


def _failure(
    source: FrameSource, codec: Codec, episode: int, path: Path, *, clip: str, dtype: torch.dtype
) -> str | None:
    """Encode one episode; why that cannot be, where it is this episode's doing and not the disk's or the device's."""
    try:
        encode_episode(source, codec, episode, path, clip=clip, dtype=dtype)
    except (CannotWriteError, MachineError, torch.OutOfMemoryError):
        raise
    except UserError as error:
        return str(error)
    except (OSError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def encode_episode(
    source: FrameSource, codec: Codec, episode: int, path: Path, *, clip: str, dtype: torch.dtype
) -> None:
    """Encode one episode into ``path``. Raises UserError naming the clip when the latents are not finite."""
    length = int(source.lengths[episode])
    used = 1 + (length - 1) // codec.temporal * codec.temporal
    (frames,) = source.read([FramesWanted(episode, np.arange(used, dtype=np.int64))])
    height, width = (size // codec.spatial * codec.spatial for size in frames.shape[2:])
    if min(height, width) == 0:
        raise UserError(
            f"clip {clip}: frames of {frames.shape[2]}x{frames.shape[3]} pixels are smaller than one cell of codec "
            f"{codec.name} ({codec.spatial} pixels); ingest at a larger size."
        )
    top, left = (frames.shape[2] - height) // 2, (frames.shape[3] - width) // 2
    latents = codec.encode(frames[:, :, top : top + height, left : left + width]).to(dtype)
    if not bool(torch.isfinite(latents).all()):
        raise UserError(f"clip {clip}: codec {codec.name} gave values that {dtype} cannot hold; use float32.")
    with _writing(path.parent):
        write_sidecar(path, latents, metadata={"clip_id": clip, "codec": codec.fingerprint})


class CannotWriteError(UserError):
    """The disk does not take it: no clip's fault."""


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A full disk and the like as one sentence; what is written so far is complete."""
    try:
        yield
    except OSError as error:
        raise CannotWriteError(
            f"cannot write to {folder}: {error.strerror or error}; make room, and run the same command again to go on "
            "from here."
        ) from error


def _claim(folder: Path, source: FrameSource, codec: Codec, dtype: torch.dtype) -> None:
    """Record what ``folder`` is the encoding of; refuse one that is of something else."""
    state = {
        "source": source.name,
        "source_version": source.version,
        "codec": codec.name,
        "fingerprint": codec.fingerprint,
        "dtype": str(dtype).removeprefix("torch."),
    }
    record = folder / STATE
    if record.is_file():
        try:
            former = json.loads(record.read_text(encoding="utf-8"))
        except ValueError:
            former = {}
        for key, value in state.items():
            if former.get(key) != value:
                raise UserError(
                    f"{folder}: it holds an encoding with {key} {former.get(key)}, not {value}; choose another folder "
                    "or delete this one."
                )
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: it is not empty and no encoding of Marey's; choose another folder.")
    else:
        with _writing(folder):
            write_json(record, state)


def _finished(path: Path, clip: str) -> bool:
    metadata = sidecar_metadata(path)
    return metadata is not None and metadata.get("clip_id") == clip


def _write_skipped(path: Path, skipped: Sequence[tuple[str, str]]) -> None:
    if not skipped:
        path.unlink(missing_ok=True)
        return
    with _writing(path.parent), atomic_write(path, "w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_SKIPPED_COLUMNS)
        writer.writerows(skipped)


def skipped_clips(manifest: Path) -> list[tuple[str, str]]:
    """(clip, reason) of what the encoding that wrote ``manifest`` left out."""
    path = manifest.parent / SKIPPED
    if manifest.name != MANIFEST or not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if not rows or rows[0] != _SKIPPED_COLUMNS:
        return []  # somebody else's file
    return [(row[0], row[1]) for row in rows[1:] if len(row) == len(_SKIPPED_COLUMNS)]


def _write_manifest(path: Path, rows: list[dict[str, object]]) -> None:
    columns = [name for name in _COLUMNS if any(row[name] != "" for row in rows)]
    with _writing(path.parent), atomic_write(path, "w") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
