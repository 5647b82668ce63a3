"""Seconds of one encoder training step against the matrix products that it cannot do without.

    python benchmarks/encoder_step.py --json out.json        # ViT-Tiny with 8 clips, then ViT-B with 4
    python benchmarks/encoder_step.py --size vit_tiny --batch 8 --plain

The step: forward and backward of the default recipe's whole objective (11 views at full size, 95% token drop,
projector, SIGReg) in float32, from the uint8 patches that the loader ships to the gradients of all parameters;
no optimizer. ``--plain`` times the same step written the plain way too (``plain_step.py``).

The floor: for every layer the four Linear products qkv, proj, fc1 and fc2 on all tokens that enter the blocks (the
kept ones and [CLS]), forward (X W^T) and backward (dY W and dY^T X), into memory allocated beforehand. Not in it:
attention, norms, GELU, residuals, patch embedding, projector, loss. (The step itself computes less of the last
layer than the floor counts, where only [CLS] is needed.)

Floor and step take turns, so that both see the same machine; medians are reported. Peak memory is the process's own
after its first step, everything included: weights, gradients, activations, the libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import torch

from floor import block_products, make_floor
from machine import describe_machine, peak_bytes, remark
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
from tables import markdown, number

DEFAULT_CLIPS = {"vit_tiny": 8, "vit_base": 4}


def build_encoder_objective(size: str) -> InvarianceObjective:
    """The default recipe's objective with this encoder, in float32."""
    objective = build(load_config([f"model.name={size}", "trainer.precision=32-true"]))
    assert isinstance(objective, InvarianceObjective)
    return objective


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


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(size: str, clips: int, steps: int, *, plain: bool) -> dict[str, Any]:
    """Medians over ``steps`` timed rounds after one round of warming up."""
    config = load_config([f"model.name={size}", "trainer.precision=32-true"])
    objective = build_encoder_objective(size)
    chunk, whole = make_batch(config, clips, whole=plain)
    tokens = 0

    def step() -> None:
        nonlocal tokens
        objective.zero_grad(set_to_none=True)
        out = objective.forward_train_batch([chunk], micro_step=0)
        torch.autograd.backward(out.loss)
        tokens = out.tokens

    def plain_step() -> None:
        objective.zero_grad(set_to_none=True)
        torch.autograd.backward(plain_loss(objective, whole, micro_step=0))

    before = peak_bytes()
    step()
    peak = peak_bytes()
    floor = make_floor(block_products(objective.encoder.embed_dim, objective.encoder.depth, tokens))
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
    }


def report(results: list[dict[str, Any]]) -> str:
    """One row a result."""
    header = ["encoder", "clips", "views", "tokens", "step, s", "floor, s", "step / floor", "plain / floor", "peak, GB"]
    rows = [
        [
            result["size"],
            str(result["clips"]),
            str(result["views"]),
            str(result["tokens"]),
            number(result["seconds_per_step"]),
            number(result["floor_seconds"]),
            number(result["ratio"]),
            number(result["plain_seconds"] and result["plain_seconds"] / result["floor_seconds"]),
            number(result["peak_bytes"] / 1e9),
        ]
        for result in results
    ]
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), help="default: vit_tiny, then vit_base")
    parser.add_argument("--batch", type=int, help="clips (default: 8 for vit_tiny, else 4)")
    parser.add_argument("--steps", type=int, help="timed rounds (default 5; with --quick 2)")
    parser.add_argument("--plain", action="store_true", help="also time the step written the plain way")
    parser.add_argument("--quick", action="store_true", help="fewer rounds of the same step; sizes stay")
    parser.add_argument("--json", type=Path, help="write the results and the machine's description there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps = (2 if arguments.quick else 5) if arguments.steps is None else arguments.steps
    if steps < 1 or (arguments.batch is not None and arguments.batch < 1):
        parser.error("--steps and --batch must be at least 1")
    if arguments.one:
        print(json.dumps(measure(arguments.size, arguments.batch, steps, plain=arguments.plain)))
        return
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['torch_threads']} thread(s), float32, medians of {steps} rounds")
    if note := remark(machine):
        print(note)
    results = []
    for size in [arguments.size] if arguments.size else list(DEFAULT_CLIPS):
        # A process of its own for each size: the peak of one is not the other's.
        command = [sys.executable, __file__, "--one", "--size", size, "--steps", str(steps)]
        command += ["--batch", str(arguments.batch or DEFAULT_CLIPS.get(size, 4))]
        command += ["--plain"] if arguments.plain else []
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results.append(json.loads(done.stdout))
    print(report(results))
    if arguments.json is not None:
        write_json(arguments.json, {"machine": machine, "quick": arguments.quick, "results": results})


if __name__ == "__main__":
    main()
