"""Published findings of the method in miniature: token drop, its shape, and the attention mode, over seeds.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/findings.py --seeds 5 --jobs 2 --out findings

Four encoders a seed (ViT-nano on the demo's digits: 8 frames of 64 x 64, four local views), each trained on the same
number of encoder tokens, so that one that drops more takes more steps: random drop of .5 and .875, tubes of
.875 (the same number of tokens as random .875), and full attention at random .875. Then the digit and the motion
of 500 held-out clips are read from the frozen features (what `marey probe --weights online --no-attentive` does,
1,500 labelled clips to learn from). What was published (frozen attentive probe, ImageNet, the
authors' numbers): random drop 0/.3/.6/.9/.95 gives 33.9/39.6/44.8/47.4/47.6; tube instead of random 39.6 against
50.7; block-causal 51.2 against full 50.7.

An arm is held against another seed by seed; intervals are Student's 95% over the seeds. "Not worse" is called
reproduced where the whole interval of the difference lies above minus MARGIN points, "worse" where all of it lies
below 0; where an interval decides neither way the finding is undecided. Runs already in --out are not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import t as student

from machine import describe_machine, remark
from marey.core.files import write_json
from marey.pixels.digits import demo_clips

MARGIN = 3.0
"""Percentage points that "not worse" allows."""
TASKS = ("digit", "motion")
READERS = ("linear", "knn")
TRAINING = (
    *("recipe=demo", "frame_stride=4", "model.num_frames=8", "loader.num_workers=0", "trainer.logger=false"),
    *("trainer.enable_progress_bar=false", "checkpoint.every_n_train_steps=1000000", "trainer.log_every_n_steps=20"),
)


class Arm(NamedTuple):
    """One setting: what it changes, and its optimizer steps at one unit of the budget."""

    steps: int
    overrides: tuple[str, ...]


def _random(rate: float) -> tuple[str, ...]:
    return (f"model.token_drop_rate={rate}",)


ARMS = {
    "random .5": Arm(1, _random(0.5)),
    "random .875": Arm(4, _random(0.875)),
    "tube .875": Arm(4, (*_random(0.875), "model.token_drop_mode=tube")),
    "full .875": Arm(4, (*_random(0.875), "model.attn_mode=full")),
}


class Finding(NamedTuple):
    """``arm`` held against ``other``; ``worse``: it was published to be worse, else not to be."""

    says: str
    arm: str
    other: str
    worse: bool


FINDINGS = (
    Finding("more random drop at equal tokens is not worse", "random .875", "random .5", False),
    Finding("tube drop is worse than random drop", "tube .875", "random .875", True),
    Finding("block-causal attention is not worse than full", "random .875", "full .875", False),
)


def run(words: Sequence[str], *, log: Path, threads: int) -> float:
    """Seconds that a command took; SystemExit with the end of ``log`` where it fails."""
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("w") as file:
        file.write(shlex.join(words) + "\n")
        file.flush()
        done = subprocess.run(words, stdout=file, stderr=file, env=environment)
    if done.returncode:
        raise SystemExit(f"{log}: exit {done.returncode}\n" + "\n".join(log.read_text().splitlines()[-5:]))
    return time.perf_counter() - start


def _kept(path: Path, settings: list[str]) -> dict[str, Any] | None:
    """What an earlier call wrote, if it was of these settings."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("settings") == settings else None


