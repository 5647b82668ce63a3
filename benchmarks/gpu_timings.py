"""Timings of ``gpu.py``: steps against the matrix products that they cannot do without, measured in the same run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import batching
from gpu_attention import lay_out
from gpu_checks import SMALLEST, chunk_to, random_chunk
from gpu_rows import Found, Place, Row
from marey.batching.flex import block_mask, tile_table
from marey.batching.transport import LatentBatch, collate
from marey.config.compose import load_config
from marey.config.schema import EncoderConfig
from marey.models.video_transformer import VideoTransformerSize, build_video_transformer
from marey.objectives.invariance import InvarianceObjective
from marey.objectives.prefix_suffix import PrefixSuffixObjective
from marey.objectives.registry import build
from marey.objectives.video_program import ProgramSettings

TINY_LIMIT_GIB = 8e9 / 2**30
Encoder = tuple[InvarianceObjective, Any, int]
"""Objective, its batch on the device, tokens of a step."""


def full_config(place: Place, *overrides: str) -> EncoderConfig:
    """The default recipe at full size; a rehearsal's is as small as it goes."""
    if place.small:
        return load_config(["recipe=smoke", *SMALLEST])
    return load_config(list(overrides))


def make_encoder(config: EncoderConfig, clips: int, place: Place) -> Encoder:
    objective = build(config).to(place.device)
    assert isinstance(objective, InvarianceObjective)
    chunk = chunk_to(random_chunk(config, clips), place.device)
    tokens = sum(
        group.patches.shape[0] * (1 + group.patches.shape[1]) for group in (chunk.views_global, chunk.views_local)
    )
    return objective, chunk, tokens


def step_of(encoder: Encoder, place: Place) -> Callable[[], None]:
    objective, chunk, _ = encoder

    def step() -> None:
        objective.zero_grad(set_to_none=True)
        with place.bf16():
            loss = objective.forward_train_batch([chunk], micro_step=0).loss
        torch.autograd.backward(loss)

    return step


def matrix_products(width: int, depth: int, tokens: int, place: Place) -> tuple[Callable[[], None], float]:
    """All blocks' Linear products forward and backward, in bfloat16 and into memory at hand; and their FLOPs."""
    made = partial(torch.randn, device=place.device, dtype=torch.bfloat16)
    layers = []
    for inner, outer in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
        x, dy, w = made(tokens, inner), made(tokens, outer), made(outer, inner)
        layers.append((x, dy, w, torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)))

    def products() -> None:
        for _ in range(depth):
            for x, dy, w, y, dx, dw in layers:
                torch.mm(x, w.T, out=y)
                torch.mm(dy, w, out=dx)
                torch.mm(dy.T, x, out=dw)

    return products, 6.0 * depth * tokens * 12 * width**2


def fitting(config: EncoderConfig, clips: int, place: Place) -> tuple[Encoder, int]:
    """The largest of ``clips``, half of it, and so on that the device holds; after one step."""
    while True:
        try:
            encoder = make_encoder(config, clips, place)
            step_of(encoder, place)()
            place.wait()
            return encoder, clips
        except torch.OutOfMemoryError:
            if clips == 1:
                raise
            clips //= 2
            torch.cuda.empty_cache()


def vit_base(place: Place) -> Found:
    """One forward and backward pass of ViT-B, 11 views a clip, bf16-mixed, against its matrix products."""
    config = full_config(place, "model.name=vit_base")
    place.start_peak()
    encoder, clips = fitting(config, 4 if place.small else 96, place)
    objective, _, tokens = encoder
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-6)
    step = step_of(encoder, place)
    step()
    optimizer.step()
    peak = place.peak_gib()
    model = objective.encoder
    products, flops = matrix_products(model.embed_dim, model.depth, tokens, place)
    times = place.taking_turns({"floor": products, "step": step, "AdamW": optimizer.step}, 1 if place.small else 5)
    return Found(
        {
            "clips": clips,
            "tokens": tokens,
            "step s": times["step"],
            "floor s": times["floor"],
            "times the floor": times["step"] / times["floor"],
            "floor TFLOP/s": flops / times["floor"] / 1e12,
            "AdamW s": times["AdamW"],
            "clips/s": clips / (times["step"] + times["AdamW"]),
            "peak GiB": peak,
        }
    )


