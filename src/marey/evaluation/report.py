"""``marey report``: a run folder as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from marey.core.errors import UserError
from marey.core.files import refuse_unwritable, write_text
from marey.evaluation import page as html
from marey.evaluation.curves import Numbers, read_columns
from marey.evaluation.report_charts import learning_section, machine_section
from marey.evaluation.report_parts import at_a_glance, exposure_section, lede, probe_section, title
from marey.evaluation.report_receipt import receipt_section, resume_marks, sittings_section
from marey.evaluation.run_state import newest_checkpoint, read_probes, tidy_receipt

NAME = "run-report.html"
"""In the run folder, where no other place is named."""
CLIPS = 64


def report(
    run: Path,
    *,
    out: Path | None = None,
    data: str | None = None,
    clips: int = CLIPS,
    seed: int = 0,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> Path:
    """Write the page of ``run`` and return its path (``out``, or ``run-report.html`` in the run folder).

    data: clips for the pictures, a store, videos or ``demo:SPLIT`` (of a causal run a manifest too); None takes what
    the run held out, else what it trained on. clips: how many are looked at. seed: which. What cannot be shown is
    said on the page.
    Raises UserError where ``run`` is no run folder, ``out`` cannot be written or is a file that Marey did not write,
    or ``data`` was named and cannot be used.
    """
    run = run.expanduser()
    receipt = tidy_receipt(run)
    folder = run if run.is_dir() else run.parent
    out = folder / NAME if out is None else out.expanduser()
    refuse_unwritable(out, option="--out")
    if out.exists() and not html.is_ours(_start(out)):
        raise UserError(f"--out {out} exists and is not a page of Marey's; name another file")
    missing: list[str] = []
    columns = _columns(folder / "metrics.csv", missing)
    validation = _columns(folder / "validation.csv", [])
    marks = resume_marks(receipt)
    pictured = _pictures(receipt, folder, missing, data=data, clips=clips, seed=seed, device=device)
    body = [
        at_a_glance(receipt, columns),
        "".join(map(html.note, missing)),
        "" if columns is None else learning_section(columns, validation, marks=marks),
        "" if columns is None else machine_section(columns, marks=marks),
        exposure_section(receipt),
        probe_section(*read_probes(folder)),
        pictured,
        sittings_section(receipt),
        receipt_section(receipt, folder),
    ]
    for note in missing:
        say(f"note: {note}")
    text = html.page(
        title=title(receipt, folder),
        lede=lede(receipt, folder, columns),
        body_html="\n".join(filter(None, body)),
        footer="Made by marey report. This page stands alone: it loads nothing and sends nothing.",
    )
    try:
        write_text(out, text)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror or error}); give another place") from error
    return out


def _columns(path: Path, missing: list[str]) -> dict[str, Numbers] | None:
    try:
        return read_columns(path)
    except UserError as error:
        missing.append(f"No curves: {error}.")
        return None


def _pictures(
    receipt: dict[str, object],
    folder: Path,
    missing: list[str],
    *,
    data: str | None,
    clips: int,
    seed: int,
    device: str,
) -> str:
    checkpoint = newest_checkpoint(receipt, folder)
    if checkpoint is None:
        if data is not None:
            raise UserError(f"{folder} has no checkpoint, so nothing can be shown of --data {data}; leave it out")
        missing.append("No pictures: the run has no checkpoint yet, or it is no longer where the receipt says.")
        return ""
    from marey.evaluation.report_pictures import pictures  # deferred: a run without a checkpoint needs no torch

    try:
        return pictures(receipt, checkpoint, data=data, clips=clips, seed=seed, device=device)
    except UserError as error:
        if data is not None:
            raise
        missing.append(f"No pictures: {error}.")
        return ""


def _start(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(2000)
    except OSError as error:
        raise UserError(f"--out {path} cannot be read ({error.strerror}); name another file") from error
