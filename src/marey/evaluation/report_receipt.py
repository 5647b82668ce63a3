"""The receipt's part of a run's page: what experiment it was, what it departs from, its stops and resumes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml

from marey.evaluation import page as html
from marey.evaluation.describing import data_words, experiment, model_words, program_words
from marey.evaluation.inspect_run import (
    checkpoints_words,
    code_words,
    differences_words,
    progress_words,
    receipt_batch,
    sources_words,
)
from marey.evaluation.report_parts import NOT_SHOWN, figure, whole
from marey.evaluation.run_state import moment, state_words
from marey.evaluation.wording import count, dig


def sittings_section(receipt: Mapping[str, Any]) -> str:
    """Each start of the run and how it ended; nothing for a run of one sitting that did not go on from another."""
    attempts: list[dict[str, Any]] = receipt["attempts"]
    resumed = receipt.get("resumed_from")
    if len(attempts) < 2 and not isinstance(resumed, dict):
        return ""
    rows = [
        [
            escape(str(item.get("number"))),
            escape(moment(item.get("started"))),
            f"{figure(whole(item.get('from_step')))} to {figure(whole(item.get('to_step'))) or '?'}",
            escape(str(item.get("how_it_ended") or item.get("status")).split(";")[0]),
        ]
        for item in attempts[-NOT_SHOWN:]
    ]
    words = ""
    if isinstance(resumed, dict):
        kind = (
            "exactly: the same draws, as if it had never stopped" if resumed.get("exact") else "with its weights alone"
        )
        words = f"This sitting went on from {resumed.get('path')}, step {resumed.get('step')}, {kind}."
    table = html.table(
        ["sitting", "started", "steps", "how it ended"], rows, caption=f"{count(len(attempts), 'sitting')}"
    )
    return html.section("Stops and resumes", intro=words, body_html=table if attempts else "")


def resume_marks(receipt: Mapping[str, Any]) -> list[float]:
    """Steps at which a later sitting went on."""
    starts = [whole(item.get("from_step")) for item in receipt["attempts"][1:]]
    return [float(step) for step in starts if step]


def receipt_section(receipt: Mapping[str, Any], folder: Path) -> str:
    """What experiment this was, in words; what it departs from; the configuration, folded."""
    content = dict(receipt)
    config, host = receipt["config"], receipt["host"]
    gpus = host.get("gpus")
    machine = ", ".join(
        filter(
            None,
            (
                str(host.get("name") or ""),
                ", ".join(map(str, gpus)) if isinstance(gpus, list) and gpus else str(host.get("cpu") or ""),
                f"{host['cpu_count']} cores" if whole(host.get("cpu_count")) else "",
                f"Python {host['python']}" if host.get("python") else "",
                f"torch {dig(host, 'packages', 'torch')}" if dig(host, "packages", "torch") else "",
            ),
        )
    )
    parameters = dig(content, "parameters", "total")
    facts = {
        "experiment": experiment(config),
        "how it ended": str(receipt.get("how_it_ended") or state_words(receipt, folder)),
        "progress": progress_words(content),
        "batch": receipt_batch(content),
        "model": model_words(config.get("model") or {})
        + (f"; {parameters:,} trainable parameters" if isinstance(parameters, int) else ""),
        "program": program_words(config),
        "data": sources_words(content) or data_words(config),
        "differs from the recipe in": differences_words(content),
        "weight average": str(dig(content, "ema", "rule") or ""),
        "code": code_words(content),
        "machine": machine,
        "checkpoints": checkpoints_words(content),
        "run": f"{receipt.get('run_id')}, started {moment(receipt.get('started'))}",
        "folder": str(folder),
        "resume with": str(receipt.get("resume_command") or ""),
        **{f"weights: {key}": str(words) for key, words in receipt["checkpoint_keys"].items()},
    }
    return html.section(
        "The receipt",
        intro="What experiment this was, from the run's own record.",
        body_html=html.facts({name: text for name, text in facts.items() if text})
        + _departures(receipt)
        + _folded_lists(receipt, config),
    )


def _departures(receipt: Mapping[str, Any]) -> str:
    found: list[dict[str, Any]] = receipt["differences_from_published_code"]
    if not found:
        return ""
    rows = [
        [
            *(escape(str(item.get(key) or "")) for key in ("what", "published", "here")),
            f"<code>{escape(str(item['restore']))}</code>" if item.get("restore") else "",
        ]
        for item in found[:NOT_SHOWN]
    ]
    head = ["what", "published code", "here", "override that restores it"]
    return html.folded(
        f"{count(len(found), 'difference')} from the published code, on purpose",
        body_html=html.table(head, rows, caption="Where this program departs from the published code"),
    )


def _folded_lists(receipt: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    parts = []
    differs: list[Any] = receipt["differences_from_recipe"]
    if differs:
        parts.append(
            html.folded(
                f"{count(len(differs), 'value')} set otherwise than in the recipe",
                body_html=html.listing("\n".join(map(str, differs))),
            )
        )
    command = receipt.get("command")
    if isinstance(command, list) and command:
        parts.append(html.folded("The command line", body_html=html.listing(" ".join(map(str, command)))))
    if config:
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).rstrip()
        parts.append(html.folded("The resolved configuration", body_html=html.listing(text)))
    return "".join(parts)
