"""Parts of a run's page that need no torch: what it was, how far it came, its data, its probes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from marey.core.progress import duration
from marey.evaluation import page as html
from marey.evaluation.curves import Numbers, first_finite, last_finite
from marey.evaluation.run_state import score_of, scores, state, state_words
from marey.evaluation.wording import count, dig

Columns = Mapping[str, Numbers]
_KINDS = {"knn": "nearest neighbours", "linear": "linear layer", "attentive": "attentive probe"}
NOT_SHOWN = 40
"""Sources, sittings or differences beyond this many are counted and not listed."""


def title(receipt: Mapping[str, Any], folder: Path) -> str:
    """Experiment and data by their names, and how far it came."""
    name = str(dig(receipt, "recipe", "name") or dig(receipt, "config", "recipe", "name") or "A run")
    data = dig(receipt, "data", "name") or dig(receipt, "config", "data", "name")
    on = f" on {data}" if data and data != name else ""
    done, total = whole(receipt["consumed"].get("optimizer_steps")), whole(receipt["steps"].get("total_steps"))
    steps = (
        "no step" if not done else f"{done:,} of {total:,} steps" if total and total != done else count(done, "step")
    )
    now = state(receipt, folder)
    words = {"running": f"running, {steps} so far", "unknown": f"{steps} when last heard of"}
    return f"{name}{on}: {words.get(now, f'{now} after {steps}')}"


def lede(receipt: Mapping[str, Any], folder: Path, columns: Columns | None) -> str:
    """What was trained on what for how long, and how it ended."""
    causal = receipt.get("kind") == "causal"
    consumed = receipt["consumed"]
    clips = whole(consumed.get("clips"))
    model = str(dig(receipt, "config", "model", "name") or "")
    what = "A causal predictor of latent video" if causal else f"A video encoder{f' ({model})' if model else ''}"
    found = consumed.get("per_source")
    names = [str(item.get("name")) for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    sources = f" of {', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}" if names else ""
    seen = f", trained on {count(clips, 'sample' if causal else 'clip')}{sources}" if clips else ""
    seconds = last_finite(columns["wall_seconds"]) if columns and "wall_seconds" in columns else math.nan
    took = f" in {duration(seconds)}" if math.isfinite(seconds) and seen else ""
    ended = "" if state(receipt, folder) == "finished" else f" {state_words(receipt, folder)}."
    return f"{what}{seen}{took}.{ended}"


def at_a_glance(receipt: Mapping[str, Any], columns: Columns | None) -> str:
    """Six figures."""
    consumed, steps = receipt["consumed"], receipt["steps"]
    done, total = whole(consumed.get("optimizer_steps")), whole(steps.get("total_steps"))
    unit = "samples" if receipt.get("kind") == "causal" else "clips"
    epochs = consumed.get("epochs")
    items = [
        ("optimizer steps", f"{done:,}" if done is not None else "none yet", f"of {total:,} planned" if total else ""),
        (
            f"{unit} seen",
            figure(whole(consumed.get("clips"))),
            f"{epochs:.3g} epochs" if isinstance(epochs, int | float) else "",
        ),
    ]
    if columns:
        items += _measured(receipt, columns)
    return html.tiles([item for item in items if item[1]])


def _measured(receipt: Mapping[str, Any], columns: Columns) -> list[tuple[str, str, str]]:
    items = []
    if "train/loss" in columns:
        first, last = first_finite(columns["train/loss"]), last_finite(columns["train/loss"])
        items.append(("loss", f"{last:.4g}", f"from {first:.4g}"))
    if "train/embedding_rank" in columns:
        width = whole(dig(receipt, "config", "projector", "output_dim"))
        rank = last_finite(columns["train/embedding_rank"])
        items.append(("effective rank", f"{rank:.3g}", f"of {width:,} dimensions" if width else ""))
    elif "padding_share" in columns:
        shares = columns["padding_share"]
        shares = shares[shares == shares]
        if len(shares):
            items.append(("padding", f"{float(shares.mean()):.1%}", "of what the heavy layers saw, mean of the rows"))
    rate = next((name for name in ("clips_per_second", "samples_per_second") if name in columns), None)
    if rate is not None:
        lately = columns[rate][-20:]
        lately = lately[lately == lately]
        if len(lately):
            items.append((rate.split("_")[0] + " per second", f"{float(lately.mean()):,.4g}", "mean of the last rows"))
    if "wall_seconds" in columns:
        seconds = last_finite(columns["wall_seconds"])
        waited = columns.get("data_wait_seconds")
        share = float(waited[waited == waited].sum()) / seconds if waited is not None and seconds > 0 else math.nan
        if math.isfinite(seconds):
            words = f"{min(1.0, share):.0%} waiting for data" if math.isfinite(share) else ""
            items.append(("trained for", duration(seconds), words))
    return [item for item in items if "nan" not in item[1]]


def exposure_section(receipt: Mapping[str, Any]) -> str:
    """What each source gave, of what was asked."""
    found = receipt["consumed"].get("per_source")
    sources = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    if not sources:
        return ""
    unit = "samples" if receipt.get("kind") == "causal" else "clips"
    total = sum(whole(item.get("clips")) or 0 for item in sources)
    asked = any(isinstance(item.get("asked_share"), int | float) for item in sources)
    replaced = any(whole(item.get("replaced")) for item in sources)
    head = ["source", f"{unit} seen", "share", *(["share asked for"] if asked else []), "frames", "tokens"]
    rows = []
    for item in sources[:NOT_SHOWN]:
        clips = whole(item.get("clips")) or 0
        share = clips / total if total else 0.0
        cells = [escape(str(item.get("name"))), f"{clips:,}", html.share_cell(share, words=f"{share:.1%}")]
        if asked:
            wanted = item.get("asked_share")
            cells.append(f"{wanted:.1%}" if isinstance(wanted, int | float) else "")
        cells += [figure(whole(item.get(key))) for key in ("frames", "tokens")]
        rows.append([*cells, figure(whole(item.get("replaced")))] if replaced else cells)
    return html.section(
        "What it saw",
        intro=f"Measured at the newest checkpoint: {unit} that reached the optimizer, by source.",
        body_html=html.table(
            [*head, "replaced"] if replaced else head,
            rows,
            caption=f"Exposure of {count(len(sources), 'source')}"
            + (f", the first {NOT_SHOWN}" if sources[NOT_SHOWN:] else ""),
        ),
    )


def probe_section(probes: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
    """Frozen probes whose JSON lies in the run folder."""
    if not probes and not notes:
        return ""
    tables = []
    for probe in probes:
        by_encoder = {str(name): scores(value) for name, value in probe["encoders"].items()}
        kinds = list(dict.fromkeys(kind for found in by_encoder.values() for kind in found))
        chance = score_of(probe.get("chance"))
        rows = [
            [escape(name), *(_accuracy(found.get(kind), "series-1" if not i else "series-2") for kind in kinds)]
            for i, (name, found) in enumerate(by_encoder.items())
        ]
        if chance is not None:
            rows.append(["always the commonest class", *[_accuracy(chance, "series-3")] * len(kinds)])
        classes = probe.get("classes")
        held = whole(probe.get("test_videos"))
        tables.append(
            html.table(
                ["encoder", *(_KINDS.get(kind, kind) for kind in kinds)],
                rows,
                caption=f"{str(probe['label']).capitalize()}"
                + (f": {len(classes):,} classes" if isinstance(classes, list) else "")
                + (f", accuracy on {held:,} held-out videos" if held else ""),
            )
        )
    return html.section(
        "What its features are worth",
        intro="The encoder is frozen; a probe learns from its features of labelled videos and is asked about others, "
        "split by source video. Small figures are 95% intervals."
        if probes
        else "",
        body_html="".join(tables) + "".join(map(html.note, notes)),
    )


def _accuracy(score: tuple[float, float, float] | None, colour: str) -> str:
    return "" if score is None else html.accuracy_cell(*score, colour=colour)


def whole(value: Any) -> int | None:
    """A whole number, or the sum of a list of them; None for anything else."""
    if isinstance(value, list) and all(isinstance(part, int) for part in value):
        return sum(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def figure(value: int | None) -> str:
    """With thousands separated; empty for None."""
    return "" if value is None else f"{value:,}"
