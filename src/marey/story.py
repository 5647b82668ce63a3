"""``marey demo``: clips, pretraining, probes before and after, a predicted future, one page.

A caller of the rooms, as cli is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marey.core.commands import override
from marey.core.errors import UserError
from marey.core.files import write_json, write_text
from marey.core.stopping import sigterm_is_ctrl_c

if TYPE_CHECKING:
    from marey.evaluation.demo_future import Latents
    from marey.evaluation.demo_results import LabelTable
    from marey.evaluation.future_page import Future

Say = Callable[[str], None]
SHORT_EDGE = 128
"""Pixels stored of a person's own videos: twice the demo encoder's view, so that crops still have detail."""
OWN_STRIDE = 2
"""Stored frames between two frames of a clip of a person's own videos: 8 frames then span about a second."""
BATCHES_PER_EPOCH = 8
SHOWN_CLIPS = 8
PREDICTOR_STEPS = 1500
"""Optimizer steps of the second act: about a minute on two cores."""
PREDICTOR_BATCH = 4
PREDICTOR = (
    "data.batching.mode=packed",
    f"data.train_batch_size={PREDICTOR_BATCH}",
    "data.buckets=[[2,3],[2,4],[3,5]]",
    "data.window_stride=1",
    "model.patch=1",
    "model.hidden=128",
    "model.heads=2",
    "model.layers=3",
    "optimizer.lr=3e-3",
    "scheduler.peak_step=20",
    "scheduler.end_lr=3e-5",
    "trainer.limit_val_batches=0",
    "loader.num_workers=0",
)
"""What makes the causal run small enough for the second act."""


@dataclass(frozen=True)
class DemoData:
    """What a demonstration trains on and is tested on."""

    train: str
    """A store."""
    held_out: str | None
    labels: list[LabelTable]
    overrides: list[str]
    """What chooses this data on the command line of ``marey train``."""


def demo(
    *,
    out: Path,
    videos: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    say: Say = print,
) -> Path:
    """Run the whole story into ``out`` and return the page's path, ``out/report.html``.

    Every call makes its own ``run-NNN`` folder in ``out`` and replaces the page that an earlier call left; nothing
    else in ``out`` is touched. steps: optimizer steps, None for the recipe's. videos: a person's own files.
    Raises UserError where ``out`` cannot be used, ``videos`` hold nothing that decodes, or training refuses.
    """
    # Loader, trainer and probes share the cores: threads that spin while they wait take them from each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    out = out.expanduser().absolute()
    report = claim_report(out)
    data = _own_videos(videos.expanduser(), out, say=say) if videos is not None else _digits()
    run = new_run_folder(out)
    checkpoint = run / "checkpoints" / "last.ckpt"
    words = train_words(data.overrides, run=run, steps=steps, seed=seed)
    say("pretraining:  marey " + shlex.join(words))
    stream([sys.executable, "-P", "-m", "marey", *words], log=run / "train.log", say=say)
    if not checkpoint.exists():
        raise UserError(f"training ended without writing {checkpoint}; {run / 'train.log'} has what it said")

    future, remarks = _second_act(data, run, steps=steps, seed=seed, say=say)

    from marey.evaluation.demo_results import evaluate, page, summary  # deferred: training has its own process

    say("probing:      the trained encoder beside the same one with random weights")
    results = evaluate(
        run=run,
        checkpoint=checkpoint,
        train=data.train,
        held_out=data.held_out,
        labels=data.labels,
        commands=next_commands(run=run, checkpoint=checkpoint, data=data),
        shown=SHOWN_CLIPS,
        seed=seed,
        say=say,
        future=future,
        notes=remarks,
    )
    write_json(run / "probe.json", [result.as_dict() for result in results.probes])
    text = page(results)
    write_text(run / "report.html", text)
    write_text(report, text)
    for line in summary(results, report=report, run=run, checkpoint=checkpoint):
        say(line)
    return report


def _second_act(
    data: DemoData, run: Path, *, steps: int | None, seed: int, say: Say
) -> tuple[Future | None, list[str]]:
    """Train a small causal predictor on the clips' latents and roll it out; None, and why, where that cannot be."""
    from marey.evaluation.demo_future import futures, left_out, small_latents

    folder = run / "future"
    checkpoint = folder / "checkpoints" / "last.ckpt"
    try:
        latents = small_latents(data.train, data.held_out, folder / "latents", say=say)
        words = predict_words(latents, run=folder, steps=steps, seed=seed)
        say("predicting:   marey " + shlex.join(words))
        stream([sys.executable, "-P", "-m", "marey", *words], log=folder / "train.log", say=say)
        return futures(folder, checkpoint, latents, seed=seed), []
    except UserError as error:  # the first act is worth its page all the same; the page says what is missing
        say(f"note: {left_out(error)}")
        return None, [left_out(error)]


def predict_words(latents: Latents, *, run: Path, steps: int | None, seed: int) -> list[str]:
    """``train`` and its overrides for the second act, all of its files in ``run``."""
    wanted = PREDICTOR_STEPS if steps is None else min(steps, PREDICTOR_STEPS)
    return [
        "train",
        "--config-name",
        "causal_video",
        *(override(key, value) if key != "data.val_fraction" else f"{key}={value}" for key, value in latents.overrides),
        *PREDICTOR,
        f"seed={seed}",
        f"trainer.max_steps={wanted}",
        f"data.epoch_draws={wanted * PREDICTOR_BATCH}",
        override("hydra.run.dir", str(run)),
        override("checkpoint.dirpath", str(run / "checkpoints")),
    ]


