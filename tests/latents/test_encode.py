from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from marey.core.errors import UserError
from marey.latents.codecs import PatchCodec
from marey.latents.encode import encode, skipped_clips
from marey.latents.manifest import read_manifest
from marey.latents.sidecar import Expected, read_frames


class Memory:
    """Episodes of random frames; counts what is read."""

    def __init__(self, lengths: Sequence[int], size: tuple[int, int] = (9, 13), name: str = "mem") -> None:
        self.name, self.version, self.rate = name, "1", 15.0
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.files = [f"video, {i // 2}.mp4" for i in range(len(lengths))]
        self.size = size
        self.reads: list[int] = []
        self.fail_at: int | None = None

    def frames(self, episode: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(episode)
        return torch.randint(
            0, 256, (int(self.lengths[episode]), 3, *self.size), dtype=torch.uint8, generator=generator
        )

    def read(self, requests: Sequence[Any]) -> list[torch.Tensor]:
        for episode, _ in requests:
            if episode == self.fail_at:
                raise KeyboardInterrupt
            self.reads.append(episode)
        return [self.frames(episode)[steps] for episode, steps in requests]


class EveryFourth(PatchCodec):
    """Pixels of frames 0, 4, 8, ...: a codec with a temporal factor."""

    temporal = 4

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        assert len(frames) % 4 == 1
        return super().encode(frames[::4])


def test_a_collection_that_moves_keeps_its_split(tmp_path: Path) -> None:
    held_out = []
    for root in ("/data/here", "/mnt/other/place"):
        source = Memory([4] * 30)
        source.files = [f"{root}/day {i % 3}/{i}.mp4" for i in range(30)]
        done = encode(source, tmp_path / root.replace("/", "_"), PatchCodec(patch=4))
        held_out.append(read_manifest(done.manifest).validation_rows(0.3).tolist())
    assert held_out[0] == held_out[1]
    assert 0 < sum(held_out[0]) < 30


def test_sidecars_and_manifest_say_what_was_encoded(tmp_path: Path) -> None:
    source = Memory([6, 5])
    done = encode(source, tmp_path / "out", PatchCodec(patch=4), texts=["a, b", None])
    assert (done.clips, done.reused, done.skipped) == (2, 0, [])
    manifest = read_manifest(done.manifest)
    clip = manifest.clip(0)
    assert (clip.clip_id, clip.length_frames, clip.height, clip.width) == ("mem-000000", 6, 2, 3)
    assert (clip.physical_key, clip.text) == ("video, 0.mp4", "a, b")
    assert manifest.clip(1).text is None
    assert manifest.fps is not None
    assert manifest.fps.tolist() == [15.0, 15.0]
    stored = read_frames(clip.path, clip="c", expected=Expected(6, 2, 3), start=0, frames=6)
    assert stored.dtype == torch.float16
    assert torch.equal(PatchCodec(patch=4).decode(stored), source.frames(0)[:, :, 0:8, 0:12])


def test_a_temporal_codec_gets_whole_latent_frames_and_its_own_rate(tmp_path: Path) -> None:
    done = encode(Memory([9, 12, 4, 13]), tmp_path, EveryFourth(patch=4))
    manifest = read_manifest(done.manifest)
    assert manifest.length_frames.tolist() == [3, 3, 4]
    assert manifest.fps is not None
    assert manifest.fps.tolist() == [3.75] * 3
    assert done.skipped == [("mem-000002", "4 frames give fewer than two latent frames")]


def test_an_interrupted_encoding_continues_where_it_stopped(tmp_path: Path) -> None:
    source = Memory([4, 4, 4, 4])
    source.fail_at = 2
    with pytest.raises(KeyboardInterrupt):
        encode(source, tmp_path / "out", PatchCodec(patch=4))
    assert not (tmp_path / "out" / "manifest.csv").exists()
    source.fail_at = None
    source.reads.clear()
    done = encode(source, tmp_path / "out", PatchCodec(patch=4))
    assert source.reads == [2, 3]
    assert (done.clips, done.reused) == (4, 2)
    encode(Memory([4, 4, 4, 4]), tmp_path / "whole", PatchCodec(patch=4))
    for name in ("manifest.csv", *(f"latents/{i:06d}.safetensors" for i in range(4))):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_truncated_sidecar_is_made_again(tmp_path: Path) -> None:
    source = Memory([4, 4])
    encode(source, tmp_path, PatchCodec(patch=4))
    broken = tmp_path / "latents" / "000001.safetensors"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:50])
    assert encode(source, tmp_path, PatchCodec(patch=4)).reused == 1
    assert broken.read_bytes() == whole


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    encode(Memory([4]), tmp_path / "a", PatchCodec(patch=4))
    with pytest.raises(UserError, match="fingerprint patch-1 patch=4, not patch-1 patch=2"):
        encode(Memory([4]), tmp_path / "a", PatchCodec(patch=2))
    with pytest.raises(UserError, match="source mem, not other"):
        encode(Memory([4], name="other"), tmp_path / "a", PatchCodec(patch=4))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        encode(Memory([4]), tmp_path / "b", PatchCodec(patch=4))


