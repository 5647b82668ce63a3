"""What the readers of source formats make of odd and damaged input. Decoded in this process: nothing here hangs."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import marey.pixels.container as container_module
from marey.core.errors import UserError
from marey.pixels.decode import Reading, index_file
from marey.pixels.footage import Span
from marey.pixels.ingest import ingest
from marey.pixels.ingest_worker import ingest_file
from marey.pixels.media import Unreadable
from marey.pixels.picture import Painter
from marey.pixels.sources import VideoFile, discover
from marey.pixels.store import FrameStore

from .conftest import make_video, number_of, numbered_frame
from .format_cases import CAMERAS, FPS, TASKS, make_animation, make_lerobot, make_stills, video_bytes


def numbers(video: VideoFile, *, rate: float = FPS) -> list[int]:
    """The numbers of the frames on the grid, read in order and then at random: the two must agree."""
    footage, painter = video.frames(), Painter()
    in_order = [number_of(painter.rgb(shown.frame)) for shown in Reading(footage, rate=rate) for _ in range(shown.span)]
    reader = footage.reader(index_file(footage, rate=rate))
    for step in np.random.default_rng(0).permutation(len(in_order)).tolist():
        assert number_of(reader.fetch([step])[step]) == in_order[step]
    reader.close()
    return in_order


def counts_of(video: VideoFile) -> Any:
    reading = Reading(video.frames(), rate=FPS)
    assert list(reading)
    return reading.counts


def make_tar(path: Path, members: list[tuple[str, bytes | tarfile.TarInfo]]) -> Path:
    """A tar of these members, in this order; a TarInfo goes in as it is, without content."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if isinstance(content, tarfile.TarInfo) else content
            info.name, info.size = name, len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def faults(sources: list[str]) -> dict[str, str]:
    return {Path(file.path).name: file.fault for file in discover(sources).files if file.fault}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return video_bytes(tmp_path_factory.mktemp("clip"), frames=6, rate=FPS)


# WebDataset


def test_members_that_lead_out_of_a_tar_or_are_no_files_are_refused_by_name(tmp_path: Path, clip: bytes) -> None:
    link, fifo = tarfile.TarInfo(), tarfile.TarInfo()
    link.type, link.linkname, fifo.type = tarfile.SYMTYPE, "/etc/passwd", tarfile.FIFOTYPE
    members: list[tuple[str, bytes | tarfile.TarInfo]] = [
        ("../up.mp4", clip),
        ("/absolute.mp4", clip),
        ("a/../../deep.mp4", clip),
        ("link.mp4", link),
        ("fifo.mp4", fifo),
        ("twice.mp4", clip),
        ("twice.mp4", clip),
        ("good.mp4", clip),
        ("good.front.mp4", clip),
        (".hidden.mp4", clip),
        ("empty.mp4", b""),
    ]
    found = discover([str(make_tar(tmp_path / "x.tar", members))])
    assert {file.path.removeprefix(f"{tmp_path}/x.tar/"): file.fault for file in found.files} == {
        "../up.mp4": "has a name that points outside its shard",
        "/absolute.mp4": "has a name that points outside its shard",
        "a/../../deep.mp4": "has a name that points outside its shard",
        "link.mp4": "is a link or a device, not a regular file",
        "fifo.mp4": "is a link or a device, not a regular file",
        "twice.mp4": None,
        "twice.mp4 (again)": "appears twice in its shard, and which of the two is meant is unclear",
        "good.mp4": None,
        "good.front.mp4": None,
        "empty.mp4": None,
    }
    by_name = {Path(file.path).name: file for file in found.files}
    assert numbers(by_name["good.front.mp4"]) == list(range(6))
    with pytest.raises(Unreadable, match="is empty"):
        numbers(by_name["empty.mp4"])
    assert os.listdir(tmp_path) == ["x.tar"]  # noqa: PTH208


