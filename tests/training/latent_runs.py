"""Small latent sources, and causal runs on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from marey.config.causal import CausalConfig
from marey.config.compose import compose_container, validate
from marey.training.again import Again

from .conftest import Finished

SMALL = (
    "model.hidden=16",
    "model.layers=1",
    "model.heads=2",
    "model.patch=2",
    "loader.num_workers=0",
    "trainer.accelerator=cpu",
    "trainer.logger=false",
    "trainer.enable_progress_bar=false",
    "trainer.limit_val_batches=0",
    "trainer.log_every_n_steps=1",
    "checkpoint.every_n_train_steps=1",
    "data.buckets=[[1,2],[1,4],[2,6]]",
    "data.val_fraction=0.25",
    "data.batching.bucket_pool_size=8",
)
FPS = 4.0


def write(
    folder: Path,
    name: str,
    clips: int,
    *,
    canvases: Sequence[tuple[int, int]] = ((4, 4),),
    lengths: Sequence[int] = (3, 5, 8, 9),
    broken: Sequence[int] = (),
    channels: int = 3,
) -> Path:
    """A manifest of ``clips`` latents; lengths and canvases go round."""
    rng = np.random.default_rng(len(name))
    rows = ["clip_id,path,length_frames,height,width,fps,text"]
    for i in range(clips):
        (height, width), frames = canvases[i % len(canvases)], lengths[i % len(lengths)]
        values = rng.standard_normal((channels, frames, height, width)).astype(np.float32)
        if i in broken:
            (folder / f"{name}{i}.npy").write_bytes(b"not an array")
        else:
            np.save(folder / f"{name}{i}.npy", values)
        rows.append(f"{name}{i},{name}{i}.npy,{frames},{height},{width},{FPS},a {name} of {i}")
    path = folder / f"{name}.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def load(*overrides: str) -> CausalConfig:
    return validate(compose_container([*SMALL, *overrides], config_name="causal_video"), CausalConfig)


def one_source(folder: Path, *, clips: int = 40) -> tuple[str, ...]:
    path = folder / "a.csv"
    if not path.exists():
        write(folder, "a", clips)
    return (f"data.train={path}",)


def mixture(folder: Path) -> tuple[str, ...]:
    """Two sources, two canvases in one of them, weights 2 : 1."""
    if not (folder / "a.csv").exists():
        write(folder, "a", 24, canvases=((4, 4), (4, 6)))
        write(folder, "b", 16, canvases=((4, 4),))
    a, b = folder / "a.csv", folder / "b.csv"
    return (f"data.sources=[{{name: a, manifest: {a}, weight: 2}}, {{name: b, manifest: {b}}}]",)


def runner(tmp_path: Path) -> Callable[..., Finished]:
    """Runs ``fit`` on a causal configuration in this process: ``run(name, *overrides)``."""

    def run(name: str, *overrides: str) -> Finished:
        from marey.training.fit import fit

        folder, kept = tmp_path / name, tmp_path / f"{name}-checkpoints"
        folder.mkdir(exist_ok=True)
        lines: list[str] = []
        newest = fit(
            load(*overrides),
            run_dir=folder,
            checkpoint_dir=kept,
            differences=[],
            command=["marey", "train", *overrides],
            again=Again(program=["marey", "train"], overrides=overrides, folder=tmp_path, run_dir=folder),
            say=lines.append,
        )
        return Finished(folder, kept, lines, newest)

    return run
