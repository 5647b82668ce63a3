"""Everything a demonstration measures once its run has ended, and how it is told."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from marey.config.schema import EncoderConfig
from marey.core.errors import UserError
from marey.evaluation.checkpoint_file import read_checkpoint
from marey.evaluation.demo_facts import (
    Gallery,
    headline,
    headline_without_labels,
    lede,
    neighbour_sets,
    pick,
    verdict,
)
from marey.evaluation.demo_page import Picture, Story, render
from marey.evaluation.describing import batch_words, data_words, experiment, input_words, model_words
from marey.evaluation.feature_pictures import colour_part, gaze_part, similarity_part
from marey.evaluation.features import (
    ClipFeatures,
    clip_features,
    evaluation_clips,
    open_clips,
    refusal_remark,
    short_remark,
    video_names,
)
from marey.evaluation.future_page import Future
from marey.evaluation.gathering import gather
from marey.evaluation.labels import labels_from_csv
from marey.evaluation.loading import LoadedEncoder, load_encoder, random_twin
from marey.evaluation.measure import ProbeResult, measure
from marey.evaluation.probe import PRETRAINED, RANDOM, side_of
from marey.evaluation.run_folder import read_metrics, read_receipt
from marey.evaluation.seen import what_the_encoder_sees
from marey.evaluation.wording import count, dig
from marey.models.vit import VisionTransformer
from marey.pixels.evalclips import EvalClips

Say = Callable[[str], None]
NEIGHBOUR_SETS = 3


@dataclass(frozen=True)
class LabelTable:
    """A label to probe, and the CSVs (column ``path``) that give it for both sides.

    ``column`` is what a probe may learn from, which may leave most videos out. Where a CSV has a column ``name`` too,
    that one says the label of every video: for captions, and for whether two clips show the same.
    """

    name: str
    column: str
    train: Path
    held_out: Path


@dataclass(frozen=True)
class Results:
    """A told story and the numbers in it."""

    story: Story
    probes: list[ProbeResult]


def evaluate(
    *,
    run: Path,
    checkpoint: Path,
    train: str,
    held_out: str | None,
    labels: Sequence[LabelTable],
    commands: Sequence[tuple[str, str]],
    shown: int,
    seed: int,
    say: Say = print,
    future: Future | None = None,
    notes: Sequence[str] = (),
) -> Results:
    """Probe the checkpoint of ``run`` beside its random twin, and gather what the page shows.

    train, held_out: stores. labels: what to probe; without any (then ``held_out`` may be None) neighbours alone
    are shown. future: what the second act gave. notes: more remarks for the page.
    Raises UserError as reading the run and its data does.
    """
    metrics = read_metrics(run / "metrics.csv")
    loaded = load_encoder(checkpoint)
    encoders = {PRETRAINED: loaded.encoder, RANDOM: random_twin(loaded)}
    remarks = [*notes, loaded.info.remark()]
    galleries: list[Gallery] = []
    for path in (train, held_out):
        if path is None:
            continue
        source = open_clips(path, loaded.preprocessing)
        clips = evaluation_clips(source, loaded.preprocessing, clips_per_episode=1)
        features = clip_features(encoders, loaded.preprocessing, clips, label=f"features of {source.name}")
        remarks += [short_remark(clips), refusal_remark(features.refused)]
        galleries.append(_gallery(clips, features, labels, held_out=bool(galleries)))
    probes = [_probe(table, galleries, seed=seed) for table in labels]
    asked = galleries[-1]
    queries = pick(asked.captions, count=NEIGHBOUR_SETS, seed=seed, purpose="demo-queries")
    config = EncoderConfig.model_validate(loaded.info.config)
    for note in filter(None, remarks):
        say(f"note: {note}")
    story = Story(
        title=_title(probes, galleries[0], metrics, config),
        lede=_lede(galleries[0], loaded, metrics, config),
        clips=_motions(galleries[0], pick(galleries[0].captions, count=shown, seed=seed, purpose="demo-clips")),
        seen=what_the_encoder_sees(config, [galleries[0].clips.source]),
        drop_rate=config.model.token_drop_rate,
        metrics=metrics,
        sigreg_weight=config.loss.sigreg.weight,
        probes=probes,
        neighbours=neighbour_sets(asked, galleries[0], queries),
        receipt=receipt_facts(run, checkpoint, loaded),
        commands=commands,
        notes=[note for note in remarks if note],
        future=future,
        inside_html=_inside(encoders, loaded, asked, queries),
    )
    return Results(story, probes)


def page(results: Results) -> str:
    """The story as HTML."""
    return render(results.story)


def summary(results: Results, *, report: Path, run: Path, checkpoint: Path) -> list[str]:
    """About ten lines: what came out, where everything is, what to do next."""
    lines = ["", results.story.title, ""]
    for result in results.probes:
        scores, baseline = result.encoders[PRETRAINED], result.encoders[RANDOM]
        gain = result.gains["linear"]
        lines.append(
            f"  {result.label:<8}linear {scores.linear.accuracy:.1%} (random weights {baseline.linear.accuracy:.1%}, "
            f"difference {100 * gain.value:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]), "
            f"kNN {scores.knn.accuracy:.1%} ({baseline.knn.accuracy:.1%}), chance {result.chance.accuracy:.1%}"
        )
    if results.story.future is not None:
        lines.append(f"  future    {verdict(results.story.future)}")
    lines += [f"  page        {report.as_uri()}", f"  run         {run}", f"  checkpoint  {checkpoint}"]
    return lines + ["  next        " + command.splitlines()[0] for _, command in results.story.commands]


def _probe(table: LabelTable, galleries: Sequence[Gallery], *, seed: int) -> ProbeResult:
    sides = [
        side_of(
            gallery.features,
            gallery.clips.source,
            labels_from_csv(gallery.clips.source.files, file, table.column, where=gallery.clips.source.path),
        )
        for gallery, file in zip(galleries, (table.train, table.held_out), strict=True)
    ]
    return measure(*sides, label=table.name, seed=seed)


def _gallery(clips: EvalClips, features: ClipFeatures, labels: Sequence[LabelTable], *, held_out: bool) -> Gallery:
    source = clips.source
    columns = [
        labels_from_csv(source.files, file, _told(table, file), where=source.path).values
        for table in labels
        for file in [table.held_out if held_out else table.train]
    ]
    words = [[column[episode] or "" for column in columns] for episode in features.episodes]
    if not columns:
        captions = [Path(source.files[episode]).name for episode in features.episodes]
        return Gallery(clips, features, captions, [""] * len(captions))
    return Gallery(clips, features, [", ".join(filter(None, row)) for row in words], [row[0] for row in words])


def _told(table: LabelTable, file: Path) -> str:
    """The column that says the label of every video."""
    with file.open(newline="", encoding="utf-8-sig") as text:
        return table.name if table.name in next(csv.reader(text), []) else table.column


def _inside(
    encoders: Mapping[str, VisionTransformer], loaded: LoadedEncoder, gallery: Gallery, rows: Sequence[int]
) -> str:
    """Patch colours, a patch followed and [CLS]'s gaze for clips of a gallery."""
    usable = np.searchsorted(gallery.clips.index.episodes, gallery.features.episodes[list(rows)])
    numbers = [
        gallery.clips.item(int(episode), int(gallery.features.clips[row]))
        for episode, row in zip(usable, rows, strict=True)
    ]
    found = gather(encoders, loaded.preprocessing, gallery.clips, numbers, pictured=len(numbers))
    return "".join((colour_part(found), similarity_part(found), gaze_part(found)))


