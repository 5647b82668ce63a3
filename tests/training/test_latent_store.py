from __future__ import annotations

from pathlib import Path

import pytest

from marey.config.causal import LatentDataConfig
from marey.latents.manifest import read_manifest
from marey.latents.sidecar import read_shape
from marey.pixels import digits
from marey.training.latent_store import encoded
from marey.training.latents import DEMO_SIDE, built_manifest

from .latent_runs import load


def data(*overrides: str) -> LatentDataConfig:
    return load(*overrides).data


def test_the_demo_is_encoded_small_with_a_caption_for_every_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path))
    monkeypatch.setattr(digits, "SPLITS", {"train": 20, "heldout": 10})
    monkeypatch.setattr(digits, "LABELLED", {"train": 10, "heldout": 10})
    asked = data("data=demo")
    assert built_manifest("demo:train", asked) is None
    path = encoded("demo:train", asked)
    assert path == built_manifest("demo:train", asked)
    found = read_manifest(path)
    texts = found.texts("text")
    assert len(texts) == 20
    assert {text.split()[1] for text in texts if text} == set(digits.MOTIONS)
    assert read_shape(found.clip(0).path, clip="c") == (48, digits.FRAMES, DEMO_SIDE // 4, DEMO_SIDE // 4)
    stamp = path.stat().st_mtime_ns
    assert encoded("demo:train", asked) == path
    assert path.stat().st_mtime_ns == stamp


def test_another_codec_gets_a_folder_of_its_own(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path))
    options = ("{patch: 5}", "{patch: 10}", "{patch: 10, std: 0.25}")
    paths = [encoded(str(store), data(f"data.train={store}", f"data.codec.options={text}")) for text in options]
    assert len(set(paths)) == 3
    assert [read_manifest(path).clip(0).height for path in paths] == [8, 4, 4]