def test_a_tar_that_was_cut_short_gives_what_came_before_and_is_named(tmp_path: Path, clip: bytes) -> None:
    whole = make_tar(tmp_path / "x.tar", [("a.mp4", clip), ("b.mp4", clip), ("c.mp4", clip)]).read_bytes()
    step = 512 + -(-len(clip) // 512) * 512
    cases = {step + 512 + 700: ["a.mp4", "b.mp4"], 2 * step: ["a.mp4", "b.mp4"], 2 * step + 100: ["a.mp4", "b.mp4"]}
    for length, names in cases.items():
        (tmp_path / "x.tar").write_bytes(whole[:length])
        found = discover([str(tmp_path / "x.tar")]).files
        assert [Path(file.path).name for file in found if not file.fault] == names
        (fault,) = [file.fault for file in found if Path(file.path).name == "x.tar"]
        assert fault is not None
        assert "cut short" in fault
        assert numbers(found[0]) == list(range(6))
    damaged = bytearray(whole)
    damaged[step : step + 100] = b"\xff" * 100
    (tmp_path / "x.tar").write_bytes(damaged)
    assert faults([str(tmp_path / "x.tar")]) == {"x.tar": f"is damaged at byte {step}; members from there on are lost"}


def test_labels_and_texts_come_from_the_members_beside_a_video(tmp_path: Path, clip: bytes) -> None:
    def read(*members: tuple[str, bytes]) -> list[tuple[int | None, str | None, str | None]]:
        found = discover([str(make_tar(tmp_path / "x.tar", list(members)))])
        names = found.label_names
        return [
            (file.label, names[file.label] if names and file.label is not None else None, file.extra.get("text"))
            for file in found.files
        ]

    a, b = ("a.mp4", clip), ("b.mp4", clip)
    assert read(a, ("a.cls", b"3\n"), b, ("b.cls", b"-1")) == [(3, None, None), (None, None, None)]
    assert read(("a.cls", b"3"), a, b, ("b.cls", b"run")) == [(0, "3", None), (1, "run", None)]
    assert read(a, ("a.json", b'{"label": 7, "caption": "seven"}')) == [(7, None, "seven")]
    assert read(a, ("a.json", b'{"label": 7}'), ("a.cls", b"2"), ("a.txt", b" two ")) == [(2, None, "two")]
    assert faults([str(make_tar(tmp_path / "x.tar", [a, ("a.json", b"{"), b, ("b.txt", b"\xff")]))]) == {
        "a.mp4": "its member .json is not a JSON object",
        "b.mp4": "its member .txt is not UTF-8 text",
    }
    assert discover([str(tmp_path / "x.tar")], labels="none").files[0].label is None


def test_what_is_no_shard_of_videos_is_refused_in_a_sentence(tmp_path: Path, clip: bytes) -> None:
    make_tar(tmp_path / "images.tar", [("a.jpg", b"x"), ("a.cls", b"1")])
    with pytest.raises(UserError, match=r"images\.tar holds no video \(its members end in \.jpg, \.cls\)"):
        discover([str(tmp_path / "images.tar")])
    (tmp_path / "x.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match=r"is compressed.*decompress it"):
        discover([str(tmp_path / "x.tar.gz")])
    (tmp_path / "text.tar").write_text("no tar\n" * 200)
    assert "is no tar archive" in faults([str(tmp_path / "text.tar")])["text.tar"]
    make_tar(tmp_path / "s-000.tar", [("a.mp4", clip)])
    with pytest.raises(UserError, match=r"stands for .*s-001\.tar too, which does not exist"):
        discover([f"{tmp_path}/s-{{000..001}}.tar"])
    with pytest.raises(UserError, match="no dataset with cameras or columns to choose by :front"):
        discover([f"{tmp_path}/s-000.tar:front"])
    with pytest.raises(UserError, match="has no class folders"):
        discover([f"{tmp_path}/s-000.tar"], labels="folders")


def test_braces_are_spelled_out_in_order_and_stars_match_what_is_there(tmp_path: Path, clip: bytes) -> None:
    for name in ("s-8.tar", "s-9.tar", "s-10.tar", "t-08.tar"):
        make_tar(tmp_path / name, [(f"{name}.mp4", clip)])

    def named(pattern: str) -> list[str]:
        return [Path(file.path).parent.name for file in discover([f"{tmp_path}/{pattern}"]).files]

    assert named("s-{8..10}.tar") == named("s-*.tar") == ["s-8.tar", "s-9.tar", "s-10.tar"]
    assert named("{t-{08..08},s-9}.tar") == ["t-08.tar", "s-9.tar"]
    with pytest.raises(UserError, match="more than 1,000,000 names"):
        discover([f"{tmp_path}/s-{{0..99999999}}.tar"])


def test_a_span_shows_nothing_outside_itself(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"before|inside|after")
    with Span(str(tmp_path / "x"), 7, 6).opened() as file:
        assert file.read() == b"inside"
        assert file.seek(-3, os.SEEK_END) == 3
        assert file.read(100) == b"ide"
        with pytest.raises(OSError, match="before the start"):
            file.seek(-1)
        file.seek(100)
        assert file.read(1) == b""
    with Span(str(tmp_path / "x"), 14, 6000).opened() as file:
        assert file.read() == b"after"


def test_a_playlist_in_a_tar_opens_nothing(tmp_path: Path, clip: bytes) -> None:
    (tmp_path / "real.mp4").write_bytes(clip)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{tmp_path}/real.mp4\n#EXT-X-ENDLIST\n"
    concat = f"ffconcat version 1.0\nfile {tmp_path}/real.mp4\n"
    make_tar(tmp_path / "x.tar", [("a.mp4", playlist.encode()), ("b.mp4", concat.encode())])
    for video in discover([str(tmp_path / "x.tar")]).files:
        with pytest.raises(Unreadable):
            numbers(video)


def test_a_damaged_member_is_refused_by_name_and_a_changed_shard_is_another(tmp_path: Path, clip: bytes) -> None:
    shard = make_tar(tmp_path / "x.tar", [("bad.mp4", b"no video" * 99), ("good.mp4", clip), ("../out.mp4", clip)])
    report = ingest([str(shard)], tmp_path / "s.lance", rate=FPS, workers=1)
    assert {Path(item["path"]).name: item["reason"] for item in report.refused} == {
        "bad.mp4": "Invalid data found when processing input",
        "out.mp4": "has a name that points outside its shard",
    }
    assert FrameStore.open(tmp_path / "s.lance").files == [f"{shard}/good.mp4"]
    assert ingest([str(shard)], tmp_path / "s.lance", rate=FPS).already_complete
    os.utime(shard, ns=(1, 1))
    with pytest.raises(UserError, match="some have changed since"):
        ingest([str(shard)], tmp_path / "s.lance", rate=FPS)


def test_a_stopped_ingest_goes_on_within_a_member_or_an_episode(tmp_path: Path) -> None:
    root = make_lerobot(tmp_path / "d", version="v3.0", episodes=(20, 300))
    data = (root / f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4").read_bytes()
    shard = make_tar(tmp_path / "x.tar", [("a.mp4", data)])
    for video in (discover([str(root)]).files[1], discover([str(shard)]).files[0]):
        outcomes = []
        for folder, done in ((tmp_path / "whole", 0), (tmp_path / "again", 1)):
            folder.mkdir()
            settings = {"rate": float(FPS), "short_edge": None, "quality": 90}
            payload = {"footage": video.frames(), "source": 0, "folder": str(folder), "chunks_done": done}
            outcomes.append(ingest_file(payload | {"min_frames": 1, "settings": settings}, lambda *_: None))
        assert outcomes[0] == outcomes[1]
        again = sorted(path.name for path in (tmp_path / "again").iterdir())
        assert again == sorted(path.name for path in (tmp_path / "whole").iterdir())[1:]
        for name in again:
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        for folder in (tmp_path / "whole", tmp_path / "again"):
            shutil.rmtree(folder)


# LeRobot


def test_one_of_several_cameras_must_be_chosen_and_its_last_word_is_enough(tmp_path: Path) -> None:
    root = make_lerobot(tmp_path / "d", version="v2.1", cameras=CAMERAS, episodes=(3,))
    with pytest.raises(UserError, match=rf"has 2 cameras \(.*\); choose one, as in {root}:observation.images.top"):
        discover([str(root)])
    with pytest.raises(UserError, match=r"no camera 'observation.images.tip'; did you mean observation.images.top\?"):
        discover([f"{root}:observation.images.tip"])
    assert numbers(discover([f"{root}:wrist"]).files[0]) == [100, 101, 102]


def test_episodes_of_one_file_are_told_apart_by_time_at_any_rate(tmp_path: Path) -> None:
    root = make_lerobot(tmp_path / "d", version="v3.0")
    first, second, third = discover([str(root)]).files
    assert [file.extra["text"] for file in (first, second, third)] == [TASKS[0], TASKS[1], TASKS[0]]
    assert numbers(second, rate=5) == [12, 14, 16, 18]
    assert numbers(second, rate=20) == [n for n in range(12, 19) for _ in range(2)]
    assert numbers(third) == list(range(19, 28))
    assert [counts_of(file).promised for file in (first, second, third)] == [12, 7, 9]
    assert len({json.dumps(file.frames().identity()) for file in (first, second, third)}) == 3
    sizes = [file.frames().size() for file in (first, second, third)]
    assert sum(sizes) == pytest.approx((root / f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4").stat().st_size)


def rewrite(root: Path, **changes: Any) -> None:
    """The columns of the one camera's first episode, changed."""
    where = root / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(where).to_pylist()
    rows[0] |= {f"videos/{CAMERAS[0]}/{name}": value for name, value in changes.items()}
    pq.write_table(pa.Table.from_pylist(rows), where)


def test_an_episode_whose_place_is_wrong_costs_itself_alone(tmp_path: Path) -> None:
    root = make_lerobot(tmp_path / "d", version="v3.0")
    rewrite(root, to_timestamp=-1.0)
    assert list(faults([str(root)]).values()) == ["its from_timestamp and to_timestamp are not a stretch of time"]
    rewrite(root, to_timestamp=None)
    assert len(faults([str(root)])) == 1
    rewrite(root, to_timestamp=1.2, file_index=-1)
    assert "cannot be made out" in "".join(faults([str(root)]).values())
    rewrite(root, file_index=5)
    bad, *good = discover([str(root)]).files
    with pytest.raises(Unreadable, match="cannot be opened: No such file"):
        numbers(bad)
    assert numbers(good[0]) == list(range(12, 19))
    rewrite(root, file_index=0, from_timestamp=2.6, to_timestamp=5.0)
    assert counts_of(discover([str(root)]).files[0]).partial() == "2 of 12 promised frames decode"
    rewrite(root, from_timestamp=100.0, to_timestamp=200.0)
    with pytest.raises(Unreadable, match="no frame decodes"):
        numbers(discover([str(root)]).files[0])


def test_a_damaged_key_frame_costs_the_episodes_it_touches_and_no_other(tmp_path: Path) -> None:
    root = make_lerobot(tmp_path / "d", version="v3.0")
    path = root / f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4"
    with av.open(str(path)) as container:
        keys = [
            (packet.pos or 0, packet.size, float((packet.pts or 0) * container.streams.video[0].time_base))  # type: ignore[operator]
            for packet in container.demux(video=0)
            if packet.is_keyframe and packet.size
        ]
    at, size, _ = next(key for key in reversed(keys) if key[2] < 1.2)  # frames 10 and 11, then the second episode
    data = bytearray(path.read_bytes())
    data[at : at + size] = b"\xff" * size
    path.write_bytes(data)
    first, second, third = discover([str(root)]).files
    assert numbers(first)[:9] == list(range(9))
    assert numbers(third) == list(range(19, 28))
    assert counts_of(third).partial() is None
    for video, promised in ((first, 12), (second, 7)):
        assert f"of {promised} promised frames decode; " in counts_of(video).partial()


def test_an_episode_that_no_seek_finds_is_read_from_the_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_lerobot(tmp_path / "d", version="v3.0")
    asked: list[int] = []
    seek = container_module._seek

    def past(container: Any, stream: Any, stamp: int) -> bool:
        asked.append(stamp)
        return seek(container, stream, stamp + 10_240 if stamp else 0)  # a second late, as by a damaged index

    monkeypatch.setattr(container_module, "_seek", past)
    second = discover([str(root)]).files[1]
    assert [shown.ordinal for shown in Reading(second.frames(), rate=FPS)] == list(range(7))
    assert (asked[0] > 0, asked[1:]) == (True, [0])


def test_a_template_cannot_lead_out_of_the_dataset_or_into_python(tmp_path: Path) -> None:
    root = make_lerobot(tmp_path / "d", version="v2.1", episodes=(3,))
    info = json.loads((root / "meta/info.json").read_text())
    for template in ("../{video_key}.mp4", "/etc/{episode_index:06d}.mp4", "{video_key.__class__}.mp4", "{other}.mp4"):
        (root / "meta/info.json").write_text(json.dumps(info | {"video_path": template}))
        assert "lies outside it" in "".join(faults([str(root)]).values()), template


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebase_version": "v1.6"}, "is of version 'v1.6', and v2.x and v3.x are read"),
        ({"codebase_version": 3}, "is of version 3"),
        ({"features": {"observation.image": {"dtype": "image"}}}, r"its cameras \(observation.image\) are stored as"),
        ({"features": {}}, "it has no camera"),
        ({"fps": 0}, "does not say fps"),
        ({"video_path": None}, "does not say fps, video_path"),
    ],
)
def test_a_dataset_that_is_not_read_is_refused_in_a_sentence(tmp_path: Path, change: Any, message: str) -> None:
    root = make_lerobot(tmp_path / "d", version="v2.1", episodes=(2,))
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps(info | change))
    with pytest.raises(UserError, match=message):
        discover([str(root)])


# Images


def test_an_image_that_does_not_decode_is_counted_and_the_one_before_stands_in(tmp_path: Path) -> None:
    root = make_stills(tmp_path / "frames", episodes={"a": 12})
    (root / "a/3.png").write_bytes((root / "a/3.png").read_bytes()[:60])
    (root / "a/.4.png").write_bytes(b"hidden")
    (video,) = discover([str(root)]).files
    assert numbers(video) == [0, 1, 1, *range(3, 12)]
    counts = counts_of(video)
    assert counts.partial().startswith("11 of 12 promised frames decode; 1 decoding errors (first: 3.png is not a")
    assert counts.repeats == 1
    before = video.frames().identity()
    os.utime(root / "a/7.png", ns=(1, 1))
    assert video.frames().identity() != before


def test_images_of_odd_kinds_are_read_or_refused_for_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    Image.fromarray(np.full((48, 64), 40_000, np.uint16)).save(tmp_path / "deep/1.png")
    with pytest.raises(Unreadable, match=r"1\.png has more than 8 bits"):
        numbers(discover([str(tmp_path / "deep")]).files[0])
    (tmp_path / "mixed").mkdir()
    for name, mode in (("1.png", "RGBA"), ("2.webp", "RGB"), ("3.JPG", "L")):
        picture = Image.fromarray(numbered_frame(int(name[0]))).convert(mode)
        picture.save(tmp_path / "mixed" / name, lossless=True)
    turned = Image.fromarray(np.rot90(numbered_frame(4), 1))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise when shown
    turned.save(tmp_path / "mixed/4.png", exif=exif)
    assert numbers(discover([str(tmp_path / "mixed")]).files[0]) == [1, 2, 3, 4]
    os.mkfifo(tmp_path / "deep/0.png")
    with pytest.raises(Unreadable, match=r"0\.png is a FIFO"):
        numbers(discover([str(tmp_path / "deep")]).files[0])


def test_image_folders_two_deep_are_classes_and_videos_go_before_images(tmp_path: Path) -> None:
    make_stills(tmp_path / "f", episodes={"run/a": 2, "run/b": 2, "walk/a": 2})
    found = discover([str(tmp_path / "f")])
    assert ([file.label for file in found.files], found.label_names) == ([0, 0, 1], ["run", "walk"])
    assert "3 folders of images, each image one stored frame in 2 classes" in found.readings[0]
    make_video(tmp_path / "f/clip.mp4", frames=2)
    assert [Path(file.path).name for file in discover([str(tmp_path / "f")]).files] == ["clip.mp4"]
    with pytest.raises(UserError, match="images are read by their folder"):
        discover([f"{tmp_path}/f/run/a/*.png"])
    make_stills(tmp_path / "one", episodes={"": 3})
    assert numbers(discover([str(tmp_path / "one")]).files[0]) == [0, 1, 2]


def test_an_animated_webp_keeps_its_own_times_and_a_still_one_is_no_video(tmp_path: Path) -> None:
    path = make_animation(tmp_path / "a/x.webp", frames=5, ms=[100, 300, 100, 0, 100])
    Image.fromarray(numbered_frame(9)).save(tmp_path / "a/still.webp")
    (video,) = discover([str(tmp_path / "a")]).files
    assert numbers(video) == [0, 1, 1, 1, 2, 3, 4]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(Unreadable, match="is not a whole image"):
        numbers(video)


# Tables


def table(path: Path, columns: dict[str, Any]) -> Path:
    """A table written as Parquet or, by its ending, as an Arrow stream."""
    made = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(made, path, row_group_size=2)
        return path
    with pa.ipc.new_stream(path, made.schema) as writer:
        writer.write_table(made, max_chunksize=2)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_rows_hold_bytes_or_paths_or_nothing(tmp_path: Path, clip: bytes, suffix: str) -> None:
    make_video(tmp_path / "beside.mp4", frames=3, first=7, rate=FPS)
    rows = [
        {"bytes": clip, "path": "was/here.mp4"},
        None,
        {"bytes": None, "path": "beside.mp4"},
        {"bytes": None, "path": "gone.mp4"},
        {"bytes": b"", "path": None},
    ]
    file = table(
        tmp_path / f"t{suffix}", {"clip": rows, "label": [1, None, 0, 5, -1], "text": ["a", None, "b", "", "d"]}
    )
    read = discover([str(file)])
    assert "5 videos, 3 with a label, 3 with a text" in read.readings[0]
    found = read.files
    assert [video.label for video in found] == [1, None, 0, 5, None]
    assert [video.extra.get("text") for video in found] == ["a", None, "b", "", "d"]
    assert numbers(found[0]) == list(range(6))
    assert (found[2].path, numbers(found[2])) == (str(tmp_path / "beside.mp4"), [7, 8, 9])
    assert found[1].fault == "its row holds neither bytes nor a path"
    assert found[3].fault is not None
    assert "names gone.mp4, which does not exist" in found[3].fault
    with pytest.raises(Unreadable, match="is empty"):
        numbers(found[4])


def test_the_column_of_videos_is_found_or_chosen(tmp_path: Path, clip: bytes) -> None:
    video = [{"bytes": clip, "path": None}]
    two = table(tmp_path / "two.parquet", {"left": video, "right": video})
    with pytest.raises(UserError, match=rf"2 columns of videos \(left, right\); choose one, as in {two}:left"):
        discover([str(two)])
    assert "column right" in discover([f"{two}:right"]).readings[0]
    with pytest.raises(UserError, match=r"no column 'rigt'; did you mean right\?"):
        discover([f"{two}:rigt"])
    raw = table(tmp_path / "raw.parquet", {"data": [clip], "name": ["x"], "n": [3]})
    with pytest.raises(UserError, match=r"no column of videos \(its columns: data, name, n\)"):
        discover([str(raw)])
    assert numbers(discover([f"{raw}:data"]).files[0]) == list(range(6))
    with pytest.raises(UserError, match="column 'n' holds int64, and a video is bytes"):
        discover([f"{raw}:n"])


def test_a_damaged_file_of_a_dataset_costs_itself_alone(tmp_path: Path, clip: bytes) -> None:
    table(tmp_path / "a.parquet", {"video": [{"bytes": clip, "path": None}]})
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-40])
    found = discover([str(tmp_path)]).files
    assert [Path(video.path).name for video in found] == ["a.parquet#row-0", "b.parquet"]
    assert found[1].fault is not None
    assert found[1].fault.startswith("is damaged (")
    make_tar(tmp_path / "x.tar", [("a.mp4", clip)])
    with pytest.raises(UserError, match=r"holds .* and .*; name the ones you mean"):
        discover([str(tmp_path)])


def test_a_saved_dataset_names_only_files_beside_its_list(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    wrong: list[Any] = [[{"filename": "../x.arrow"}], [{"filename": 3}], [{}], [], None]
    for files in wrong:
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
        with pytest.raises(UserError, match="save the dataset again"):
            discover([str(tmp_path)])
