from __future__ import annotations

import os
import threading
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import simplejpeg
from av.video.reformatter import ColorRange, Colorspace
from hypothesis import given
from hypothesis import strategies as st

from marey.pixels.decode import Counts, Reading, index_file
from marey.pixels.ingest_worker import StoredFrame, stored_frames
from marey.pixels.media import Unreadable
from marey.pixels.picture import Painter
from marey.pixels.timeline import MAX_HOLD_S, Timeline
from tests.pixels.conftest import cut, make_audio, make_video, number_of, numbered_frame, real_clip


def stored(
    path: Path, *, rate: float = 15.0, short_edge: int | None = None, first_step: int = 0
) -> tuple[list[StoredFrame], Counts]:
    reading = Reading(str(path), rate=rate)
    frames = list(stored_frames(reading, short_edge=short_edge, quality=95, first_step=first_step))
    return frames, reading.counts


def numbers(frames: list[StoredFrame]) -> list[int]:
    return [number_of(simplejpeg.decode_jpeg(frame.jpeg)) for frame in frames]


def last_shown(times: list[Fraction], moment: Fraction) -> int:
    return max(index for index, time in enumerate(times) if time <= moment)


@given(
    gaps=st.lists(st.integers(1, 900), min_size=1, max_size=40),
    rate=st.sampled_from([Fraction(1), Fraction(15), Fraction(2997, 100), Fraction(240)]),
)
def test_each_step_shows_the_last_frame_whose_time_has_come(gaps: list[int], rate: Fraction) -> None:
    times = [Fraction(sum(gaps[:index]), 1000) for index in range(len(gaps) + 1)]
    line = Timeline(rate=rate, time_base=Fraction(1, 10**9))
    shown: list[int] = []
    for index, time in enumerate(times):
        shown += [index - 1] * line.push(int(time * 10**9))
    shown += [len(times) - 1] * line.finish()
    end = times[-1] + min(times[-1] / len(gaps), Fraction(gaps[-1], 1000))
    assert [last_shown(times, step / rate) for step in range(len(shown))] == shown
    assert len(shown) / rate >= end - Fraction(1, 10**6) > (len(shown) - 1) / rate
    assert line.repeats == len(shown) - len(set(shown))
    assert line.true_rate() == pytest.approx(float(len(gaps) / times[-1]))


@pytest.mark.parametrize("fps", [24, 25, 30, 50, 60, 120, Fraction(30000, 1001), Fraction(24000, 1001)])
def test_a_clock_of_milliseconds_does_not_shift_the_frames(fps: int | Fraction) -> None:
    """Rounded stamps give, at the source's own rate, every frame exactly once."""
    line = Timeline(rate=Fraction(fps), time_base=Fraction(1, 1000))
    covered = [line.push(round(index * 1000 / Fraction(fps))) for index in range(500)] + [line.finish()]
    assert covered == [0] + [1] * 500
    assert line.breaks == line.repeats == 0


@pytest.mark.parametrize("fps", [5, 24, 25, 30, 50])
def test_frames_of_a_constant_rate_are_chosen_by_time(tmp_path: Path, fps: int) -> None:
    frames, counts = stored(make_video(tmp_path / "a.mp4", frames=2 * fps, rate=fps))
    times = [Fraction(index, fps) for index in range(2 * fps)]
    assert numbers(frames) == [last_shown(times, Fraction(step, 15)) for step in range(30)]
    assert [frame.step for frame in frames] == list(range(30))
    assert [frame.time_s for frame in frames] == pytest.approx(
        [float(times[last_shown(times, Fraction(step, 15))]) for step in range(30)]
    )
    assert (counts.decoded, counts.promised) == (2 * fps, 2 * fps)
    assert counts.true_rate == pytest.approx(fps)
    assert counts.repeats == max(0, 30 - 2 * fps)
    assert counts.partial() is None


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_frames_of_a_variable_rate_are_chosen_by_time(tmp_path: Path, suffix: str) -> None:
    stamps = [0, 40, 120, 130, 500, 540, 1100]
    frames, counts = stored(make_video(tmp_path / f"a{suffix}", stamps_ms=stamps), rate=10.0)
    times = [Fraction(stamp, 1000) for stamp in stamps]
    assert numbers(frames) == [last_shown(times, Fraction(step, 10)) for step in range(len(frames))]
    assert len(frames) == 13  # 1.1 s and one average frame (.183 s)
    assert counts.repeats == 13 - len({*numbers(frames)})


