from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.errors import UserError
from marey.core.mixing import text_keys
from marey.latents.adapter import LatentAdapter
from marey.latents.dataset import LatentDataset, Replacement
from marey.latents.geometry import Geometry
from marey.latents.manifest import read_manifest
from marey.latents.requests import WindowRequest
from marey.latents.text import HashingTextEncoder

DEFAULT = [(1, 3), (2, 6), (3, 9), (4, 12), (5, 15)]


def pick(geometry: Geometry, clip: str, start: int, available: int) -> tuple[int, int]:
    prefix, future = geometry.pick(text_keys([clip]), np.array([start]), np.array([available]))
    return int(prefix[0]), int(future[0])


@given(st.text(max_size=8), st.integers(0, 10**6), st.integers(4, 100), st.integers(0, 2**40))
def test_a_geometry_is_one_of_the_buckets_that_fit(clip: str, start: int, available: int, seed: int) -> None:
    chosen = pick(Geometry(DEFAULT, seed=seed), clip, start, available)
    assert chosen in DEFAULT
    assert sum(chosen) <= available


@settings(max_examples=30)
@given(st.permutations(DEFAULT), st.text(max_size=8), st.integers(0, 50), st.integers(4, 40))
def test_the_same_window_always_has_the_same_geometry(
    order: list[tuple[int, int]], clip: str, start: int, available: int
) -> None:
    assert pick(Geometry(order, seed=3), clip, start, available) == pick(
        Geometry(DEFAULT, seed=3), clip, start, available
    )


def test_all_fitting_buckets_are_picked_about_equally_often() -> None:
    geometry = Geometry(DEFAULT, seed=0)
    keys = text_keys(f"clip {i}" for i in range(10_000))
    prefix, _ = geometry.pick(keys, np.zeros(10_000, dtype=np.int64), np.full(10_000, 13))
    counts = Counter(prefix.tolist())
    assert set(counts) == {1, 2, 3}
    assert all(abs(count - 10_000 / 3) < 200 for count in counts.values())


def test_geometry_depends_on_seed_clip_and_start() -> None:
    keys = text_keys(f"clip {i}" for i in range(1000))
    zeros, room = np.zeros(1000, dtype=np.int64), np.full(1000, 30)
    base = Geometry(DEFAULT, seed=0).pick(keys, zeros, room)[0]
    for other in (
        Geometry(DEFAULT, seed=1).pick(keys, zeros, room)[0],
        Geometry(DEFAULT, seed=0).pick(keys, zeros + 1, room)[0],
        Geometry(DEFAULT, seed=0).pick(text_keys(f"clop {i}" for i in range(1000)), zeros, room)[0],
    ):
        assert 0.7 < float((base != other).mean()) < 0.9


def test_a_picked_geometry_is_fixed_for_ever() -> None:
    geometry = Geometry(DEFAULT, seed=7)
    assert [pick(geometry, "walk", start, 20) for start in range(6)] == EXPECTED_GEOMETRIES


EXPECTED_GEOMETRIES = [(4, 12), (1, 3), (5, 15), (3, 9), (1, 3), (1, 3)]


@pytest.fixture
def manifest_folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", torch.randn(2, 12, 4, 4, generator=generator).to(torch.float16).numpy())
    rows = "".join(f'c{i},{i}.npy,12,4,4,tape {i // 2},"push, the {i}"\n' for i in range(4))
    (tmp_path / "m.csv").write_text("clip_id,path,length_frames,height,width,physical_key,text\n" + rows)
    return tmp_path


def request(folder: Path, row: int, **changes: object) -> WindowRequest:
    clip = read_manifest(folder / "m.csv").clip(row)
    return WindowRequest(clip=clip, source="m", layout=None, start=2, prefix=1, future=3)._replace(**changes)  # type: ignore[arg-type]


