"""Memory against work: the peak of a step as its clips grow, and what the backward pass keeps of each token.

    python benchmarks/memory.py --json memory.json

Peak: of a fresh process for each number of clips, one step of ``encoder_step.py``; the slope is bytes a kept token.

Activations: bytes that autograd keeps for the backward pass, every storage counted once and parameters left out, a
token and a layer: the whole objective with all its blocks less the same with half of them. Beside it the arithmetic:
what each operation of a block has to keep.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from encoder_step import build_encoder_objective, make_batch
from machine import describe_machine, peak_bytes, remark
from marey.config.compose import load_config
from marey.config.sizes import SIZES
from marey.core.files import write_json
from tables import markdown, number

KEPT_WIDTHS = {
    "block's input, for its norm": 1,
    "normed, for qkv": 1,
    "turned queries, keys and values": 3,
    "attention's output": 1,
    "the same of all groups, for proj": 1,
    "residual, for the second norm": 1,
    "normed, for fc1": 1,
    "fc1's output, for GELU": 4,
    "GELU's output, for fc2": 4,
}
"""What a block keeps for each token, in float32 values of the encoder's width."""


def measure_peak(size: str, clips: int) -> dict[str, Any]:
    """One step in this process: what it held before, and at most."""
    objective = build_encoder_objective(size)
    chunk, _ = make_batch(load_config([f"model.name={size}"]), clips, whole=False)
    before = peak_bytes()
    output = objective.forward_train_batch([chunk], micro_step=0)
    torch.autograd.backward(output.loss)
    return {
        "encoder": size,
        "clips": clips,
        "tokens": output.tokens,
        "bytes_before": before,
        "peak_bytes": peak_bytes(),
    }


def measure_memory(quick: bool) -> dict[str, Any]:
    """Peak memory against clips."""
    clips = (
        {"vit_tiny": (4, 16), "vit_base": (1, 4)} if quick else {"vit_tiny": (4, 8, 16, 32), "vit_base": (1, 2, 4, 8)}
    )
    rows = []
    for size, counts in clips.items():
        for count in counts:
            command = [sys.executable, __file__, "--inside", size, str(count)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(done.stdout))
    slopes = {}
    for size in clips:
        tokens, peaks = zip(*((r["tokens"], r["peak_bytes"]) for r in rows if r["encoder"] == size), strict=True)
        slopes[size] = float(np.polyfit(tokens, peaks, 1)[0])
    return {"rows": rows, "bytes_per_token": slopes}


def saved_bytes(forward: Callable[[], object], parameters: Sequence[torch.Tensor]) -> int:
    """Bytes that autograd keeps of ``forward``: each storage once, those of ``parameters`` not at all."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not given to another
        return tensor.detach()  # a node that saves its own output would otherwise hold itself

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(storage.nbytes() for storage in kept.values())
    del result
    return total


def activations(size: str, clips: int = 1) -> dict[str, Any]:
    """Bytes kept a token and a layer of one encoder, counted and by arithmetic."""
    width, depth, heads = SIZES[size]
    objective = build_encoder_objective(size)
    chunk, _ = make_batch(load_config([f"model.name={size}"]), clips, whole=False)
    tokens = 0

    def forward() -> torch.Tensor:
        nonlocal tokens
        output = objective.forward_train_batch([chunk], micro_step=0)
        tokens = output.tokens
        return output.loss

    parameters = list(objective.parameters())
    whole = saved_bytes(forward, parameters)
    objective.encoder.blocks = objective.encoder.blocks[: depth // 2]
    half = saved_bytes(forward, parameters)
    return {
        "encoder": size,
        "clips": clips,
        "tokens": tokens,
        "saved_bytes": whole,
        "saved_bytes_per_token": whole / tokens,
        "saved_bytes_per_token_and_layer": (whole - half) / tokens / (depth - depth // 2),
        # Of each head the sum of its scores' exponentials; of each of two norms its mean and deviation.
        "arithmetic_bytes_per_token_and_layer": 4 * (sum(KEPT_WIDTHS.values()) * width + heads + 4),
    }


def _report_memory(found: dict[str, Any]) -> str:
    rows = [
        [row["encoder"], str(row["clips"]), f"{row['tokens']:,}"]
        + [number(row[key] / 1e6, 4) for key in ("bytes_before", "peak_bytes")]
        for row in found["rows"]
    ]
    lines = [
        f"{size}: {number(slope / 1e3)} kB of peak a kept token" for size, slope in found["bytes_per_token"].items()
    ]
    return "\n".join([markdown(["encoder", "clips", "tokens", "before, MB", "peak, MB"], rows), "", *lines])


def _report_activations(kept: list[dict[str, Any]]) -> str:
    keys = ("saved_bytes_per_token", "saved_bytes_per_token_and_layer", "arithmetic_bytes_per_token_and_layer")
    rows = [
        [row["encoder"], f"{row['tokens']:,}", number(row["saved_bytes"] / 1e6)]
        + [number(row[key] / 1e3) for key in keys]
        for row in kept
    ]
    header = ["encoder", "tokens", "kept, MB", "kB a token", "kB a token and layer", "by arithmetic, kB"]
    terms = "; ".join(f"{name} {widths}" for name, widths in KEPT_WIDTHS.items())
    return "\n".join([markdown(header, rows), "", f"Arithmetic, in widths of float32: {terms}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two numbers of clips for each encoder")
    parser.add_argument("--json", type=Path, help="also write everything there, with the machine's description")
    parser.add_argument("--inside", nargs=2, metavar=("SIZE", "CLIPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        print(json.dumps(measure_peak(arguments.inside[0], int(arguments.inside[1]))))
        return
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['torch_threads']} thread(s), float32")
    if note := remark(machine):
        print(note)
    peak, kept = measure_memory(arguments.quick), [activations(size) for size in ("vit_tiny", "vit_base")]
    print(f"\n{_report_memory(peak)}\n\n{_report_activations(kept)}")
    if arguments.json is not None:
        found = {
            "machine": machine,
            "quick": arguments.quick,
            "peak": peak,
            "activations": {"rows": kept, "widths": KEPT_WIDTHS},
        }
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