def test_a_file_with_reordered_frames_is_read_in_the_order_shown(tmp_path: Path) -> None:
    frames, _ = stored(make_video(tmp_path / "a.mp4", frames=40, rate=25, b_frames=3), rate=25.0)
    assert numbers(frames) == list(range(40))


def test_a_leap_of_the_clock_is_cut_and_counted() -> None:
    line = Timeline(rate=Fraction(10), time_base=Fraction(1, 10))
    stamps = [0, 1, 2, 2 + MAX_HOLD_S * 10 + 1, 2 + MAX_HOLD_S * 10 + 2, 5, None, 7]
    covered = [line.push(stamp) for stamp in stamps] + [line.finish()]
    assert covered == [0] + [1] * 8
    assert line.breaks == 3


def test_two_frames_at_one_time_show_the_later() -> None:
    line = Timeline(rate=Fraction(10), time_base=Fraction(1, 10))
    assert [line.push(0), line.push(1), line.push(1), line.push(2), line.finish()] == [0, 1, 0, 1, 1]
    assert line.breaks == 0


def test_a_truncated_file_gives_what_decodes_and_says_what_was_promised(tmp_path: Path) -> None:
    whole = make_video(tmp_path / "whole.mp4", frames=100, front_index=True)
    frames, counts = stored(cut(whole, tmp_path / "cut.mp4", keep=0.6), rate=25.0)
    assert counts.promised == 100
    assert 10 < counts.decoded < 100
    assert numbers(frames) == list(range(counts.decoded))
    assert "of 100 promised frames decode" in (counts.partial() or "")


def test_damage_in_the_middle_loses_only_what_does_not_decode(tmp_path: Path) -> None:
    whole = make_video(tmp_path / "whole.mp4", frames=120, front_index=True, keys_every=10)
    data = bytearray(whole.read_bytes())
    middle = len(data) * 3 // 4
    data[middle : middle + 300] = np.random.default_rng(0).bytes(300)
    (tmp_path / "damaged.mp4").write_bytes(data)
    frames, counts = stored(tmp_path / "damaged.mp4", rate=25.0)
    read = numbers(frames)
    assert read[:20] == list(range(20))
    assert read[-20:] == list(range(100, 120))
    assert counts.partial()


def test_the_last_half_of_an_index_at_the_end_is_no_video(tmp_path: Path) -> None:
    cut(make_video(tmp_path / "whole.mp4"), tmp_path / "cut.mp4", keep=0.5)
    with pytest.raises(Unreadable):
        stored(tmp_path / "cut.mp4")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("missing", "cannot be opened"),
        ("empty", "0 bytes"),
        ("text", "Invalid data"),
        ("folder", "a folder"),
        ("fifo", "a FIFO"),
        ("sound", "no video stream"),
        ("playlist", "Invalid (data|argument)"),
    ],
)
def test_what_is_no_video_is_refused_with_the_reason(tmp_path: Path, kind: str, reason: str) -> None:
    path = tmp_path / "clip.mp4"
    if kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("not a video\n" * 100)
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "sound":
        make_audio(path)
    elif kind == "playlist":
        make_video(tmp_path / "other.mp4")
        path.write_text(f"ffconcat version 1.0\nfile {tmp_path / 'other.mp4'}\n")
    with pytest.raises(Unreadable, match=reason):
        stored(path)


def test_a_name_that_looks_like_an_address_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_video(tmp_path / "a.mp4").rename(tmp_path / "concat:a b %03d ü.mp4")
    frames, _ = stored(Path("concat:a b %03d ü.mp4"))
    assert len(frames) == 18


