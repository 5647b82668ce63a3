"""Batching modes on unequal lengths: samples and tokens per CPU second, padding, utilisation, peak memory.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python benchmarks/batching.py --repeats 3 --json batching.json

Each mix draws microbatches of 8 samples, and every mode trains on the same samples: forward, backward and one AdamW
step a microbatch. ``loop`` is strict batching with one sample at a time, gradients accumulated over the same 8.
``bucket`` sorts a pool of the benchmark's samples by length and cuts it into microbatches of 8, as training does.
The modes take turns, one optimizer step each, in one process for each mix; seconds are its CPU seconds. Peak memory is
measured in a fresh process for each mode and mix, over all its steps; ``--quick`` leaves it out, and takes half the
steps: the samples of a mix are fewer then, and ``bucket`` sorts a smaller pool.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import torch

from machine import describe_machine, peak_bytes, remark
from marey.batching.transport import LatentBatch, Mode, collate
from marey.core.files import write_json
from marey.core.keys import rng, torch_generator
from marey.core.latents import Identity, LatentSample
from marey.models.video_transformer import VideoTransformerSize, build_video_transformer
from marey.objectives.prefix_suffix import PrefixSuffixObjective
from marey.objectives.video_decoder import VideoStepOutput
from marey.objectives.video_program import ProgramSettings
from tables import NONE, markdown, number

CHANNELS, TEXT_CHANNELS, BATCH = 16, 64, 8
SHORT = [(1, 3), (2, 6), (3, 9), (4, 12), (5, 15)]
LONG = [(p, f) for p in (1, 2, 4, 8, 16) for f in (2, 4, 8, 16, 32, 48)]
MIXES = {"8x8": (8, SHORT), "16x16": (16, SHORT), "long": (8, LONG)}
MODES = ("loop", "padded", "bucket", "packed")
HIDDEN, DEPTH, HEADS = 256, 4, 4
STEPS, QUICK_STEPS = 6, 3


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


def transport_of(mode: str) -> Mode:
    modes: dict[str, Mode] = {"loop": "strict", "padded": "padded", "bucket": "bucket", "packed": "packed"}
    return modes[mode]


def make_batches(samples: list[LatentSample], mode: str) -> list[list[LatentBatch]]:
    """Optimizer steps, each a list of microbatches."""
    if mode == "bucket":
        samples = sorted(samples, key=lambda sample: sample.length_hint)
    cuts = [samples[i : i + BATCH] for i in range(0, len(samples), BATCH)]
    if mode == "loop":
        return [[collate([sample], mode=transport_of(mode)) for sample in cut] for cut in cuts]
    return [[collate(cut, mode=transport_of(mode))] for cut in cuts]


def build_objective(mode: str, *, text: bool) -> PrefixSuffixObjective:
    size = VideoTransformerSize(
        channels=CHANNELS, width=HIDDEN, depth=DEPTH, heads=HEADS, text_channels=TEXT_CHANNELS if text else None
    )
    return PrefixSuffixObjective(
        build_video_transformer(size, seed=0), ProgramSettings(mode=transport_of(mode), seed=0)
    )


@dataclass
class Trained:
    """One mode on one mix: its model, its batches, and what its timed steps gave."""

    mode: str
    objective: PrefixSuffixObjective
    optimizer: torch.optim.Optimizer
    batches: list[list[LatentBatch]]
    seconds: list[float] = field(default_factory=list)
    outputs: list[VideoStepOutput] = field(default_factory=list)

    def step(self, number: int) -> list[VideoStepOutput]:
        microbatches, outputs = self.batches[number], []
        for batch in microbatches:
            output = self.objective.forward_train_batch(batch, micro_step=number)
            torch.autograd.backward(output.loss / len(microbatches))
            outputs.append(output._replace(loss=output.loss.detach()))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return outputs


def prepare(mix: str, mode: str, *, steps: int, text: bool) -> Trained:
    objective = build_objective(mode, text=text)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-4)
    trained = Trained(mode, objective, optimizer, make_batches(make_samples(mix, steps * BATCH, text=text), mode))
    trained.step(len(trained.batches) - 1)  # the optimizer's state and the allocator's pools exist from here on
    return trained


def measure(mix: str, modes: list[str], *, steps: int, repeats: int, text: bool) -> list[dict[str, Any]]:
    """The modes in turns, step by step; each mode's fastest round counts."""
    runs = [prepare(mix, mode, steps=steps, text=text) for mode in modes]
    for _ in range(repeats):
        for run in runs:
            run.outputs.clear()
            run.seconds.append(0.0)
        for step in range(steps):
            for run in runs:
                start = time.process_time()
                run.outputs += run.step(step)
                run.seconds[-1] += time.process_time() - start
    rows: list[dict[str, Any]] = []
    for run in runs:
        seconds, outputs = min(run.seconds), run.outputs
        tokens, seen = sum(o.tokens for o in outputs), sum(o.tokens_seen for o in outputs)
        row = {
            "mix": mix,
            "mode": run.mode,
            "samples_per_cpu_second": steps * BATCH / seconds,
            "tokens_per_cpu_second": tokens / seconds,
            "padding_share": 1 - tokens / seen,
            "utilisation": tokens / seen,
            "attention_utilisation": sum(o.pairs for o in outputs) / sum(o.pairs_seen for o in outputs),
            "peak_mib": None,
            "parameters": sum(p.numel() for p in run.objective.parameters()),
        }
        rows.append(row)
    loop = next((row["samples_per_cpu_second"] for row in rows if row["mode"] == "loop"), None)
    for row in rows:
        row["against_loop"] = loop and row["samples_per_cpu_second"] / loop
    return rows