def one(folder: Path, name: str, seed: int, *, unit: int, threads: int) -> dict[str, Any]:
    """Train and probe one arm with one seed, or read what an earlier call found."""
    arm = ARMS[name]
    steps = unit * arm.steps
    # The recipe warms up for a sixth of its run and decays to the end of it, whatever its length.
    settings = [*TRAINING, *arm.overrides, f"seed={seed}", f"trainer.max_steps={steps}"]
    settings.append(f"scheduler.peak_step={max(1, steps // 6)}")
    found = _kept(folder / "result.json", settings)
    if found is not None:
        return found
    found = _kept(folder / "trained.json", settings)
    if found is None:
        shutil.rmtree(folder, ignore_errors=True)  # a run that did not end
        folder.mkdir(parents=True)
        there = [f"hydra.run.dir={folder}", f"checkpoint.dirpath={folder / 'checkpoints'}"]
        words = [sys.executable, "-m", "marey", "train", *settings, *there]
        seconds = run(words, log=folder / "train.log", threads=threads)
        found = {"arm": name, "seed": seed, "settings": settings, "steps": steps, "train_seconds": seconds}
        write_json(folder / "trained.json", found)
    baseline = ["--baseline"] if name == next(iter(ARMS)) else []  # the same for all arms of a seed
    words = [sys.executable, str(Path(__file__).resolve()), "--read", str(folder), *baseline]
    run(words, log=folder / "read.log", threads=threads)
    found.update(json.loads((folder / "read.json").read_text()))
    write_json(folder / "result.json", found)
    shown = "; ".join(f"{task} {scores(found, task)}" for task in TASKS)
    print(f"{folder.name}: {found['train_seconds']:.0f} s; {shown}", flush=True)
    return found


def read(folder: Path, *, baseline: bool) -> None:
    """Probe the run of ``folder`` for every task, features computed once; ``baseline``: random weights beside it.

    What `marey probe --weights online --no-attentive` computes, without its raw pixels.
    """
    import torch

    from marey.evaluation.features import evaluation_clips, open_clips
    from marey.evaluation.featurizers import Featurizer, FrozenEncoder
    from marey.evaluation.frozen import frozen_features
    from marey.evaluation.labels import labels_from_csv
    from marey.evaluation.loading import load_encoder, random_twin
    from marey.evaluation.measure import measure
    from marey.evaluation.probe import PRETRAINED, RANDOM, side_of

    device = torch.device("cpu")
    loaded = load_encoder(folder / "checkpoints" / "last.ckpt", weights="online", device=device)
    featurizers: dict[str, Featurizer] = {PRETRAINED: FrozenEncoder.of(loaded.encoder, loaded.model)}
    if baseline:
        featurizers[RANDOM] = FrozenEncoder.of(random_twin(loaded, device=device), loaded.model)
    labels = folder.parent / "labels.csv"
    sides: dict[str, list[Any]] = {task: [] for task in TASKS}
    for split in ("demo:train", "demo:heldout"):
        source = open_clips(split, loaded.preprocessing)
        clips = evaluation_clips(source, loaded.preprocessing, clips_per_episode=1)
        features = frozen_features(featurizers, loaded.preprocessing, clips, tokens=False, cache=None)
        for task in TASKS:
            found = labels_from_csv(source.files, labels, task, where=split)
            sides[task].append(side_of(features, source, found))
    write_json(
        folder / "read.json",
        {task: measure(*pair, label=task, seed=0).as_dict() for task, pair in sides.items()},
    )


def scores(found: Mapping[str, Any], task: str, *, encoder: str = "pretrained") -> dict[str, float]:
    """Percent of held-out videos read right, by reader."""
    numbers = found[task]["encoders"][encoder]
    return {reader: 100 * numbers[reader]["right"] / numbers[reader]["videos"] for reader in READERS}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of Student's 95% interval; NaN for one value."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(half)


