"""``marey rollout``: held-out clips, their predicted futures as pictures, and the errors beside two baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save

from marey.core.errors import UserError
from marey.core.files import atomic_write, refuse_unwritable_folder, write_json
from marey.core.progress import Progress
from marey.evaluation.causal_loading import LoadedCausal, load_causal
from marey.evaluation.films import DEFAULT_FPS, side_by_side, write_gif, write_mp4
from marey.evaluation.latent_sample import CodecChoice, choose, open_candidates
from marey.evaluation.loading import Weights, resolve_device
from marey.evaluation.rolling import Rollout, lead_frames, predict, splits_of, summary_lines
from marey.objectives.rollout import SamplerSettings


def roll_out(
    checkpoint: Path,
    *,
    data: str | None = None,
    clip: str | None = None,
    clips: int = 1,
    prefix: int | None = None,
    horizon: int | None = None,
    steps: int = 25,
    guidance: float = 1.0,
    text: str | None = None,
    seed: int = 0,
    weights: Weights | None = None,
    codec: CodecChoice | None = None,
    device: str = "auto",
) -> tuple[LoadedCausal, list[Rollout]]:
    """Predict the future of ``clips`` held-out clips (or of the one named ``clip``).

    data: a manifest, a folder of `marey encode`, a store, or ``demo:SPLIT``; None takes what the run held out. Which
    clips, and the noise they start from, follow from ``seed``. Raises UserError as the pieces it is made of do.
    """
    loaded = load_causal(checkpoint, weights=weights, device=resolve_device(device))
    found = choose(
        open_candidates(loaded.config, data=data, lead=lead_frames(loaded), chosen=codec),
        splits_of(loaded, prefix=prefix, horizon=horizon),
        clip=clip,
        count=clips,
        seed=seed,
    )
    settings = SamplerSettings(steps=steps, guidance=guidance, seed=seed)
    rollouts = []
    with Progress("roll out", total=len(found), unit="clips") as progress:
        for item in found:
            rollouts.append(predict(loaded, item, settings=settings, text=text))
            progress.advance()
    return loaded, rollouts


def write_rollouts(out: Path, loaded: LoadedCausal, rollouts: Sequence[Rollout]) -> list[Path]:
    """Pictures, latents and errors into the folder ``out``; returns the files, pictures first.

    Raises UserError where ``out`` cannot be a folder, or not be written to.
    """
    try:
        return _write_rollouts(out, loaded, rollouts)
    except OSError as error:
        refuse_unwritable_folder(out, option="--out")
        raise UserError(f"--out {out} cannot be written ({error.strerror or error}); give another place") from error


def _write_rollouts(out: Path, loaded: LoadedCausal, rollouts: Sequence[Rollout]) -> list[Path]:
    written = []
    for number, item in enumerate(rollouts, start=1):
        stem = "rollout" if len(rollouts) == 1 else f"rollout-{number:03d}"
        frames = side_by_side(
            [("what followed", item.target_pictures), ("predicted", item.predicted_pictures)], known=item.known_pictures
        )
        fps = frames_per_second(item)
        write_mp4(out / f"{stem}.mp4", frames, fps=fps)
        write_gif(out / f"{stem}.gif", frames, fps=fps)
        known = item.clip.split.known
        tensors = {
            "known": item.clip.latents[:, :known].contiguous(),
            "target": item.clip.latents[:, known:].contiguous(),
            "prediction": item.predicted.contiguous(),
        }
        with atomic_write(out / f"{stem}.safetensors") as file:
            file.write(save(tensors, metadata={"clip": item.clip.name}))
        written += [out / f"{stem}.mp4", out / f"{stem}.gif", out / f"{stem}.safetensors"]
    write_json(
        out / "rollout.json",
        {
            "format": 1,
            "checkpoint": str(loaded.path),
            "weights": loaded.weights,
            "step": loaded.step,
            "rollouts": [item.as_dict() for item in rollouts],
        },
    )
    return [*written, out / "rollout.json"]


def frames_per_second(item: Rollout) -> float:
    """Of the pictures: the clip's own, where it says."""
    fps = item.clip.fps
    if fps is None:
        return DEFAULT_FPS
    codec = item.clip.codec
    return fps * (codec.temporal if codec is not None and item.pixel_errors is not None else 1)


def rollout_text(
    loaded: LoadedCausal, rollouts: Sequence[Rollout], files: Sequence[Path], *, asked: int | None = None
) -> str:
    """What came out, in about ten lines. ``asked``: how many clips; fewer are said to be fewer."""
    lines = [f"{loaded.path}: step {loaded.step:,}, {loaded.weights} weights", *summary_lines(rollouts)]
    if asked is not None and len(rollouts) < asked:
        lines.append(f"  note      {len(rollouts)} of {asked} clips asked for: no more are long enough and held out")
    if loaded.starting_share > 0.01:
        lines.append(f"  note      {loaded.starting_share:.0%} of the EMA weights are still where the copy started")
    return "\n".join([*lines, f"  files     {files[0].parent}: {', '.join(file.name for file in files[:6])}"])
