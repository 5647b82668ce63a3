"""Seconds of one encoder training step against the matrix products that it cannot do without.

    python benchmarks/encoder_step.py --size vit_tiny --batch 8 --steps 3 --json out.json
    python benchmarks/encoder_step.py                        # ViT-Tiny with 8 clips, then ViT-B with 4

The step: forward and backward of the default recipe's whole objective (11 views at full size, 95% token drop,
projector, SIGReg) in float32, from the uint8 patches that the loader ships to the gradients of all parameters;
no optimizer. ``--plain`` times the same step written the plain way too (``plain_step.py``).

The floor: for every layer the four Linear products qkv, proj, fc1 and fc2 on all tokens that enter the blocks (the
kept ones and [CLS]), forward (X W^T) and backward (dY W and dY^T X), into memory allocated beforehand. Not in it:
attention, norms, GELU, residuals, patch embedding, projector, loss. (The step itself computes less of the last
layer than the floor counts, where only [CLS] is needed.)

Floor and step take turns, so that both see the same machine; medians are reported.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import torch

from machine import describe_machine, remark
from marey.config.compose import load_config
from marey.config.schema import EncoderConfig
from marey.config.sizes import SIZES
from marey.core.files import write_json
from marey.core.tokens import (
    TokenGroup,
    ViewChunk,
    grid_positions,
    grid_shape,
    keep_indices,
    patchify,
)
from marey.objectives.invariance import InvarianceObjective
from marey.objectives.registry import build
from plain_step import plain_loss

DEFAULT_CLIPS = {"vit_tiny": 8, "vit_base": 4}


def peak_bytes() -> int:
    """The most memory this process has held (bytes)."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def make_view(config: EncoderConfig, clips: int, view: int, size: int) -> tuple[torch.Tensor, ...]:
    """One view of every clip: uint8 video, kept token numbers, kept positions; the keep-sets are the run's own."""
    model = config.model
    generator = torch.Generator().manual_seed(view)
    shape = (clips, 3, model.num_frames, size, size)
    video = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    grid = grid_shape(model.num_frames, size, size, patch=model.patch_size, tubelet=model.tubelet_size)
    positions = grid_positions(grid)
    kept = torch.stack(
        [
            keep_indices(len(positions), model.token_drop_rate, seed=config.seed, epoch=0, position=clip, view=view)
            for clip in range(clips)
        ]
    )
    return video, kept, positions[kept]


def make_batch(config: EncoderConfig, clips: int, *, whole: bool) -> tuple[ViewChunk, list[Any]]:
    """What the loader ships, and (``whole``) the same views with every pixel."""
    sizes = [config.model.img_size] + [config.augmentation.local_size] * config.augmentation.local_crops_number
    groups: list[list[tuple[torch.Tensor, ...]]] = [[], []]
    full: list[list[tuple[torch.Tensor, ...]]] = [[], []]
    for view, size in enumerate(sizes):
        video, kept, positions = make_view(config, clips, view, size)
        patches = patchify(video, patch=config.model.patch_size, tubelet=config.model.tubelet_size)
        pick = kept[..., None].expand(-1, -1, patches.shape[-1])
        groups[view > 0].append((patches.gather(1, pick), positions))
        if whole:
            full[view > 0].append((video, kept, positions))

    def join(views: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return [torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*views, strict=True)]

    chunk = ViewChunk(
        TokenGroup(*join(groups[0])),
        TokenGroup(*join(groups[1])),
        torch.zeros(clips, 5, dtype=torch.int64),
        torch.zeros(0, 3, dtype=torch.int64),
        [],
    )
    return chunk, [tuple(join(views)) for views in full] if whole else []


