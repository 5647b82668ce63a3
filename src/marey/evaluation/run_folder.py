"""What a run folder holds, read back: the curve and the receipt."""

from __future__ import annotations

import csv
import json
import math
import shlex
from pathlib import Path
from typing import Any

from marey.core.errors import UserError
from marey.evaluation.wording import aligned

RUN_PARTS = {
    "metrics.csv": "the curve of a run, one row per logged step",
    "validation.csv": "the validation results of a run",
    "config.yaml": "the resolved configuration of a run",
    "exposure": "how much of each source a run has consumed, one table per checkpoint",
    "train.log": "what a run's training printed",
    "nonfinite.json": "what a run saw when its loss was no longer finite",
    "probe.json": "the probe results of a demonstration's run",
    "report.html": "the page of a demonstration's run",
    "run-report.html": "the page that `marey report` made of a run",
}
"""What else lies beside ``receipt.json``, by name."""


def read_metrics(path: Path) -> dict[str, list[float]]:
    """``metrics.csv`` by column, NaN where a cell is empty. UserError where there is no row to show."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the folder of a training run") from error
    if not rows:
        raise UserError(f"{path} holds no row: the run ended before its first step was logged")
    return {name: [_number(row.get(name)) for row in rows] for name in rows[0] if name is not None}


def _number(text: str | None) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        return math.nan


def read_receipt(path: Path) -> dict[str, Any]:
    """``receipt.json``, from the file or from the run folder that holds it. UserError when it is not one."""
    file = path / "receipt.json" if path.is_dir() else path
    try:
        receipt = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} holds no receipt.json; give the folder of a training run") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not a readable receipt ({error}); give the folder of a training run") from error
    if not isinstance(receipt, dict) or not ("config" in receipt or "recipe" in receipt):
        raise UserError(f"{file} is JSON and no receipt of a Marey run; give the folder of a training run")
    return receipt


def run_part_lines(path: Path) -> list[str]:
    """What a file or folder of a run is, and the command that describes the run; empty for anything else."""
    name = path.parent.name if path.parent.name == "exposure" else path.name
    run = path.parent.parent if path.parent.name == "exposure" else path.parent
    if name not in RUN_PARTS or not (run / "receipt.json").is_file():
        return []
    return [f"{path}: {RUN_PARTS[name]}", *aligned([("run", f"marey inspect {shlex.quote(str(run))}")])]
