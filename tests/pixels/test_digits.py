from __future__ import annotations

import csv
import threading
from collections import Counter
from pathlib import Path

import av
import numpy as np
import pytest

from marey.core.errors import UserError
from marey.pixels import digits
from marey.pixels.digits import (
    FRAMES,
    MOTIONS,
    RATE,
    SIDE,
    SPLITS,
    built_source,
    demo_captions,
    demo_source,
    plan_clips,
    render,
)
from marey.pixels.store import FrameStore


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache and 20 + 10 clips."""
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path))
    monkeypatch.setattr(digits, "SPLITS", {"train": 20, "heldout": 10})
    monkeypatch.setattr(digits, "LABELLED", {"train": 10, "heldout": 10})
    return tmp_path


PLAN = plan_clips()


def test_no_digit_image_is_in_two_clips() -> None:
    images = [clip.image.tobytes() for clips in PLAN.values() for clip in clips]
    assert len(images) == sum(SPLITS.values()) == 2000
    # Duplicates among the 5,000 images themselves would show here too.
    assert len(set(images)) == len(images)


def test_digits_and_motions_are_balanced_and_independent() -> None:
    for split, clips in PLAN.items():
        assert set(Counter(clip.digit for clip in clips).values()) == {SPLITS[split] // 10}
        pairs = Counter((clip.digit, clip.motion) for clip in clips)
        assert len(pairs) == 10 * len(MOTIONS)
        assert max(pairs.values()) - min(pairs.values()) <= 1


def test_the_digit_moves_as_its_label_says() -> None:
    first = {clip.motion: clip for clip in reversed(PLAN["train"])}
    for motion, clip in first.items():
        frames = render(clip).astype(np.float64)
        bright = np.clip(frames.min(-1) - 160, 0, None) + 1e-9  # ink is 200 and more, backgrounds stay dimmer
        y, x = np.arange(SIDE)[:, None], np.arange(SIDE)
        mass = bright.sum((1, 2))
        cy, cx = (bright * y).sum((1, 2)) / mass, (bright * x).sum((1, 2)) / mass
        down, right, growth = cy[-1] - cy[0], cx[-1] - cx[0], mass[-1] / mass[0]
        if motion in ("left", "right"):
            assert right * (1 if motion == "right" else -1) > 10
            assert abs(down) < 3
        elif motion in ("up", "down"):
            assert down * (1 if motion == "down" else -1) > 10
            assert abs(right) < 3
        elif motion in ("grow", "shrink"):
            assert (growth if motion == "grow" else 1 / growth) > 1.5
        else:
            # Area swept around the middle: positive with y pointing down is clockwise.
            vy, vx = cy - cy.mean(), cx - cx.mean()
            swept = (vx[:-1] * vy[1:] - vx[1:] * vy[:-1]).sum()
            assert swept * (1 if motion == "clockwise" else -1) > 100


def test_a_clip_is_the_same_every_time_and_differs_from_the_next() -> None:
    clip = PLAN["train"][3]
    frames = render(clip)
    assert frames.shape == (FRAMES, SIDE, SIDE, 3)
    assert np.array_equal(frames, render(plan_clips()["train"][3]))
    assert not np.array_equal(frames, render(clip._replace(number=4)))


def test_the_digit_stands_out_from_its_background() -> None:
    for clip in PLAN["heldout"][::25]:
        frame = render(clip)[FRAMES // 2].astype(float).mean(-1)
        inked = frame > 170
        assert 0.01 < inked.mean() < 0.4
        assert np.percentile(frame[~inked], 90) < 150


@pytest.mark.timeout(120)
def test_the_demo_builds_once_as_h264_and_stores_with_labels(small: Path) -> None:
    assert built_source("train") is None
    train = demo_source("train")
    assert train == built_source("train") == small / "demo" / digits.VERSION / "train.lance"
    stamp = (train.parent / "complete.json").stat().st_mtime_ns
    heldout = demo_source("heldout")
    assert (train.parent / "complete.json").stat().st_mtime_ns == stamp
    clips = train.parent / "clips"
    for split, store in (("train", train), ("heldout", heldout)):
        source = FrameStore.open(store)
        rows = list(csv.DictReader((clips / f"{split}.csv").read_text().splitlines()))
        assert len(source.lengths) == len(rows) == digits.SPLITS[split]
        assert set(source.lengths.tolist()) == {FRAMES}
        assert source.rate == RATE
        assert source.labels is not None
        assert source.labels.tolist() == [int(row["label"] or -1) for row in rows]
        labelled = [row for row in rows if row["label"]]
        assert len(labelled) == digits.LABELLED[split]
        assert all(row["label"] == row["digit"] for row in labelled)
        assert [Path(file) for file in source.files] == [clips / row["path"] for row in rows]
        assert {row["motion"] for row in rows} <= set(MOTIONS)
    clip = plan_clips()["train"][5]
    with av.open(str(clips / "train" / clip.file)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.average_rate == RATE
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert len(decoded) == FRAMES
    assert np.abs(np.stack(decoded).astype(float) - render(clip)).mean() < 6  # what compression loses


@pytest.mark.timeout(120)
def test_captions_tell_digit_and_motion_of_every_clip_labelled_or_not(small: Path) -> None:
    source = FrameStore.open(demo_source("train"))
    captions = demo_captions("train")
    assert [captions[Path(file).name] for file in source.files] == [
        f"{clip.digit} {clip.motion}" for clip in plan_clips()["train"]
    ]
    assert len(captions) == 20


def test_two_builders_at_once_build_it_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, found, write = [], [], digits.write_clips
    monkeypatch.setattr(digits, "write_clips", lambda folder: (built.append(folder), write(folder))[1])
    threads = [threading.Thread(target=lambda: found.append(demo_source("heldout"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(set(found)) == 1
    assert len(found) == 3
    assert len(FrameStore.open(found[0]).lengths) == 10


@pytest.mark.timeout(120)
def test_a_build_that_was_killed_is_taken_up_and_leaves_nothing_behind(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, frames: object, encoder: str) -> None:
        path.write_bytes(b"half a cl")
        raise KeyboardInterrupt

    whole = digits.encode
    monkeypatch.setattr(digits, "encode", killed)
    with pytest.raises(KeyboardInterrupt):
        demo_source("train")
    assert built_source("train") is None
    monkeypatch.setattr(digits, "encode", whole)
    root = demo_source("train").parent
    assert [path.name for path in root.iterdir() if path.name.startswith(".clips")] == []
    assert len(list((root / "clips" / "train").iterdir())) == 20


def test_an_unknown_part_of_the_demo_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"demo:trian .*did you mean demo:train"):
        demo_source("trian")
    with pytest.raises(UserError, match="demo:train or demo:heldout"):
        built_source("xyz")


def test_a_cache_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set MAREY_CACHE to a folder"):
        demo_source("train")