def claim_report(out: Path) -> Path:
    """``out/report.html``, with ``out`` made. UserError where ``out`` or the page is not ours to write."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made ({error.strerror}); name a folder you can write to") from error
    if not os.access(out, os.W_OK):
        raise UserError(f"--out {out} cannot be written to; name another folder")
    report = out / "report.html"
    if report.exists():
        from marey.evaluation.page import is_ours

        if not report.is_file() or not is_ours(report.read_text(encoding="utf-8", errors="replace")):
            raise UserError(f"{report} exists and is not a page of `marey demo`; name another folder with --out")
    return report


def new_run_folder(out: Path) -> Path:
    """Make and return the first free ``out/run-NNN``; two calls at once get two."""
    number = 1
    while True:
        run = out / f"run-{number:03d}"
        try:
            run.mkdir()
        except FileExistsError:
            number += 1
        else:
            return run


def _digits() -> DemoData:
    from marey.evaluation.demo_results import LabelTable
    from marey.pixels.digits import demo_clips, demo_source

    train, held_out = (demo_clips(split).parent / f"{split}.csv" for split in ("train", "heldout"))
    return DemoData(
        train=str(demo_source("train")),
        held_out=str(demo_source("heldout")),
        labels=[LabelTable("digit", "label", train, held_out), LabelTable("motion", "motion", train, held_out)],
        overrides=["data=demo"],
    )


def _own_videos(videos: Path, out: Path, *, say: Say) -> DemoData:
    from marey.config.compose import load_config
    from marey.pixels.ingest import ingest
    from marey.pixels.store import FrameStore

    store = out / f"videos-{_fingerprint(videos)}.lance"
    say(f"ingesting:    marey ingest {shlex.quote(str(videos))} {shlex.quote(str(store))} --short-edge {SHORT_EDGE}")
    report = ingest([str(videos)], store, short_edge=SHORT_EDGE)
    for refused in report.refused[:5]:
        say(f"  refused     {refused['path']}: {refused['reason']}")
    if report.refused[5:]:
        say(f"  refused     {len(report.refused) - 5} more, all named in {store.with_suffix('.report.json')}")
    say(f"  store       {report.used} of {report.sources} videos, {report.frames:,} frames")
    batch = load_config(["recipe=demo"]).loader.batch_size
    episodes = len(FrameStore.open(store).lengths)
    return DemoData(
        train=str(store),
        held_out=None,
        labels=[],
        overrides=[
            "data=custom",
            override("data.train", str(store)),
            override("data.name", videos.name or "videos"),
            "data.pad_short=repeat",
            f"frame_stride={OWN_STRIDE}",
            f"loader.clips_per_video={math.ceil(BATCHES_PER_EPOCH * batch / episodes)}",
        ],
    )


def _fingerprint(videos: Path) -> str:
    """A short name for the videos that are there now, so that changed files make a new store beside the old one."""
    from marey.pixels.media import Unreadable
    from marey.pixels.sources import discover

    digest = hashlib.sha256(f"{SHORT_EDGE}".encode())
    for video in discover([str(videos)], labels="auto").files:
        try:
            identity = video.fault or video.frames().identity()
        except Unreadable:  # a dangling link, or gone since: ingest will say
            continue
        digest.update(json.dumps([video.path, identity]).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:10]


def train_words(data: Sequence[str], *, run: Path, steps: int | None, seed: int) -> list[str]:
    """``train`` and its overrides: the demo recipe on this data, all of its files in ``run``."""
    return [
        "train",
        "recipe=demo",
        *data,
        f"seed={seed}",
        *([f"trainer.max_steps={steps}"] if steps is not None else []),
        override("hydra.run.dir", str(run)),
        override("checkpoint.dirpath", str(run / "checkpoints")),
    ]


def stream(command: Sequence[str], *, log: Path, say: Say) -> None:
    """Run ``command``, passing its lines on and into ``log``. A request to stop is passed on too, and waited for.

    Raises UserError with the program's own last line when it refused (exit code 2), RuntimeError when it broke.
    """
    # Its own session: a terminal's Ctrl-C reaches this process alone, which passes exactly one on.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    assert process.stdout is not None
    last = ""
    with process.stdout, log.open("w", encoding="utf-8") as file, sigterm_is_ctrl_c():
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                last = line.strip() or last
                say(f"  {line.rstrip()}")
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            say("stopping: training is saving what it has")
            for line in process.stdout:
                file.write(line)
                say(f"  {line.rstrip()}")
            process.wait()
            raise
    if code == 2:
        raise UserError(last.removeprefix("marey: ") or f"training refused to start; see {log}")
    if code != 0:
        raise RuntimeError(f"training ended with exit code {code}; its lines are in {log}")


def next_commands(*, run: Path, checkpoint: Path, data: DemoData) -> list[tuple[str, str]]:
    """What one would type next: a remark and a command."""
    quoted = shlex.quote(str(checkpoint))
    source = shlex.quote(data.train) if data.held_out is None else "demo:heldout"
    own = (
        (
            "on more of your videos, with a larger encoder: see what it would cost, then run it",
            "marey ingest FOLDER my.lance\nmarey plan data=custom data.train=my.lance recipe=consumer_vit_tiny\n"
            "marey train data=custom data.train=my.lance recipe=consumer_vit_tiny",
        )
        if data.held_out is None
        else ("the same story on a folder of your own videos, which need no labels", "marey demo --videos FOLDER")
    )
    predictor = run / "future" / "checkpoints" / "last.ckpt"
    foretold = [("more futures, as video", f"marey rollout {shlex.quote(str(predictor))} --clips 4")]
    return [
        ("what experiment this run was", f"marey inspect {shlex.quote(str(run))}"),
        ("its features, one row per clip", f"marey embed {quoted} {source} features.parquet"),
        *(foretold if predictor.exists() else []),
        own,
    ]
