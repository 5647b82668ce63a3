from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from marey.core.errors import UserError
from marey.evaluation import feature_cache as room
from marey.evaluation.feature_cache import Entry, FeatureCache
from marey.evaluation.features import evaluation_clips
from marey.evaluation.featurizers import FrozenEncoder, RawPixels
from marey.evaluation.frozen import FrozenFeatures, frozen_features
from marey.evaluation.loading import LoadedEncoder, load_encoder, random_twin
from tests.evaluation.coloured_source import ColouredSource

KEY = {"features": "e", "version": "1"}


@pytest.fixture
def loaded(checkpoint) -> LoadedEncoder:
    return load_encoder(checkpoint)


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "features")


def gather(loaded, source, cache, *, tokens=True, clips=1, batch=4, names=("a", "b", "c")) -> FrozenFeatures:
    featurizers = {
        "a": FrozenEncoder.of(loaded.encoder, loaded.model),
        "b": FrozenEncoder.of(random_twin(loaded), loaded.model),
        "c": RawPixels(loaded.preprocessing.patch_size, loaded.preprocessing.tubelet_size),
    }
    chosen = evaluation_clips(source, loaded.preprocessing, clips_per_episode=clips)
    wanted = {name: featurizers[name] for name in names}
    return frozen_features(wanted, loaded.preprocessing, chosen, tokens=tokens, cache=cache, batch_size=batch)


def put(cache: FeatureCache, key: dict[str, str], *, clips: int = 3) -> None:
    with cache.writing(key, tokens=True) as folder:
        tokens = np.arange(clips * 8, dtype=np.float16).reshape(clips, 2, 4)
        (folder / "tokens.f16").write_bytes(tokens.tobytes())
        rows = np.arange(clips)
        cache.keep(
            folder,
            key,
            entry=Entry(np.ones((clips, 4), np.float32), tokens, np.zeros(4, np.float32), rows, 0 * rows),
        )


def test_features_are_the_encoders_own_outputs(loaded, cache):
    source = ColouredSource([0, 1, 2])
    found = gather(loaded, source, cache)
    chosen = evaluation_clips(source, loaded.preprocessing, clips_per_episode=1)
    video = loaded.preprocessing.normalize(chosen.__getitems__(range(3)).video)
    with torch.no_grad():
        whole = loaded.encoder(video)
    assert np.allclose(found.values["a"], whole[:, 0].numpy(), atol=1e-5)
    assert np.allclose(found.tokens["a"].batch(range(3)).numpy(), whole[:, 1:].numpy(), atol=5e-3)
    alone = gather(loaded, source, None, tokens=False)
    assert np.allclose(alone.values["a"], found.values["a"], atol=1e-4)
    assert alone.tokens == {}