@pytest.mark.parametrize(("height", "width"), [(50, 70), (64, 64)])
@pytest.mark.parametrize("rotation", [90, -90, 180])
def test_a_turned_camera_gives_upright_frames(tmp_path: Path, rotation: int, height: int, width: int) -> None:
    path = make_video(tmp_path / "a.mp4", frames=1, rotation=rotation, height=height, width=width)
    frames, _ = stored(path)
    image = simplejpeg.decode_jpeg(frames[0].jpeg)
    expected = np.rot90(numbered_frame(0, height=height, width=width), rotation // 90)
    assert image.shape == expected.shape == (frames[0].height, frames[0].width, 3)
    assert np.abs(image.astype(int) - expected).mean() < 6


@pytest.mark.parametrize(
    ("height", "width", "short_edge", "expected"),
    [
        (96, 160, 48, (48, 80)),
        (160, 96, 48, (80, 48)),
        (48, 64, 384, (48, 64)),
        (98, 130, 33, (33, 44)),
        (98, 130, None, (98, 130)),
        (48, 64, 48, (48, 64)),
    ],
)
def test_the_short_edge_is_brought_down_and_never_up(
    tmp_path: Path, height: int, width: int, short_edge: int | None, expected: tuple[int, int]
) -> None:
    path = make_video(tmp_path / "a.mp4", frames=2, height=height, width=width)
    frames, _ = stored(path, short_edge=short_edge)
    assert {(frame.height, frame.width) for frame in frames} == {expected}
    assert simplejpeg.decode_jpeg(frames[0].jpeg).shape == (*expected, 3)


def test_shrinking_is_antialiased() -> None:
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    frame = av.VideoFrame.from_ndarray(stripes, format="rgb24")
    image = simplejpeg.decode_jpeg(Painter(short_edge=32).jpeg(frame, quality=95))
    assert image.shape == (32, 32, 3)
    assert np.abs(image[4:-4, 4:-4].astype(int) - 127).max() < 12


@pytest.mark.parametrize("size", [(63, 95), (64, 95), (63, 96), (64, 96)])
@pytest.mark.parametrize("turns", [0, 90])
def test_odd_sizes_keep_a_clean_edge(size: tuple[int, int], turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder reads one row and column beyond an odd picture; what it finds there must be the picture's own."""
    height, width = size
    ramp = np.add.outer(np.linspace(0, 100, height), np.linspace(20, 150, width)).astype(np.uint8)
    frame = av.VideoFrame.from_ndarray(np.stack([ramp] * 3, axis=-1), format="rgb24")
    monkeypatch.setattr("marey.pixels.picture.quarter_turns", lambda frame: turns // 90)
    image = simplejpeg.decode_jpeg(Painter().jpeg(frame, quality=95)).astype(int)
    expected = np.rot90(ramp, turns // 90)[..., None].astype(int)
    assert image.shape[:2] == expected.shape[:2]
    assert np.abs(image - expected).max() <= 3


@pytest.mark.parametrize("levels", ["MPEG", "JPEG"])
@pytest.mark.parametrize("matrix", ["ITU601", "ITU709"])
def test_the_stored_colours_are_those_of_the_frame(matrix: str, levels: str) -> None:
    """Planes go to JPEG without a detour through RGB; both ways must agree, whatever the file's matrix and range."""
    image = np.zeros((64, 64, 3), np.uint8)
    image[:, :32], image[:32, 32:], image[32:, 32:] = (200, 30, 40), (30, 180, 60), (40, 60, 210)
    space, values = getattr(Colorspace, matrix), getattr(ColorRange, levels)
    frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(
        format="yuv420p", dst_colorspace=space, dst_color_range=values
    )
    frame.colorspace, frame.color_range = int(space), int(values)
    painter = Painter()
    jpeg = simplejpeg.decode_jpeg(painter.jpeg(frame, quality=100)).astype(int)
    plain = painter.rgb(frame).astype(int)
    for y, x in ((32, 12), (12, 48), (48, 48)):
        assert np.abs(jpeg[y, x] - plain[y, x]).max() <= 4
        assert np.abs(plain[y, x] - image[y, x]).max() <= 6


def test_a_fault_in_encoding_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are encoded beside decoding: what goes wrong there is not lost, nor what was done before it."""
    whole = Painter.jpeg
    painted: list[int] = []

    def failing(self: Painter, frame: av.VideoFrame, *, quality: int) -> bytes:
        painted.append(threading.get_ident())
        if len(painted) == 10:
            raise KeyError("odd")
        return whole(self, frame, quality=quality)

    monkeypatch.setattr(Painter, "jpeg", failing)
    reading = Reading(str(make_video(tmp_path / "a.mp4", frames=30)), rate=25.0)
    frames = stored_frames(reading, short_edge=None, quality=90)
    assert [next(frames).step for _ in range(9)] == list(range(9))
    with pytest.raises(KeyError, match="odd"):
        next(frames)
    assert set(painted) != {threading.get_ident()}


def test_a_caller_that_stops_early_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    frames = stored_frames(Reading(str(make_video(tmp_path / "a.mp4")), rate=25.0), short_edge=None, quality=90)
    assert next(iter(frames)).step == 0
    assert threading.active_count() > before
    frames.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_a_single_frame_is_one_step(tmp_path: Path) -> None:
    frames, counts = stored(make_video(tmp_path / "a.mp4", frames=1))
    assert len(frames) == 1
    assert counts.true_rate is None


def test_a_thousand_frames_per_second_are_thinned(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", frames=200, rate=1000)
    frames, counts = stored(path)
    assert numbers(frames) == [0, 66, 133]
    assert counts.true_rate == pytest.approx(1000)


def test_a_gif_is_a_video(tmp_path: Path) -> None:
    frames, _ = stored(make_video(tmp_path / "a.gif", frames=10, rate=10, codec="gif"), rate=10.0)
    assert numbers(frames) == list(range(10))


def test_a_repeated_frame_is_encoded_once(tmp_path: Path) -> None:
    frames, _ = stored(make_video(tmp_path / "a.mp4", frames=5, rate=5))
    assert all(frames[3 * k].jpeg is frames[3 * k + 1].jpeg is frames[3 * k + 2].jpeg for k in range(5))


def test_starting_late_gives_the_same_frames(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", frames=60, b_frames=2)
    everything, _ = stored(path)
    late, _ = stored(path, first_step=13)
    assert late == everything[13:]


def test_the_index_names_the_frames_that_a_store_would_hold(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", frames=60, rate=24, b_frames=2)
    frames, counts = stored(path)
    index = index_file(str(path), rate=15.0)
    assert index.seekable
    assert index.ordinals.tolist() == numbers(frames)
    with av.open(str(path)) as container:
        base = container.streams.video[0].time_base
    assert base is not None
    assert (index.stamps * float(base)).tolist() == pytest.approx([frame.time_s for frame in frames])
    assert (index.repeats, index.true_rate) == (counts.repeats, counts.true_rate)


@pytest.mark.parametrize(
    ("name", "decoded", "shape"),
    [("bikes.mp4", 250, (272, 640)), ("bigbuckbunny.mp4", 132, (384, 683)), ("carphone_pristine.mp4", 120, (144, 176))],
)
def test_camera_clips_are_read_whole(name: str, decoded: int, shape: tuple[int, int]) -> None:
    frames, counts = stored(real_clip(name), rate=2.0, short_edge=384)
    assert counts.decoded == counts.promised == decoded
    assert {(frame.height, frame.width) for frame in frames} == {shape}
    assert counts.true_rate == pytest.approx(25.0 if decoded != 120 else 30000 / 1001)


@pytest.mark.parametrize("name", ["a.mkv", "a.flv"])
def test_a_truncated_file_that_counts_no_frames_says_how_many_seconds_were_promised(tmp_path: Path, name: str) -> None:
    whole = make_video(tmp_path / "whole" / name, frames=100, rate=25)
    _, counts = stored(whole)
    assert counts.partial() is None
    assert counts.seconds == 4.0
    frames, counts = stored(cut(whole, tmp_path / name, keep=0.5), rate=25.0)
    assert 20 < len(frames) < 80
    assert counts.seconds == len(frames) / 25
    assert f"{counts.seconds:.2f} of {counts.promised_s:.2f} promised seconds decode" in (counts.partial() or "")