def compiled_encoder(place: Place) -> Found:
    """``torch.compile`` of every block against eager: whether an option for it would pay."""
    config = full_config(place, "model.name=vit_base")
    encoder, clips = fitting(config, 2 if place.small else 48, place)
    other = make_encoder(config, clips, place)
    for block in other[0].encoder.blocks:
        block.compile()
    works = {"eager": step_of(encoder, place), "compiled": step_of(other, place)}
    first = place.seconds(works["compiled"])
    times = place.taking_turns(works, 5)
    numbers = {"clips": clips, "eager s": times["eager"], "compiled s": times["compiled"], "compiling s": first}
    return Found({**numbers, "gain": times["eager"] / times["compiled"]})


def tiny_config(place: Place) -> EncoderConfig:
    """The recipe whose published budget is 8 GB."""
    return full_config(place, "recipe=consumer_vit_tiny")


def vit_tiny(place: Place) -> Found:
    """ViT-Tiny with 128 clips, optimizer and average of the weights included, in 8 GB."""
    config = tiny_config(place)
    clips = 4 if place.small else 128
    place.start_peak()
    encoder = make_encoder(config, clips, place)
    average = [p.detach().clone() for p in encoder[0].encoder.parameters()]
    optimizer = torch.optim.AdamW(encoder[0].parameters(), lr=1e-6)
    step = step_of(encoder, place)

    def whole() -> None:
        step()
        optimizer.step()

    seconds = place.taking_turns({"step": whole}, 1 if place.small else 5)["step"]
    peak = place.peak_gib()
    assert average
    numbers = {"clips": clips, "step s": seconds, "clips/s": clips / seconds, "peak GiB": peak, "limit": TINY_LIMIT_GIB}
    return Found(numbers, None if peak is None else peak < TINY_LIMIT_GIB)


def batching_modes(place: Place, *, mix: str) -> Found:
    """Samples of unequal length, bf16-mixed: packed against padded against one at a time."""
    width, depth, count = (32, 1, 4) if place.small else (1024, 8, 32)
    size = VideoTransformerSize(
        channels=batching.CHANNELS,
        width=width,
        depth=depth,
        heads=width // 64 or 1,
        text_channels=batching.TEXT_CHANNELS,
    )
    model = build_video_transformer(size, seed=0).to(place.device)
    samples = batching.make_samples(mix, count, text=True)
    works: dict[str, Callable[[], Any]] = {}
    facts: dict[str, Any] = {}

    def train(objective: PrefixSuffixObjective, batches: list[LatentBatch]) -> list[Any]:
        model.zero_grad(set_to_none=True)
        outputs = []
        for batch in batches:
            with place.bf16():
                output = objective.forward_train_batch(batch, micro_step=0)
            torch.autograd.backward(output.loss / len(batches))
            outputs.append(output)
        return outputs

    for mode in ("packed", "padded", "loop"):
        transport: Any = "strict" if mode == "loop" else mode
        batches = (
            [collate([s], mode=transport) for s in samples] if mode == "loop" else [collate(samples, mode=transport)]
        )
        objective = PrefixSuffixObjective(model, ProgramSettings(mode=transport, seed=0))
        works[mode] = partial(train, objective, [batch.to(place.device) for batch in batches])
        place.start_peak()
        outputs = works[mode]()
        facts[f"{mode} peak GiB"] = place.peak_gib()
        facts[f"{mode} attention useful"] = sum(o.pairs for o in outputs) / sum(o.pairs_seen for o in outputs)
    times = place.taking_turns(works, 1 if place.small else 4)
    rates = {f"{mode} samples/s": count / seconds for mode, seconds in times.items()}
    gains = {"packed/padded": times["padded"] / times["packed"], "packed/loop": times["loop"] / times["packed"]}
    return Found({**rates, **gains, **facts})


def mask_making(place: Place) -> Found:
    """What a packed batch costs before its first layer: labels, tiles, block mask."""
    lengths = [4, 8, 12, 16, 20, 64] * (1 if place.small else 8)
    parts: dict[str, float] = {}

    def make() -> None:
        layout = lay_out(lengths, tokens=64, prefixes=[1] * len(lengths), words=[20] * len(lengths))
        for one in (layout.attention, layout.cross):
            assert one is not None
            tile_table(one)

    def mask() -> None:
        block_mask(lay_out(lengths, tokens=64).attention, place.device)

    parts["layout and tiles, ms"] = 1e3 * place.taking_turns({"": make}, 3)[""]
    parts["layout, tiles and mask, ms"] = 1e3 * place.taking_turns({"": mask}, 3)[""]
    return Found({"samples": len(lengths), "tokens": 64 * sum(lengths), **parts})