def test_raw_pixels_are_the_clip_made_small(loaded):
    video = torch.rand(2, 3, 4, 16, 16)
    pixels = RawPixels(loaded.preprocessing.patch_size, 1)
    summary, tokens = pixels.both(video)
    assert torch.equal(summary, video.flatten(1))  # 16 x 16 is small enough already
    patch = pixels.patch
    columns = 16 // patch
    t, row, column = 2, 1, 0
    token = tokens[1, (t * columns + row) * columns + column]
    corner = video[1, :, t, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
    step = patch // 4
    expected = corner.unflatten(1, (4, step)).unflatten(3, (4, step)).mean(dim=(2, 4)).flatten()
    assert torch.allclose(token[:48], expected, atol=1e-6)
    places = tokens[0, :, 48:]
    assert len({tuple(row) for row in places.tolist()}) == tokens.shape[1]
    long = RawPixels(16, 2).summary(torch.rand(1, 3, 16, 224, 224))
    assert long.shape == (1, 3 * 16 * 9 * 9)


def test_a_second_call_computes_nothing_and_gives_the_same(loaded, cache, monkeypatch):
    source = ColouredSource([0, 1, 2] * 3)
    first = gather(loaded, source, cache, clips=2)
    monkeypatch.setattr(ColouredSource, "read", lambda *_: pytest.fail("a frame was read"))
    again = gather(loaded, source, cache, clips=2, batch=5)
    assert (first.reused, again.reused) == ([], ["a", "b", "c"])
    for name in "abc":
        assert np.array_equal(first.values[name], again.values[name])
        assert np.array_equal(first.tokens[name].batch(range(18)), again.tokens[name].batch(range(18)))
    # What holds tokens holds summaries too.
    assert gather(loaded, source, cache, clips=2, tokens=False).reused == ["a", "b", "c"]


def test_anything_that_decides_the_features_makes_others(loaded, cache, write, content):
    gather(loaded, ColouredSource([0, 1, 2]), cache, names=("a",))
    for source in (ColouredSource([0, 1, 1]), ColouredSource([0, 1, 2], folder="/else")):
        assert gather(loaded, source, cache, names=("a",)).reused == []
    assert gather(loaded, ColouredSource([0, 1, 2]), cache, names=("a",), clips=2).reused == []
    state = {key: value.clone() for key, value in content["state_dict_ema"].items()}
    state["encoder.norm.bias"][0] += 1e-6
    other = load_encoder(write("other.ckpt", state_dict_ema=state))
    assert gather(other, ColouredSource([0, 1, 2]), cache, names=("a",)).reused == []
    strided = write("stride.ckpt")
    preprocessing = content["marey"]["preprocessing"]
    farther = {**preprocessing, "frame_stride": preprocessing["frame_stride"] + 1}
    about = {**content["marey"], "preprocessing": farther}
    torch.save({**content, "marey": about}, strided)
    assert gather(load_encoder(strided), ColouredSource([0, 1, 2]), cache, names=("a",)).reused == []
    assert gather(load_encoder(write("copy.ckpt")), ColouredSource([0, 1, 2]), cache, names=("a",)).reused == ["a"]


def test_rows_agree_when_some_come_from_the_cache_and_a_clip_can_no_longer_be_read(loaded, cache, monkeypatch):
    source = ColouredSource([0, 1, 2] * 2)
    whole = gather(loaded, source, cache, names=("a",))
    monkeypatch.setattr(ColouredSource, "version", source.version)
    source.unreadable = {2}
    mixed = gather(loaded, source, cache)
    assert mixed.reused == ["a"]
    assert mixed.episodes.tolist() == [0, 1, 3, 4, 5]
    assert len(mixed.refused) == 1
    assert np.array_equal(mixed.values["a"], whole.values["a"][mixed.episodes])
    assert [len(mixed.tokens[name]) for name in "abc"] == [5, 5, 5]
    # Incomplete features are not kept: the next attempt may read everything.
    source.unreadable = set()
    assert gather(loaded, source, cache).reused == ["a"]


def test_a_damaged_entry_is_made_again(loaded, cache):
    source = ColouredSource([0, 1, 2])
    whole = gather(loaded, source, cache, names=("a",))
    (tokens,) = cache.folder.glob("*/tokens.f16")
    rows, facts = tokens.with_name("rows.npz"), tokens.with_name("facts.json")
    damages = [
        lambda: tokens.write_bytes(tokens.read_bytes()[:-2]),
        lambda: rows.write_bytes(rows.read_bytes()[:100]),
        lambda: facts.write_text("{"),
        facts.unlink,
        tokens.unlink,
        lambda: facts.write_text(json.dumps({"format": room.FORMAT, "tokens": [2, 1, 1]})),
    ]
    for damage in damages:
        damage()
        again = gather(loaded, source, cache, names=("a",))
        assert again.reused == []
        assert np.array_equal(again.values["a"], whole.values["a"])
        assert gather(loaded, source, cache, names=("a",)).reused == ["a"]


def test_an_interrupted_pass_leaves_nothing_that_could_be_taken_for_features(loaded, cache, monkeypatch):
    source, read, left = ColouredSource([0, 1, 2] * 4), ColouredSource.read, [2]

    def stop(self, requests):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return read(self, requests)

    monkeypatch.setattr(ColouredSource, "read", stop)
    with pytest.raises(KeyboardInterrupt):
        gather(loaded, source, cache, batch=2)
    assert list(cache.folder.iterdir()) == []


def test_what_a_killed_process_left_goes_after_a_day(cache):
    put(cache, KEY)
    for name, age in ((".old.00000000.tmp", 25), (".new.00000000.tmp", 1)):
        (cache.folder / name).mkdir()
        then = time.time() - age * 3600
        os.utime(cache.folder / name, (then, then))
    put(cache, {**KEY, "version": "2"})
    assert not (cache.folder / ".old.00000000.tmp").exists()
    assert (cache.folder / ".new.00000000.tmp").exists()
    assert cache.find(KEY, tokens=True) is not None


def test_the_least_recently_used_go_when_there_is_too_much(cache, monkeypatch):
    keys = [{**KEY, "version": str(i)} for i in range(3)]
    put(cache, keys[0])
    each = cache.bytes()
    monkeypatch.setattr(room, "LIMIT_BYTES", int(2.5 * each))
    put(cache, keys[1])
    for i, place in enumerate(cache.folder.glob("*/facts.json")):
        os.utime(place, (1000 + i, 1000 + i))
    entry = cache.find(keys[0], tokens=True)  # used again: the other one is the oldest now
    put(cache, keys[2])
    assert [cache.find(key, tokens=True) is not None for key in keys] == [True, False, True]
    assert cache.bytes() == 2 * each
    monkeypatch.setattr(room, "LIMIT_BYTES", 0)
    put(cache, keys[1])
    assert [cache.find(key, tokens=True) is not None for key in keys] == [False, True, False]
    assert entry is not None
    assert entry.tokens is not None
    assert entry.tokens[2, 1].tolist() == [20, 21, 22, 23]  # what is in use stays readable


def test_two_that_compute_the_same_agree(cache):
    with cache.writing(KEY, tokens=True) as folder:
        put(cache, KEY)  # another process was faster
        (folder / "tokens.f16").write_bytes(np.zeros((3, 2, 4), np.float16).tobytes())
        rows = np.arange(3)
        zeros = Entry(
            np.zeros((3, 4), np.float32), np.zeros((3, 2, 4), np.float16), np.zeros(4, np.float32), rows, rows
        )
        cache.keep(folder, KEY, entry=zeros)
    found = cache.find(KEY, tokens=True)
    assert found is not None
    assert found.summary.tolist() == np.ones((3, 4)).tolist()
    assert len(list(cache.folder.iterdir())) == 1


def test_a_disk_without_room_is_a_refusal_that_names_the_ways_out(loaded, cache, monkeypatch):
    monkeypatch.setattr(room, "SPARE_BYTES", 10**18)
    with pytest.raises(UserError, match=r"patch tokens of 3 clips take 0\.0 GB .* set MAREY_CACHE .*--no-attentive"):
        gather(loaded, ColouredSource([0, 1, 2]), cache)
    assert list(cache.folder.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_refusal(loaded, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"features cannot be kept under .*; set MAREY_CACHE .* --no-cache"):
        gather(loaded, ColouredSource([0, 1, 2]), FeatureCache(tmp_path / "file" / "features"))


def test_features_that_are_not_finite_are_a_refusal(loaded, cache):
    with torch.no_grad():
        loaded.encoder.norm.bias[0] = float("nan")
    with pytest.raises(UserError, match="the a encoder's features are not finite"):
        gather(loaded, ColouredSource([0, 1, 2]), cache)
    with torch.no_grad():
        loaded.encoder.norm.bias[0] = 0.0
        loaded.encoder.norm.weight[0] = 1e6
    with pytest.raises(UserError, match="reach beyond 65,504"):
        gather(loaded, ColouredSource([0, 1, 2]), cache)
