"""Small datasets in the formats people arrive with, made by each format's own library where that installs here.

LeRobot's library asks for older versions of PyTorch than this package does, so its datasets are written here after
the format's published description (``meta/info.json``, ``meta/episodes``, ``videos``).
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from .conftest import make_video, numbered_frame

CAMERAS = ("observation.images.top", "observation.images.wrist")
TASKS = ("pick up the cube", "open the drawer")
FPS = 10
EPISODES = (12, 7, 9)
"""Frames of each episode; frames are numbered on from one to the next."""


def video_bytes(folder: Path, *, frames: int, first: int = 0, suffix: str = ".mp4", **options: Any) -> bytes:
    """A video of numbered frames, as bytes."""
    return make_video(folder / f"made{suffix}", frames=frames, first=first, **options).read_bytes()


def make_shards(folder: Path, scratch: Path, *, samples: int = 5, per_shard: int = 3) -> list[Path]:
    """WebDataset shards by its own writer: mp4 with a class and a text, frames of sample i numbered from 10 i."""
    import webdataset

    folder.mkdir(parents=True, exist_ok=True)
    pattern = str(folder / "clips-%03d.tar")
    with webdataset.ShardWriter(pattern, maxcount=per_shard, verbose=0) as writer:
        for number in range(samples):
            writer.write(
                {
                    "__key__": f"part/clip{number}",
                    "mp4": video_bytes(scratch, frames=4 + number, first=10 * number, rate=FPS),
                    "cls": number % 2,
                    "txt": f"clip number {number}",
                    "json": {"seconds": number / 2, "nested": {"left": "out"}},
                }
            )
    return sorted(folder.iterdir())


def make_lerobot(
    root: Path, *, version: str, cameras: Sequence[str] = CAMERAS[:1], episodes: Sequence[int] = EPISODES
) -> Path:
    """A LeRobot dataset after its published description; ``version`` is ``v2.1`` or ``v3.0``.

    The first camera shows frames numbered from 0, the second from 100.
    """
    new = version.startswith("v3")
    info = {
        "codebase_version": version,
        "fps": FPS,
        "chunks_size": 1000,
        "total_episodes": len(episodes),
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        if new
        else "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {camera: {"dtype": "video", "shape": [48, 64, 3]} for camera in cameras}
        | {"action": {"dtype": "float32", "shape": [2]}},
    }
    (root / "meta").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    rows: list[dict[str, Any]] = []
    for number, frames in enumerate(episodes):
        row: dict[str, Any] = {"episode_index": number, "tasks": [TASKS[number % 2]], "length": frames}
        start = sum(episodes[:number])
        for camera in cameras if new else ():
            place = f"videos/{camera}"
            row |= {f"{place}/chunk_index": 0, f"{place}/file_index": 0}
            row |= {f"{place}/from_timestamp": start / FPS, f"{place}/to_timestamp": (start + frames) / FPS}
        rows.append(row)
        for at, camera in enumerate(cameras if not new else ()):
            path = root / f"videos/chunk-000/{camera}/episode_{number:06d}.mp4"
            make_video(path, frames=frames, first=start + 100 * at, rate=FPS)
    for at, camera in enumerate(cameras if new else ()):
        path = root / f"videos/{camera}/chunk-000/file-000.mp4"
        make_video(path, frames=sum(episodes), first=100 * at, rate=FPS, keys_every=5, b_frames=2)
    if new:
        (root / "meta/episodes/chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), root / "meta/episodes/chunk-000/file-000.parquet")
    else:
        (root / "meta/episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def make_stills(root: Path, *, episodes: dict[str, int], suffix: str = ".png") -> Path:
    """A folder of images for each episode, ``1.png`` to ``12.png``: a plain sort would mix them."""
    for number, (name, frames) in enumerate(episodes.items()):
        (root / name).mkdir(parents=True)
        for frame in range(frames):
            image = Image.fromarray(numbered_frame(50 * number + frame))
            image.save(root / name / f"{frame + 1}{suffix}", quality=95)
    return root


def make_animation(path: Path, *, frames: int, ms: int | list[int] = 100) -> Path:
    """An animated picture by Pillow, by the ending of its name; each frame is shown for ``ms`` milliseconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = [Image.fromarray(numbered_frame(number)) for number in range(frames)]
    lossless: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    first.save(path, save_all=True, append_images=others, duration=ms, **lossless)
    return path


def huggingface(scratch: Path, *, rows: int = 3, embedded: bool = True) -> Any:
    """A ``datasets.Dataset`` of videos with a class label and a caption; frames of row i are numbered from 20 i."""
    import datasets

    paths = [
        str(make_video(scratch / f"row {number}.mp4", frames=5 + number, first=20 * number, rate=FPS))
        for number in range(rows)
    ]
    # The library leaves the bytes out of a row whose path is a file that it can see.
    videos = [
        {"path": f"{number}.mp4", "bytes": Path(path).read_bytes()} if embedded else {"path": path, "bytes": None}
        for number, path in enumerate(paths)
    ]
    features = datasets.Features(
        {
            "video": datasets.Video(),
            "label": datasets.ClassLabel(names=["walk", "run"]),
            "caption": datasets.Value("string"),
        }
    )
    columns = {"video": videos, "label": [n % 2 for n in range(rows)], "caption": [f"row {n}" for n in range(rows)]}
    return datasets.Dataset.from_dict(columns, features=features)


def png_bytes(number: int) -> bytes:
    """A numbered frame as a PNG."""
    held = io.BytesIO()
    Image.fromarray(numbered_frame(number)).save(held, "PNG")
    return held.getvalue()