def make_floor(width: int, depth: int, tokens: int) -> Callable[[], None]:
    """The matrix products of all blocks on this many tokens, forward then backward."""
    layers = []
    for inner, outer in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
        x, dy, w = torch.randn(tokens, inner), torch.randn(tokens, outer), torch.randn(outer, inner)
        layers.append((x, dy, w, torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)))

    def floor() -> None:
        for _ in range(depth):
            for x, _, w, y, _, _ in layers:
                torch.mm(x, w.T, out=y)
        for _ in range(depth):
            for x, dy, w, _, dx, dw in layers:
                torch.mm(dy, w, out=dx)
                torch.mm(dy.T, x, out=dw)

    return floor


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(size: str, clips: int, steps: int, *, plain: bool) -> dict[str, Any]:
    """Medians over ``steps`` timed rounds after one round of warming up."""
    config = load_config([f"model.name={size}", "trainer.precision=32-true"])
    machine = describe_machine()
    objective = build(config)
    assert isinstance(objective, InvarianceObjective)
    chunk, whole = make_batch(config, clips, whole=plain)
    tokens = 0

    def step() -> None:
        nonlocal tokens
        objective.zero_grad(set_to_none=True)
        out = objective.forward_train_batch([chunk], micro_step=0)
        out.loss.backward()
        tokens = out.tokens

    def plain_step() -> None:
        objective.zero_grad(set_to_none=True)
        plain_loss(objective, whole, micro_step=0).backward()

    before = peak_bytes()
    step()
    peak = peak_bytes()
    floor = make_floor(objective.encoder.embed_dim, objective.encoder.depth, tokens)
    floor()
    works = {"floor": floor, "step": step}
    if plain:
        plain_step()
        works["plain"] = plain_step
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(steps):
        for name, work in works.items():
            times[name].append(seconds(work))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "benchmark": "encoder_step",
        "size": size,
        "clips": clips,
        "views": 1 + config.augmentation.local_crops_number,
        "tokens": tokens,
        "steps": steps,
        "seconds_per_step": medians["step"],
        "floor_seconds": medians["floor"],
        "ratio": medians["step"] / medians["floor"],
        "plain_seconds": medians.get("plain"),
        "peak_bytes": peak,
        "peak_bytes_before_step": before,
        "all_seconds": times,
        "machine": machine,
    }


def report(result: dict[str, Any]) -> str:
    """Three lines for a person."""
    lines = [
        f"{result['size']}, {result['clips']} clips x {result['views']} views, {result['tokens']} tokens: "
        f"{result['seconds_per_step']:.2f} s a step, {result['ratio']:.2f} x the floor of "
        f"{result['floor_seconds']:.2f} s (medians of {result['steps']})",
        f"  peak memory {result['peak_bytes'] / 2**30:.2f} GiB "
        f"({result['peak_bytes_before_step'] / 2**30:.2f} GiB before the first step)",
    ]
    if result["plain_seconds"] is not None:
        lines.append(
            f"  the same step written the plain way: {result['plain_seconds']:.2f} s, "
            f"{result['plain_seconds'] / result['floor_seconds']:.2f} x the floor"
        )
    machine = result["machine"]
    lines.append(f"  {machine['cpu']}, {machine['torch_threads']} threads, load {machine['load_average']}")
    note = remark(machine)
    return "\n".join(lines + ([f"  note: {note}"] if note else []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), help="default: vit_tiny, then vit_base")
    parser.add_argument("--batch", type=int, help="clips (default: 8 for vit_tiny, else 4)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps (default 3)")
    parser.add_argument("--plain", action="store_true", help="also time the step written the plain way")
    parser.add_argument("--json", type=Path, help="write the result (one object; with both sizes, a list)")
    arguments = parser.parse_args()
    if arguments.steps < 1 or (arguments.batch is not None and arguments.batch < 1):
        parser.error("--steps and --batch must be at least 1")
    results = []
    for size in [arguments.size] if arguments.size else list(DEFAULT_CLIPS):
        clips = arguments.batch or DEFAULT_CLIPS.get(size, 4)
        result = measure(size, clips, arguments.steps, plain=arguments.plain)
        print(report(result), flush=True)
        results.append(result)
    if arguments.json is not None:
        write_json(arguments.json, results[0] if len(results) == 1 else results)


if __name__ == "__main__":
    main()