def test_a_sample_is_cropped_to_its_valid_frames_and_knows_itself(manifest_folder: Path) -> None:
    sample = LatentAdapter().load(request(manifest_folder, 3, epoch=4, position=9, repeat=1))
    stored = torch.from_numpy(np.load(manifest_folder / "3.npy"))
    assert torch.equal(sample.video_latents, stored[:, 2:6].float())
    assert sample.video_latents.dtype == torch.float32
    assert (sample.prefix_frames, sample.future_frames, sample.length_hint) == (1, 3, 4)
    assert tuple(sample.identity) == ("m", "c3", "tape 1", 2)
    assert (sample.epoch, sample.position, sample.repeat) == (4, 9, 1)
    assert sample.frame_positions.tolist() == [0, 1, 2, 3]
    assert sample.text is None
    assert sample.condition_latent is None


def test_a_condition_frame_is_the_stored_frame_before_the_window(manifest_folder: Path) -> None:
    sample = LatentAdapter(condition=True).load(request(manifest_folder, 0))
    stored = torch.from_numpy(np.load(manifest_folder / "0.npy")).float()
    assert sample.condition_latent is not None
    assert torch.equal(sample.condition_latent, stored[:, 1:2])
    assert torch.equal(sample.video_latents, stored[:, 2:6])


def test_text_keeps_its_comma_and_its_own_length(manifest_folder: Path) -> None:
    encoder = HashingTextEncoder(width=8, token_limit=10)
    sample = LatentAdapter(text=encoder).load(request(manifest_folder, 2))
    assert sample.text is not None
    assert torch.equal(sample.text, encoder.encode("push, the 2"))
    assert sample.text.shape == (4, 8)


def test_the_checksum_is_checked_only_when_asked(manifest_folder: Path) -> None:
    wrong = request(manifest_folder, 0)
    wrong = wrong._replace(clip=wrong.clip._replace(sha256="0" * 64))
    LatentAdapter().load(wrong)
    with pytest.raises(UserError, match="SHA-256"):
        LatentAdapter(verify=True).load(wrong)


def test_an_unreadable_clip_stops_or_is_replaced_by_name(manifest_folder: Path) -> None:
    dataset = LatentDataset(LatentAdapter())
    bad = request(manifest_folder, 1)
    (manifest_folder / "1.npy").write_bytes(b"broken")
    with pytest.raises(UserError, match="clip m/c1"):
        dataset.__getitems__([bad])
    other = request(manifest_folder, 2)
    [(sample, replaced), (untouched, nothing)] = dataset.__getitems__([bad._replace(alternates=(bad, other)), other])
    assert isinstance(replaced, Replacement)
    assert (replaced.asked.clip_id, replaced.used.clip_id) == ("c1", "c2")
    assert "not a readable" in replaced.reason
    assert torch.equal(sample.video_latents, untouched.video_latents)
    assert nothing is None
    with pytest.raises(UserError, match="neither clip c1 nor 1 others"):
        dataset.read(bad._replace(alternates=(bad,)))


def test_the_source_s_layout_and_the_manifest_s_sizes_are_passed_on(manifest_folder: Path) -> None:
    stored = np.load(manifest_folder / "0.npy")
    np.save(manifest_folder / "0.npy", stored.transpose(1, 2, 3, 0))
    sample = LatentAdapter().load(request(manifest_folder, 0, layout="THWC"))
    assert torch.equal(sample.video_latents, torch.from_numpy(stored[:, 2:6]).float())
    with pytest.raises(UserError, match=r"clip m/c0 .*length_frames 12 in the manifest, 4 in the file"):
        LatentAdapter().load(request(manifest_folder, 0))
    wrong = request(manifest_folder, 1)
    for changes in ({"length_frames": 11}, {"height": 5}, {"width": 3}):
        (name,) = changes
        with pytest.raises(UserError, match=rf"clip m/c1 .*{name} \d+ in the manifest"):
            LatentAdapter().load(wrong._replace(clip=wrong.clip._replace(**changes)))
