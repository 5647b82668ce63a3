"""What a run's newest checkpoint shows of itself on its page: feature pictures, or futures that play side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marey.core.errors import UserError
from marey.evaluation import page as html
from marey.evaluation.describing import input_words
from marey.evaluation.feature_pictures import feature_parts
from marey.evaluation.features import capped_remark, open_clips, rate_remark, refusal_remark, short_remark
from marey.evaluation.future_films import film_of
from marey.evaluation.future_page import future_figures, future_intro
from marey.evaluation.gathering import draw_clips, gather
from marey.evaluation.loading import load_encoder, random_twin, resolve_device
from marey.evaluation.probe import PRETRAINED, RANDOM
from marey.evaluation.rolling import COPY, PREDICTION, STILL, mean
from marey.evaluation.rollout import roll_out
from marey.evaluation.run_state import data_path

PICTURED = 3
"""Clips that are pictured patch by patch, and futures that play."""
MEASURED = 4
"""Futures whose errors are averaged, at most."""


def encoder_pictures(
    receipt: Mapping[str, Any], checkpoint: Path, *, data: str | None, clips: int, seed: int, device: str
) -> str:
    """What the encoder makes of clips, and what to bear in mind about them.

    data: None takes the run's own validation data, else its training data. Raises UserError as reading does.
    """
    where = resolve_device(device)
    loaded = load_encoder(checkpoint, device=where)
    path, role = (data, "") if data is not None else data_path(receipt)
    source = open_clips(path, loaded.preprocessing)
    drawn, numbers = draw_clips(source, loaded.preprocessing, count=clips, seed=seed)
    encoders = {PRETRAINED: loaded.encoder, RANDOM: random_twin(loaded, device=where)}
    found = gather(encoders, loaded.preprocessing, drawn, numbers, pictured=PICTURED, device=where)
    whose = {"": "", "validation": ", the run's validation data", "training": ", which training saw too"}[role]
    remarks = [
        _starting(loaded.info.starting_share),
        rate_remark(source, loaded.preprocessing),
        short_remark(drawn),
        capped_remark(drawn) if clips > len(source.lengths) else None,
        refusal_remark(found.refused),
    ]
    about = f"step {loaded.info.step:,}, {loaded.info.weights} weights"
    return html.section(
        "A look inside",
        intro=f"From the newest checkpoint ({checkpoint.name}, {about}), beside the same encoder with the random "
        "weights it started from: what both show comes from the architecture and the pixels, what only the first shows "
        "was learnt. "
        f"The clips, {len(found.thumbs):,} of {source.path}{whose}, were drawn by the seed and not chosen. Each is "
        f"{input_words(_input(loaded.preprocessing))}.",
        body_html="".join(html.note(remark) for remark in remarks if remark) + feature_parts(found),
    )


def _input(preprocessing: Any) -> dict[str, Any]:
    return {**vars(preprocessing), "layout": "B,C,T,H,W", "resize": "short side to img_size", "crop": "centre"}


def future_pictures(checkpoint: Path, *, data: str | None, clips: int, seed: int, device: str) -> str:
    """Futures of held-out clips, predicted, playing beside what followed. Raises UserError as rolling out does."""
    loaded, rollouts = roll_out(checkpoint, data=data, clips=min(clips, MEASURED), seed=seed, device=device)
    first = rollouts[0]
    known, horizon = first.clip.split
    kept = all(item.clip.held_out for item in rollouts)
    doubt = _starting(loaded.starting_share)
    return html.section(
        "What it expects to happen next",
        intro=future_intro(
            model="The model",
            known=known,
            predicted=horizon,
            seen="held out from training" if kept else "of which nothing here says whether training saw them",
        ),
        body_html=(html.note(doubt) if doubt else "")
        + future_figures(
            [film_of(item) for item in rollouts[:PICTURED]],
            {name: mean([item.mean(name) for item in rollouts]) for name in (PREDICTION, STILL, COPY)},
            clips=len(rollouts),
        )
        + html.how(
            f"The newest checkpoint, step {loaded.step:,}, {loaded.weights} weights, from noise in 25 Euler steps. "
            f"Frames are latent frames; pictures are {first.decoded_by}, at half speed."
        ),
    )


def _starting(share: float) -> str:
    """What to bear in mind of an average that is partly its first weights; empty below 1%."""
    if share <= 0.01:
        return ""
    return f"{share:.0%} of the EMA weights shown here are still the random ones that the average started from."


def pictures(
    receipt: Mapping[str, Any], checkpoint: Path, *, data: str | None, clips: int, seed: int, device: str
) -> str:
    """Whatever fits the kind of run."""
    if receipt.get("kind") == "causal":
        return future_pictures(checkpoint, data=data, clips=clips, seed=seed, device=device)
    if receipt.get("kind") in (None, "encoder"):
        return encoder_pictures(receipt, checkpoint, data=data, clips=clips, seed=seed, device=device)
    raise UserError(f"there are no pictures for a run of kind {receipt.get('kind')!r}")