def verdict(mean: float, half: float, *, worse: bool) -> str:
    """``reproduced``, ``contradicted`` or ``undecided`` of a difference, arm minus other, in points."""
    if math.isnan(half):
        return "undecided"
    low, high = mean - half, mean + half
    if worse:
        return "reproduced" if high < 0 else "contradicted" if low > 0 else "undecided"
    return "reproduced" if low > -MARGIN else "contradicted" if high < 0 else "undecided"


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of arms, and findings, over the seeds that are there."""
    by_arm = {name: {r["seed"]: r for r in runs if r["arm"] == name} for name in ARMS}
    columns = [(task, reader) for task in TASKS for reader in READERS]
    arms: dict[str, Any] = {}
    for name, found in by_arm.items():
        if found:
            arms[name] = {f"{task} {r}": interval([scores(f, task)[r] for f in found.values()]) for task, r in columns}
    untrained = next(iter(by_arm.values()))
    if untrained:
        arms["random weights"] = {
            f"{task} {r}": interval([scores(f, task, encoder="random weights")[r] for f in untrained.values()])
            for task, r in columns
        }
    findings = []
    for finding in FINDINGS:
        a, b = by_arm[finding.arm], by_arm[finding.other]
        seeds = sorted(a.keys() & b.keys())
        for task, r in columns if seeds else []:
            pairs = [scores(a[seed], task)[r] - scores(b[seed], task)[r] for seed in seeds]
            mean, half = interval(pairs)
            said = verdict(mean, half, worse=finding.worse)
            findings.append({**finding._asdict(), "read": f"{task} {r}", "seeds": seeds, "points": [mean, half]})
            findings[-1]["verdict"] = said
    return {"arms": arms, "findings": findings}


def table(summary: Mapping[str, Any]) -> str:
    """Two Markdown tables."""
    reads = [f"{task} {reader}" for task in TASKS for reader in READERS]
    lines = ["| accuracy, % | " + " | ".join(reads) + " |", "|---|" + "---|" * len(reads)]
    for name, row in summary["arms"].items():
        lines.append(f"| {name} | " + " | ".join(f"{row[r][0]:.1f} ± {row[r][1]:.1f}" for r in reads) + " |")
    lines += ["", "| published | held against | read | points | here |", "|---|---|---|---|---|"]
    for f in summary["findings"]:
        mean, half = f["points"]
        held = f"{f['arm']} minus {f['other']}"
        lines.append(f"| {f['says']} | {held} | {f['read']} | {mean:+.1f} ± {half:.1f} | {f['verdict']} |")
    return "\n".join(lines)


def write_labels(path: Path) -> None:
    """One table of the digit and the motion of every clip: the demo's own labels only some."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", *TASKS])
        for split in ("train", "heldout"):
            listing = demo_clips(split).with_suffix(".csv")
            with listing.open(encoding="utf-8", newline="") as source:
                table.writerows(
                    [listing.parent / row["path"], *(row[task] for task in TASKS)] for row in csv.DictReader(source)
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ... (default 5)")
    parser.add_argument("--unit", type=int, default=64, help="optimizer steps at random .5 (default 64)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each run (default 1)")
    parser.add_argument("--out", type=Path, default=Path("findings"), help="folder of the runs (default findings)")
    parser.add_argument("--quick", action="store_true", help="one seed of 2 steps: whether it runs, no finding")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)  # one probe, in a process of its own
    parser.add_argument("--baseline", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the summary there")
    arguments = parser.parse_args()
    if arguments.read is not None:
        read(arguments.read, baseline=arguments.baseline)
        return
    if arguments.quick:
        arguments.seeds, arguments.unit = 1, 2
    if min(arguments.seeds, arguments.unit, arguments.jobs, arguments.threads) < 1:
        parser.error("--seeds, --unit, --jobs and --threads must be at least 1")
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    if note := remark(machine):
        print(f"note: {note}")
    write_labels(out / "labels.csv")
    jobs = [(name, seed) for seed in range(arguments.seeds) for name in arguments.arms]

    def work(job: tuple[str, int]) -> dict[str, Any]:
        name, seed = job
        folder = out / f"{name.replace(' ', '-')}-seed{seed}"
        return one(folder, name, seed, unit=arguments.unit, threads=arguments.threads)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = list(pool.map(work, jobs))
    summary = summarise(runs)
    print(table(summary))
    whole = {"benchmark": "findings", "unit": arguments.unit, "margin": MARGIN, **summary, "machine": machine}
    write_json(out / "findings.json", {**whole, "runs": runs})
    if arguments.json is not None:
        write_json(arguments.json, whole)


if __name__ == "__main__":
    main()