def _motions(gallery: Gallery, rows: Sequence[int]) -> list[Picture]:
    return [shown for row in rows if (shown := gallery.motion(row)) is not None]


def _last(metrics: dict[str, list[float]], column: str) -> float:
    return next((x for x in reversed(metrics.get(column, [])) if math.isfinite(x)), math.nan)


def _title(
    probes: Sequence[ProbeResult], gallery: Gallery, metrics: dict[str, list[float]], config: EncoderConfig
) -> str:
    if probes:
        return headline(probes[0], what=f"{probes[0].label}s")
    return headline_without_labels(
        len(set(video_names(gallery.clips.source))),
        rank=_last(metrics, "train/embedding_rank"),
        width=config.projector.output_dim,
    )


def _lede(gallery: Gallery, loaded: LoadedEncoder, metrics: dict[str, list[float]], config: EncoderConfig) -> str:
    videos = len(set(video_names(gallery.clips.source)))
    return lede(
        clips=int(_last(metrics, "clips_seen")),
        steps=loaded.info.step,
        seconds=_last(metrics, "wall_seconds"),
        kept=1 - config.model.token_drop_rate,
        videos=count(videos, "video"),
    )


def receipt_facts(run: Path, checkpoint: Path, loaded: LoadedEncoder) -> dict[str, str]:
    """What the run recorded of itself, name by name, in words."""
    content: dict[str, Any] = read_checkpoint(checkpoint)
    about, config = content["marey"], loaded.info.config
    try:
        receipt = read_receipt(run)
    except UserError as error:  # the page is still worth having; it says what is missing
        receipt = {}
        missing = str(error)
    else:
        missing = ""
    facts = {
        "experiment": experiment(config),
        "batch": batch_words(
            effective=about.get("effective_batch"),
            statistic=about.get("statistic_batch"),
            norm_group=about.get("norm_group"),
            world=about.get("world_size"),
            reference=dig(config, "recipe", "reference") or {},
        ),
        "progress": f"{about.get('step'):,} optimizer steps, {count(int(about.get('epoch', 0)) + 1, 'epoch')}",
        "model": model_words(config.get("model") or {}),
        "input": input_words(about.get("preprocessing") or {}),
        "data": data_words(config),
        "seed": str(config.get("seed")),
        "weights probed": f"{loaded.info.weights}",
        "how it ended": str(receipt.get("how_it_ended") or receipt.get("status") or missing),
        "checkpoint": str(checkpoint),
        "full receipt": str(run / "receipt.json"),
    }
    return {name: text for name, text in facts.items() if text}