def test_what_cannot_be_encoded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no episode gives two latent frames"):
        encode(Memory([1, 1]), tmp_path / "a", PatchCodec(patch=4))
    with pytest.raises(UserError, match="smaller than one cell"):
        encode(Memory([4]), tmp_path / "b", PatchCodec(patch=16))
    with pytest.raises(UserError, match=r"clip mem-000000: .*cannot hold"):
        encode(Memory([4]), tmp_path / "c", Overflowing(patch=4))


class Overflowing(PatchCodec):
    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        return super().encode(frames) * 1e9


def test_a_disk_that_fills_up_at_any_write_is_one_sentence_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(Memory([4, 4, 5]), tmp_path / "whole", PatchCodec(patch=4))
    after, writes = 0, 0

    def filling(write: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args, **kwargs)

        return wrapped

    for name in ("fsync", "mkdir", "replace"):
        monkeypatch.setattr(os, name, filling(getattr(os, name)))
    said: list[str] = []
    out = tmp_path / "out"
    while True:
        writes = 0
        try:
            done = encode(Memory([4, 4, 5]), out, PatchCodec(patch=4))
            break
        except UserError as error:
            said.append(str(error))
            assert not (out / "manifest.csv").exists()
            after += 1
    assert len(said) > 5
    assert all(re.fullmatch(r"cannot write to \S+: No space left on device; make room, .*go on .*", s) for s in said)
    assert done.clips == 3
    files = [path.relative_to(out) for path in sorted(out.rglob("*")) if path.is_file()]
    assert [str(file) for file in files] == [
        "encode.json",
        *[f"latents/{i:06d}.safetensors" for i in range(3)],
        "manifest.csv",
    ]
    assert all((out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes() for file in files)


class Damaged(Memory):
    """One episode cannot be read, and one makes the codec fail."""

    def read(self, requests: Sequence[Any]) -> list[torch.Tensor]:
        (episode, _) = requests[0]
        if episode == 1:
            raise UserError("s.lance: the frame at episode 1, step 3 is not a whole JPEG")
        if episode == 2:
            raise OSError("bad sector")
        return super().read(requests)


def test_a_clip_that_cannot_be_read_is_left_out_and_listed(tmp_path: Path) -> None:
    done = encode(Damaged([4, 4, 4, 4, 1]), tmp_path, PatchCodec(patch=4))
    assert (done.clips, read_manifest(done.manifest).texts("clip_id")) == (2, ["mem-000000", "mem-000003"])
    assert done.skipped == [
        ("mem-000001", "s.lance: the frame at episode 1, step 3 is not a whole JPEG"),
        ("mem-000002", "OSError: bad sector"),
        ("mem-000004", "1 frames give fewer than two latent frames"),
    ]
    assert skipped_clips(done.manifest) == done.skipped
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "skipped.csv").write_text("mine\n1\n")
    assert skipped_clips(tmp_path / "other" / "manifest.csv") == []
    whole = encode(Memory([4, 4, 4, 4]), tmp_path, PatchCodec(patch=4))  # mended: only these are made
    assert (whole.clips, whole.reused, whole.skipped, skipped_clips(whole.manifest)) == (4, 2, [], [])
    with pytest.raises(UserError, match=r"none of its 2 episodes could be encoded, the first .*not a whole JPEG"):
        encode(Damaged([1, 4]), tmp_path / "nothing", PatchCodec(patch=4))
