"""Whether a run can be stopped anywhere: restore it at every step, and compare all that follows, bit for bit.

Meant for tests, of this program and of whoever adds an objective, a source or a sampler::

    from marey.config.compose import load_config
    from marey.training.verify import assert_resumes_exactly

    assert_resumes_exactly(load_config(["recipe=smoke", "trainer.max_steps=6"]), tmp_path)
"""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from torch import Tensor

from marey.config.runs import RunConfig
from marey.training.again import Again
from marey.training.fit import fit
from marey.training.metrics import TIME_COLUMNS

_TIMES = ("seconds", "wait")
"""Of an interval of metrics that is still open."""


class Verified(NamedTuple):
    """What was trained and compared."""

    steps: int
    """Optimizer steps of the run; it was restored after each but the last."""
    whole: Path
    """Run folder of the sitting that was never stopped; its checkpoints lie in ``checkpoints`` beside its records."""
    again: Path
    """The same of the run that was restored at every step."""


def assert_resumes_exactly(config: RunConfig, folder: Path, *, resumed: RunConfig | None = None) -> Verified:
    """Train ``config`` without stopping, then restore it after every optimizer step, and compare the whole tails.

    Sitting k goes on from the checkpoint of step k that sitting k-1 wrote, in its folder, as after a kill at the very
    end: what is restored has itself been restored k-1 times (save, load, save, load ...), and records of the abandoned
    future are there to be cut. After each sitting every later checkpoint (weights, optimizer state, schedule, weight
    average, buffers, loop counters, counts of what was consumed), every row of ``metrics.csv`` and ``validation.csv``
    (wall-clock columns aside) and every table under ``exposure/`` must be those of the first sitting, bit for bit.

    config: ends by ``trainer.max_steps`` or ``trainer.max_epochs``; keep it short, the steps trained grow with their
    square. Checkpoints are written at every step and kept, whatever ``checkpoint.*`` says. resumed: the configuration
    of the sittings after the first, where it differs in what an exact resume accepts (``loader.num_workers``); None:
    ``config``. folder: where ``whole/`` and ``again/`` are made. On CUDA, ``trainer.deterministic=true`` is needed.

    Raises:
        AssertionError: naming the step restored and everything that differs after it.
        UserError: ``config`` cannot be run.
    """
    whole, again = folder / "whole", folder / "again"
    steps = _train(config, whole, None)
    shutil.copytree(whole, again)
    for step in range(1, steps):
        _train(resumed or config, again, _checkpoint(again, step))
        found = list(differing(whole, again, after=step))
        assert not found, f"restored at step {step} of {steps}, this differs afterwards: {'; '.join(found[:20])}"
    return Verified(steps, whole, again)


def differing(one: Path, other: Path, *, after: int) -> Iterator[str]:
    """What differs between two runs of the same experiment: records as a whole, checkpoints from ``after`` on.

    Both run folders hold their checkpoints in ``checkpoints``, one for every optimizer step.
    """
    for name in ("metrics.csv", "validation.csv"):
        yield from tree_differences(_rows(one / name), _rows(other / name), name)
    yield from tree_differences(_tables(one / "exposure"), _tables(other / "exposure"), "exposure")
    names = {path.name for path in _checkpoints(one)}
    if names != {path.name for path in _checkpoints(other)}:
        yield "checkpoints: other files"
        return
    for path in _checkpoints(one)[after:]:
        mine, theirs = _experiment(path), _experiment(other / "checkpoints" / path.name)
        yield from tree_differences(mine, theirs, path.name)


def tree_differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Paths at which two trees of dictionaries, lists, plain values and tensors differ; tensors bit by bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        if not same:
            yield where
    elif isinstance(a, dict) and isinstance(b, dict):
        yield from (f"{where}.{key}: in one alone" for key in sorted(map(str, a.keys() ^ b.keys())))
        for key in a:
            if key in b:
                yield from tree_differences(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from tree_differences(x, y, f"{where}[{i}]")
    elif a != b and not (a != a and b != b):  # a value that is no number is itself here
        yield f"{where}: {a!r:.200} != {b!r:.200}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _train(config: RunConfig, folder: Path, checkpoint: Path | None) -> int:
    """One sitting to the end; returns its optimizer steps."""
    kept = {"every_n_train_steps": 1, "save_top_k": -1, "save_last": False, "filename": "{step}"}
    start = {"ckpt_path": None if checkpoint is None else str(checkpoint), "weights_only": checkpoint is None}
    every = config.model_copy(
        update={
            "checkpoint": config.checkpoint.model_copy(update=kept),
            "resume": config.resume.model_copy(update=start),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    newest = fit(
        every,
        run_dir=folder,
        checkpoint_dir=folder / "checkpoints",
        differences=[],
        command=["assert_resumes_exactly"],
        again=Again(program=["marey", "train"], overrides=[], folder=folder, run_dir=folder),
        say=lambda _line: None,
    )
    assert newest is not None, "checkpoints are off in this configuration"
    return int(newest.stem)


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"{step}.ckpt"


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("*.ckpt"), key=lambda path: int(path.stem))


def _experiment(path: Path) -> dict[str, Any]:
    """A checkpoint without what tells when, where and how fast it was written."""
    content = dict(torch.load(path, map_location="cpu", weights_only=True))
    about = content.pop("marey")
    resume = {key: value for key, value in about["resume"].items() if key not in ("trained_seconds", "saved")}
    resume["interval"] = {key: value for key, value in resume["interval"].items() if key not in _TIMES}
    kept = {key: value for key, value in about.items() if key not in ("config", "receipt", "resume")}
    # How many validation batches Lightning has counted: no start reads it.
    loop = {key: value for key, value in content["loops"]["fit_loop"].items() if "val_loop" not in key}
    content["loops"] = {**content["loops"], "fit_loop": loop}
    return {**content, "marey": {**kept, "resume": resume, "consumed": about["receipt"]["consumed"]}}


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: value for key, value in row.items() if key not in TIME_COLUMNS} for row in csv.DictReader(file)]


def _tables(folder: Path) -> dict[str, Any]:
    names = sorted(os.listdir(folder)) if folder.exists() else []  # noqa: PTH208  # by name alone
    return {name: pq.read_table(folder / name).to_pylist() for name in names}