# -- whether the loader keeps up


def write_store(path: Path, *, episodes: int, frames: int, height: int, width: int) -> None:
    """Drifting waves as JPEG frames, in the layout of ``marey ingest``."""
    import lance
    import pyarrow as pa
    import simplejpeg

    y, x = np.mgrid[0:height, 0:width]
    grain = np.random.default_rng(0).integers(0, 40, (height, width, 3))

    @cache
    def frame(kind: int, step: int) -> bytes:
        wave = 128 + 60 * np.sin((x * (kind + 1) + y * (kind % 3) + 6 * step) / 29.0 + kind)
        picture = (np.stack([wave, wave[::-1], 255 - wave], axis=-1) + grain).clip(0, 255).astype(np.uint8)
        return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality=90))

    rows: dict[str, list[Any]] = {key: [] for key in ("episode_idx", "step_idx", "frame", "h", "w", "label")}
    for episode in range(episodes):
        for step in range(frames):
            values = (episode, step, frame(episode % 5, step), height, width, episode % 3)
            for key, value in zip(rows, values, strict=True):
                rows[key].append(value)
    lance.write_dataset(pa.table(rows), str(path))


def loader_rate(config: EncoderConfig, place: Place) -> float:
    """Clips a second, once what the workers made ahead is used up."""
    from marey.training.batchplan import batch_plan
    from marey.training.data import build_loader, open_train

    data = open_train(config)
    plan = batch_plan(config, data.clips)
    assert plan.micro_steps_per_epoch is not None
    ahead, timed = (1, 1) if place.small else (3, 3)
    loader = build_loader(
        data,
        config,
        plan=plan,
        micro_steps=plan.micro_steps_per_epoch,
        pin_memory=place.on_cuda,
        fixed_epoch=False,
    )
    try:
        stream = iter(loader)
        for _ in islice(stream, ahead):
            pass
        seconds = place.seconds(lambda: [next(stream) for _ in range(timed)])
    finally:
        loader.close()
    return timed * config.loader.batch_size / seconds


def loader_config(place: Place, store: Path, *, workers: int) -> EncoderConfig:
    """The default recipe's loader on ``store``."""
    shared = ["data=custom", f"data.train={store}", f"loader.num_workers={workers}", "trainer.devices=1"]
    if not place.small:
        return load_config(["loader.micro_batch_size=8", *shared])
    batch = ["loader.batch_size=4", "loader.micro_batch_size=2", "loader.clips_per_video=4"]
    return load_config(["recipe=smoke", *SMALLEST, *batch, *shared])


def loader_and_step(place: Place) -> Found:
    """Clips a second from the loader, with a worker for every core but one, against those of the step."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = 0 if place.small else max(1, cores - 1)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "frames.lance"
        episodes, frames, height, width = (6, 8, 40, 40) if place.small else (96, 40, 384, 682)
        write_store(store, episodes=episodes, frames=frames, height=height, width=width)
        made = loader_rate(loader_config(place, store, workers=workers), place)
    numbers: dict[str, Any] = {"workers": workers, "loader clips/s": made}
    for size in ("vit_tiny", "vit_base"):
        encoder, clips = fitting(full_config(place, f"model.name={size}"), 4 if place.small else 96, place)
        step = place.taking_turns({"step": step_of(encoder, place)}, 1 if place.small else 4)["step"]
        numbers |= {f"{size} step clips/s": clips / step, f"{size} loader/step": made * step / clips}
    return Found(numbers)


TIMINGS: list[Row] = [
    Row("ViT-B step, bf16-mixed, against its matrix products", vit_base, 60, check=False),
    Row("ViT-Tiny, 128 clips, under 8 GB", vit_tiny, 30),
    Row("making layouts, tiles and masks", mask_making, 20, check=False),
    *(Row(f"packed, padded, loop: {mix}", partial(batching_modes, mix=mix), 90, check=False) for mix in batching.MIXES),
    Row("loader against step", loader_and_step, 90, check=False),
    Row("torch.compile of the blocks", compiled_encoder, 60, check=False, on_cpu=False),
]
