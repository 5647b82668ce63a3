"""Batching modes on unequal lengths: samples and tokens per CPU second, padding, utilisation, peak memory.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python benchmarks/batching.py --repeats 3 --json batching.json

Each mix draws microbatches of 8 samples, and every mode trains on the same samples: forward, backward and one AdamW
step a microbatch. ``loop`` is strict batching with one sample at a time, gradients accumulated over the same 8.
``bucket`` sorts a pool of the benchmark's samples by length and cuts it into microbatches of 8, as training does.
Seconds are CPU seconds of the process. Peak memory is measured in a fresh process for each mode and mix.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from machine import describe_machine, remark
from marey.batching.transport import LatentBatch, Mode, collate
from marey.core.keys import rng, torch_generator
from marey.core.latents import Identity, LatentSample
from marey.models.video_transformer import VideoTransformerSize, build_video_transformer
from marey.objectives.prefix_suffix import PrefixSuffixObjective
from marey.objectives.video_program import ProgramSettings

CHANNELS, TEXT_CHANNELS, BATCH = 16, 64, 8
SHORT = [(1, 3), (2, 6), (3, 9), (4, 12), (5, 15)]
LONG = [(p, f) for p in (1, 2, 4, 8, 16) for f in (2, 4, 8, 16, 32, 48)]
MIXES = {"8x8": (8, SHORT), "16x16": (16, SHORT), "long": (8, LONG)}
MODES = ("loop", "padded", "bucket", "packed")
HIDDEN, DEPTH, HEADS = 256, 4, 4


def make_samples(mix: str, count: int, *, text: bool) -> list[LatentSample]:
    side, geometries = MIXES[mix]
    samples = []
    for i in range(count):
        draw = rng(0, "benchmark-geometry", i)
        prefix, future = geometries[int(draw.integers(len(geometries)))]
        words = int(draw.integers(4, 17))
        generator = torch_generator(0, "benchmark-latents", i)
        samples.append(
            LatentSample(
                video_latents=torch.randn(CHANNELS, prefix + future, side, side, generator=generator),
                prefix_frames=prefix,
                future_frames=future,
                frame_positions=torch.arange(prefix + future),
                identity=Identity("benchmark", str(i), str(i), 0),
                length_hint=prefix + future,
                text=torch.randn(words, TEXT_CHANNELS, generator=generator) if text else None,
                position=i,
            )
        )
    return samples


def make_batches(samples: list[LatentSample], mode: str) -> list[list[LatentBatch]]:
    """Optimizer steps, each a list of microbatches."""
    if mode == "bucket":
        samples = sorted(samples, key=lambda sample: sample.length_hint)
    cuts = [samples[i : i + BATCH] for i in range(0, len(samples), BATCH)]
    if mode == "loop":
        return [[collate([sample], mode="strict") for sample in cut] for cut in cuts]
    transport: Mode = mode  # type: ignore[assignment]
    return [[collate(cut, mode=transport)] for cut in cuts]


def measure(mix: str, mode: str, *, steps: int, text: bool) -> dict[str, float | str]:
    size = VideoTransformerSize(
        channels=CHANNELS, width=HIDDEN, depth=DEPTH, heads=HEADS, text_channels=TEXT_CHANNELS if text else None
    )
    objective = PrefixSuffixObjective(
        build_video_transformer(size, seed=0), ProgramSettings(mode="strict" if mode == "loop" else mode, seed=0)
    )
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-4)
    samples = make_samples(mix, steps * BATCH, text=text)
    batches = make_batches(samples, mode)

    def train(microbatches: list[LatentBatch], step: int) -> list:
        outputs = []
        for batch in microbatches:
            output = objective.forward_train_batch(batch, micro_step=step)
            (output.loss / len(microbatches)).backward()
            outputs.append(output._replace(loss=output.loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        return outputs

    train(batches[-1], 0)  # the optimizer's state and the allocator's pools exist from here on
    outputs = []
    start = time.process_time()
    for step, microbatches in enumerate(batches):
        outputs += train(microbatches, step)
    seconds = time.process_time() - start
    tokens, seen = sum(o.tokens for o in outputs), sum(o.tokens_seen for o in outputs)
    return {
        "mix": mix,
        "mode": mode,
        "samples_per_cpu_second": len(samples) / seconds,
        "tokens_per_cpu_second": tokens / seconds,
        "padding_share": 1 - tokens / seen,
        "utilisation": tokens / seen,
        "attention_utilisation": sum(o.pairs for o in outputs) / sum(o.pairs_seen for o in outputs),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parameters": sum(p.numel() for p in objective.parameters()),
    }


def in_fresh_process(mix: str, mode: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    command = [sys.executable, __file__, "--mix", mix, "--mode", mode, "--steps", str(arguments.steps), "--one"]
    command += ["--threads", str(arguments.threads), *([] if arguments.text else ["--no-text"])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: dict[str, float | str] = json.loads(done.stdout)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=list(MIXES), action="append")
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--steps", type=int, default=6, help="microbatches of 8 samples")
    parser.add_argument("--repeats", type=int, default=1, help="fresh processes for each row; the fastest is shown")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "1")))
    parser.add_argument("--text", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine's description")
    parser.add_argument("--one", action="store_true", help="measure one row in this process, print it as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    mixes, modes = arguments.mix or list(MIXES), arguments.mode or list(MODES)
    if arguments.one:
        print(json.dumps(measure(mixes[0], modes[0], steps=arguments.steps, text=arguments.text)))
        return
    machine = describe_machine()
    print(f"{machine['cpu']}, {arguments.threads} thread(s), torch {machine['torch']}")
    if note := remark(machine):
        print(note)
    kept: list[dict[str, float | str]] = []
    print("| mix | mode | samples/s | tokens/s | against loop | padding | utilisation | attention | peak MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for mix in mixes:
        base = 0.0
        # Rounds over the modes, so that a busy spell of the machine does not fall on one of them alone.
        rounds = [[in_fresh_process(mix, mode, arguments) for mode in modes] for _ in range(arguments.repeats)]
        for rows in zip(*rounds, strict=True):
            row = max(rows, key=lambda r: r["samples_per_cpu_second"])
            base = base or row["samples_per_cpu_second"]
            kept.append(row)
            print(
                f"| {mix} | {row['mode']} | {row['samples_per_cpu_second']:.2f} | {row['tokens_per_cpu_second']:.0f} | "
                f"{row['samples_per_cpu_second'] / base:.2f} | {row['padding_share']:.2f} | {row['utilisation']:.2f} | "
                f"{row['attention_utilisation']:.2f} | {row['peak_mib']:.0f} |",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": kept}, indent=2) + "\n")


if __name__ == "__main__":
    main()