def measure_peak(mix: str, mode: str, *, steps: int, text: bool) -> float:
    """MiB that this process has held after all steps of one mode."""
    run = prepare(mix, mode, steps=steps, text=text)
    for step in range(steps):
        run.step(step)
    return peak_bytes() / 2**20


def in_fresh_process(mix: str, modes: list[str], arguments: argparse.Namespace, *, peak: bool = False) -> Any:
    command = [sys.executable, __file__, "--one", "peak" if peak else "speed", "--mix", mix]
    command += [word for mode in modes for word in ("--mode", mode)]
    command += ["--steps", str(arguments.steps), "--repeats", str(arguments.repeats)]
    command += ["--threads", str(arguments.threads), *([] if arguments.text else ["--no-text"])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def report(rows: list[dict[str, Any]]) -> str:
    header = ["mix", "mode", "samples/s", "tokens/s", "against loop", "padding", "utilisation", "attention useful"]
    shares = ("against_loop", "padding_share", "utilisation", "attention_utilisation")
    return markdown(
        [*header, "peak, MiB"],
        [
            [
                row["mix"],
                row["mode"],
                f"{row['samples_per_cpu_second']:.2f}",
                f"{row['tokens_per_cpu_second']:.0f}",
                *(NONE if row[key] is None else f"{row[key]:.2f}" for key in shares),
                number(row["peak_mib"], 4),
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=list(MIXES), action="append")
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of 8 samples ({STEPS}; with --quick {QUICK_STEPS})")
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all steps; each mode's fastest is shown")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's own number by default")
    parser.add_argument("--text", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="half the steps, no peak memory")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine's description")
    parser.add_argument("--one", choices=("speed", "peak"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps is None:
        arguments.steps = QUICK_STEPS if arguments.quick else STEPS
    torch.set_num_threads(arguments.threads)
    mixes, modes = arguments.mix or list(MIXES), arguments.mode or list(MODES)
    what: dict[str, Any] = {"steps": arguments.steps, "text": arguments.text}
    if arguments.one == "speed":
        print(json.dumps(measure(mixes[0], modes, repeats=arguments.repeats, **what)))
        return
    if arguments.one == "peak":
        print(json.dumps(measure_peak(mixes[0], modes[0], **what)))
        return
    machine = describe_machine()
    threads, steps = arguments.threads, arguments.steps
    print(f"{machine['cpu']}, {threads} thread(s), {steps} steps of {BATCH} samples; seconds are the CPU's")
    if arguments.quick:
        print(f"--quick: no peak memory, and bucket sorts {steps * BATCH} samples instead of {STEPS * BATCH}")
    if note := remark(machine):
        print(note)
    rows: list[dict[str, Any]] = []
    for mix in mixes:
        rows += in_fresh_process(mix, modes, arguments)
        for row in rows[-len(modes) :] if not arguments.quick else []:
            row["peak_mib"] = in_fresh_process(mix, [row["mode"]], arguments, peak=True)
    print(report(rows))
    if arguments.json is not None:
        write_json(arguments.json, {"machine": machine, "quick": arguments.quick, "rows": rows})


if __name__ == "__main__":
    main()
