"""A run folder or its receipt in plain words. No torch here: the answer comes from one JSON file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import yaml

from marey.core.errors import UserError
from marey.evaluation.describing import batch_words, data_words, experiment, program_words
from marey.evaluation.run_folder import read_receipt
from marey.evaluation.run_state import state_words
from marey.evaluation.wording import aligned, count, dig, short


def run_lines(path: Path, *, show_config: bool) -> list[str]:
    """What experiment the run was, how far it came, how it ended, and where its checkpoints are."""
    receipt = read_receipt(path)
    try:
        return _described(path, receipt, show_config=show_config)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise UserError(
            f"{path}: its receipt holds values that a training run does not write ({type(error).__name__}: {error}); "
            "it was changed or damaged, `marey inspect` on a checkpoint of the run says what that is"
        ) from error


def _described(path: Path, receipt: dict[str, Any], *, show_config: bool) -> list[str]:
    folder = path if path.is_dir() else path.parent
    config = receipt.get("config") or {}
    status = str(receipt.get("how_it_ended") or state_words(receipt, folder))
    rows = [
        ("experiment", experiment(config)),
        ("status", status),
        ("progress", progress_words(receipt)),
        ("batch", receipt_batch(receipt)),
        ("program", program_words(config)),
        ("data", sources_words(receipt) or data_words(config)),
        ("last row", _last_row(folder / "metrics.csv")),
        ("differs", differences_words(receipt)),
        ("average", str(dig(receipt, "ema", "rule") or "")),
        ("code", code_words(receipt)),
        ("checkpoints", checkpoints_words(receipt)),
        ("sittings", sittings_words(receipt)),
        ("resume", str(receipt.get("resume_command") or "")),
        *[(key, str(words)) for key, words in (receipt.get("checkpoint_keys") or {}).items()],
    ]
    lines = [f"{path}: a Marey run, {receipt.get('run_id')}, started {receipt.get('started')}", *aligned(rows)]
    if show_config:
        lines += ["", yaml.safe_dump(config, sort_keys=False, allow_unicode=True).rstrip()]
    else:
        lines.append("--config prints the resolved configuration")
    return lines


def receipt_batch(receipt: dict[str, Any]) -> str:
    """The three batch numbers and the world size, beside the recipe's."""
    batch = receipt.get("batch") or {}
    causal = receipt.get("kind") == "causal"
    return batch_words(
        unit="samples" if causal else "clips",
        effective=batch.get("effective_batch"),
        statistic=None if causal else batch.get("statistic_batch"),
        norm_group=batch.get("norm_group"),
        world=batch.get("world_size"),
        reference=batch.get("recipe") or {},
    )


def progress_words(receipt: dict[str, Any]) -> str:
    """Optimizer steps done of those planned, and clips seen."""
    consumed, total = receipt.get("consumed") or {}, dig(receipt, "steps", "total_steps")
    steps, clips = consumed.get("optimizer_steps"), consumed.get("clips")
    seen = sum(clips) if isinstance(clips, list) else clips
    parts = []
    if isinstance(steps, int):
        parts.append(f"{steps:,}" + (f" of {total:,}" if isinstance(total, int) else "") + " optimizer steps")
    if isinstance(seen, int):
        parts.append(f"{count(seen, 'sample' if receipt.get('kind') == 'causal' else 'clip')} seen")
    return ", ".join(parts)


def sources_words(receipt: dict[str, Any]) -> str:
    """Each training source with what it holds."""
    sources = dig(receipt, "data", "train") or dig(receipt, "data", "sources") or []
    if not isinstance(sources, list):
        return ""
    return "; ".join(
        f"{source.get('name')} ({source.get('path') or source.get('manifest')}): "
        + ", ".join(f"{source[key]:,} {words}" for key, words in _COUNTED if source.get(key))
        for source in sources
        if isinstance(source, dict)
    )


_COUNTED = (
    ("episodes", "episodes"),
    ("clips", "clips"),
    ("windows", "windows"),
    ("clips_per_epoch", "clips an epoch"),
    ("dropped_short", "episodes too short and left out"),
)


def differences_words(receipt: dict[str, Any]) -> str:
    """What was set otherwise than in the recipe."""
    found = receipt.get("differences_from_recipe") or []
    if not found:
        return "nothing from the recipe"
    return "; ".join(map(str, found[:5])) + (f"; and {len(found) - 5} more" if found[5:] else "")


def code_words(receipt: dict[str, Any]) -> str:
    """Version, commit, seed and precision."""
    code = receipt.get("code") or {}
    commit = f", commit {str(code['commit'])[:12]}" if code.get("commit") else ""
    changed = " with changes" if code.get("modified") else ""
    return (
        f"Marey {code.get('version')}{commit}{changed}, seed {receipt.get('seed')}, "
        f"precision {receipt.get('precision')}"
    )


def checkpoints_words(receipt: dict[str, Any]) -> str:
    """How many, where, the newest."""
    found = receipt.get("checkpoints") or []
    folder = receipt.get("checkpoint_dir")
    if not found:
        return f"none yet, to go to {folder}"
    newest = found[-1]
    name = newest.get("path") if isinstance(newest, dict) else newest
    return f"{len(found)} in {folder}, the newest {Path(str(name)).name}"


def sittings_words(receipt: dict[str, Any]) -> str:
    """How often the run was started, and how the sittings before this one ended; nothing for the only one."""
    attempts = receipt.get("attempts") or []
    if len(attempts) < 2:
        return ""
    ends = [f"{attempt.get('status')} at step {attempt.get('to_step')}" for attempt in attempts[:-1]]
    more = f"{len(ends) - 4} more; " if ends[4:] else ""
    return f"{len(attempts)}; before this one: {more}{'; '.join(ends[-4:])}"


_SHOWN = ("step", "train/loss", "train/invariance", "train/sigreg", "train/embedding_rank", "padding_share")


def _last_row(metrics: Path) -> str:
    try:
        with metrics.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError:
        return ""
    except (csv.Error, ValueError):  # a table no more, or no text
        return f"{metrics.name} is damaged"
    if not rows:
        return ""
    parts = []
    for name in _SHOWN:
        try:
            parts.append(f"{name.removeprefix('train/')} {short(float(f'{float(rows[-1][name] or 0):.4g}'))}")
        except (KeyError, ValueError, TypeError):
            continue
    return ", ".join(parts)
