"""A complete causal run from manifests: every key written out, nothing to look up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from marey.core.errors import UserError
from marey.core.files import write_text
from marey.latents.manifest import Manifest, hold_out, read_manifest, smallest_split
from marey.latents.sidecar import read_shape

Weighing = Literal["balanced", "hours", "size"]
_MEANING = {"balanced": "by_draw", "hours": "by_hours", "size": "by_size"}

# Choices of this recipe, not a promise about a device.
BATCH = 36
POOL = 1152
# Shares held out, of which the first that leaves neither side empty is taken: a few clips may all hash to
# one side.
HELD_OUT = (0.05, 0.1, 0.2, 0.3, 0.5)

_HEADER = """\
# Written by `marey make-config`: a complete causal latent-video run. Train it with
#   marey train --config-dir {folder} --config-name {name}
# and forecast it first with `marey plan --config-dir {folder} --config-name {name}`.
# Its batch of {batch} samples per rank is a recipe's choice: on a new device start small, for example with
# data.train_batch_size=2.
"""


def make_config(
    manifests: Sequence[Path | str], out: Path | str, *, defaults: Mapping[str, Any], weights: Weighing = "hours"
) -> dict[str, Any]:
    """Write ``out`` (YAML) for a mixture of ``manifests`` and return it as plain values.

    ``defaults`` is the plain composed ``causal_video`` configuration. Each manifest becomes a source of
    weight 1, counted in what ``weights`` says. Raises UserError for a bad manifest, one without height and
    width, one without fps under ``hours``, or clips of different numbers of channels.
    """
    if not manifests:
        raise UserError("make-config needs at least one manifest.")
    if weights not in _MEANING:
        raise UserError(f"--weights {weights} is not one of {', '.join(_MEANING)}.")
    read = [read_manifest(path) for path in manifests]
    for manifest in read:
        if manifest.height is None:
            raise UserError(
                f"{manifest.path}: it has no columns height and width, which grouping by shape needs; add them "
                "(latent rows and columns)."
            )
        if weights == "hours" and manifest.fps is None:
            raise UserError(
                f"{manifest.path}: it has no column fps, so its hours are unknown; add it (latent frames per second) "
                "or use --weights size or balanced."
            )
    target = Path(out)
    if target.suffix not in (".yaml", ".yml"):
        raise UserError(f"{target}: a run's configuration ends in .yaml; choose such a name.")
    base = target.parent.resolve()
    names = _names([manifest.path for manifest in read])
    plain: dict[str, Any] = {key: _copied(value) for key, value in defaults.items()}
    plain["data"] |= {
        "name": target.stem,
        "train": None,
        "val": None,
        "val_fraction": _held_out(read),
        "sources": [
            {"name": name, "manifest": str(manifest.path.resolve()), "weight": 1.0, "layout": None}
            for name, manifest in zip(names, read, strict=True)
        ],
        "weights": _MEANING[weights],
        "train_batch_size": BATCH,
        "val_batch_size": 1,
        "shape_bucketed_batching": True,
    }
    plain["data"]["batching"] |= {"mode": "bucket", "bucket_pool_size": POOL, "drop_last_train": True}
    plain["model"] |= {"channels": _channels(read), "patch": _patch(read)}
    hydra = {
        "defaults": [
            "_self_",
            {"override hydra/job_logging": "none"},
            {"override hydra/hydra_logging": "none"},
        ],
        **plain,
        "hydra": {"job": {"chdir": False}},
    }
    header = _HEADER.format(folder=base, name=target.stem, batch=BATCH)
    write_text(target, header + yaml.safe_dump(hydra, sort_keys=False, allow_unicode=True, width=120))
    return plain


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value


def _names(paths: Sequence[Path]) -> list[str]:
    """A name for each manifest: its stem, with parent folders as far as needed to tell them apart."""
    for depth in range(8):
        names = ["-".join([*path.resolve().parts[-1 - depth : -1], path.stem]).strip("/") for path in paths]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"{paths[0]}: the same manifest is given twice; name each once.")


def _held_out(manifests: Sequence[Manifest]) -> float:
    found = smallest_split(manifests, HELD_OUT)
    if found is None:
        hold_out(manifests, HELD_OUT[-1])  # says which side is empty
    assert found is not None
    return found


def _channels(manifests: Sequence[Manifest]) -> int:
    found: dict[int, str] = {}
    for manifest in manifests:
        clip = manifest.clip(0)
        found.setdefault(read_shape(clip.path, clip=clip.clip_id)[0], str(manifest.path))
    if len(found) > 1:
        (a, first), (b, second) = list(found.items())[:2]
        raise UserError(f"{first} holds latents of {a} channels and {second} of {b}; one model reads one kind.")
    return next(iter(found))


def _patch(manifests: Sequence[Manifest]) -> int:
    """2 where every canvas divides by it, else 1."""
    even = all(
        not (cells % 2).any()
        for manifest in manifests
        for cells in (manifest.height, manifest.width)
        if cells is not None
    )
    return 2 if even else 1
